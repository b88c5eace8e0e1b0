"""Ranks' last words over a real store, each rank a thread: who is heard, who is missed, and one exit code for all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from workers import rollcall
from workers.contract import Position, RankFailure, RankPhase
from workers.errors import CollectiveError
from workers.rollcall import ERROR_CODE, RollCall, Word, waiting


def failure(world_rank: int) -> RankFailure:
    return waiting(Position(world_rank, RankPhase.TIE, 1, 0, 7), "node-a", "it was told to terminate")


def run(words: dict[int, Word], world_size: int) -> tuple[dict[int, int], list[tuple[int, list[int]]]]:
    """Exit codes by rank, and (rank that concluded, ranks it heard). Ranks without a word are dead."""
    store, concluded, codes = dist.HashStore(), [], {}

    def conclude_as(world_rank: int) -> Callable[[tuple[Word, ...]], int]:
        def conclude(heard: tuple[Word, ...]) -> int:
            concluded.append((world_rank, [word.world_rank for word in heard]))
            return 7

        return conclude

    def rank_main(world_rank: int) -> None:
        call = RollCall(store, world_rank, world_size, 20.0, conclude_as(world_rank), lambda _: words[world_rank])
        codes[world_rank] = call.finish(words[world_rank])

    threads = [threading.Thread(target=rank_main, args=(world_rank,)) for world_rank in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes, concluded


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollcall, "STRAGGLER_S", 0.4)


def test_all_agree_on_what_rank_0_concludes() -> None:
    codes, concluded = run({rank: Word(rank, None, ()) for rank in range(4)}, 4)
    assert codes == dict.fromkeys(range(4), 7)
    assert concluded == [(0, [0, 1, 2, 3])]


def test_a_dead_rank_is_missed_once_another_has_failed() -> None:
    codes, concluded = run({rank: Word(rank, None, (failure(rank),)) for rank in (0, 1, 3)}, 4)
    assert codes == {0: 7, 1: 7, 3: 7}
    assert concluded == [(0, [0, 1, 3])]


def test_the_next_living_rank_takes_over_from_a_dead_first() -> None:
    codes, concluded = run({rank: Word(rank, None, (failure(rank),)) for rank in (2, 3)}, 4)
    assert codes == {2: 7, 3: 7}
    assert concluded == [(2, [2, 3])]


def test_a_lost_store_is_an_error_not_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    del host
    call = RollCall(store, 1, 2, 5.0, lambda _: 0, lambda _: Word(1, None, ()))
    assert call.finish(Word(1, None, ())) == ERROR_CODE
    assert "world_rank 1 lost the rendezvous store" in capsys.readouterr().err


def test_collecting_gives_up_where_a_rank_has_failed() -> None:
    store = dist.HashStore()
    store.set("failed", "1")
    call = RollCall(store, 0, 2, 20.0, lambda _: 0, lambda _: Word(0, None, ()))
    with pytest.raises(CollectiveError, match=r"world ranks \[1\] did not say their device"):
        call.collect("device", "cpu")
    store.set("device/1", "cuda")
    assert call.collect("device", "cpu") == ("cpu", "cuda")


def test_a_stuck_rank_is_a_victim_with_a_place() -> None:
    said = failure(3)
    assert said.collateral
    assert said.message == "world_rank 3 was in tie when it was told to terminate"
    assert (said.world_rank, said.phase, said.trial_index, said.step) == (3, RankPhase.TIE, 1, 0)
    word = Word(3, None, (said,))
    assert word.failures == (said,)
    assert word.reports == ()
