"""What tests/bench/sensitivity.py prints, at its smallest: no judge is blunter than its bound says."""

from __future__ import annotations

from bench.sensitivity import JUDGES, Bench, smallest

from workers.contract import Dtype

BENCHES = {judge.name: Bench(3, Dtype.FLOAT32, judge) for judge in JUDGES}
UNIT_ROUNDOFF = 2.0**-24


def test_a_clean_run_stays_within_what_is_allowed() -> None:
    assert 0 < BENCHES["sync"].used() <= 1
    assert BENCHES["exact"].used() == 0


def test_exact_and_ends_see_the_last_bit() -> None:
    for name in ("exact", "ends"):
        assert BENCHES[name].sees_error(2 * UNIT_ROUNDOFF), name
    lost = smallest(BENCHES["exact"].sees_share)
    assert lost is not None
    assert lost < 1e-6


def test_sync_sees_what_rounding_cannot_explain() -> None:
    # 6 terms, two roundings of the pre-scale: the bound is 7 u sum|t|, and sum|t| is not far above the largest sum.
    error = smallest(BENCHES["sync"].sees_error)
    assert error is not None
    assert UNIT_ROUNDOFF < error < 2 * 7 * UNIT_ROUNDOFF


def test_reference_sees_a_share_that_all_ranks_agree_to_lose() -> None:
    assert BENCHES["reference"].sees_share(1e-5)
    assert not BENCHES["sync"].sees_share(2.0**-40)


def test_ends_are_blind_to_what_both_ends_lost_alike() -> None:
    assert not BENCHES["ends"].sees_share(1.0)
