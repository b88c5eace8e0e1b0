"""Somebody else's stack through dispatcher, Postgres and Ray: found by name, judged, named in verdicts and failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from service.domain.validation import State
from service.storage.capacity import latest
from workers.contract import Role, Verdict

from .conftest import STACKS_OF_OTHERS, Service, serve

REQUEST = {"probes": ["exact"], "orderings": ["buggy"]}


@pytest.fixture(scope="module")
def _installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STACKS_OF_OTHERS))
        yield


@pytest.fixture(scope="module")
async def service(
    postgres_url: str, ray_address: str, tmp_path_factory: pytest.TempPathFactory, _installed: None
) -> AsyncIterator[Service]:
    """A dispatcher whose environment has a package of stacks, and whose setting names one more."""
    named = "by-setting=acme_stack.ddp:PlainDdp"
    async with serve(postgres_url, tmp_path_factory.mktemp("home"), ray_address, stacks=named) as running:
        yield running


@pytest.mark.parametrize("stack", ["acme", "by-setting"])
async def test_a_right_stack_passes_and_its_version_is_in_the_fingerprint(service: Service, stack: str) -> None:
    validation = await service.validate(REQUEST | {"stack": stack})
    assert (validation.state, validation.verdict) == (State.COMPLETED, Verdict.PASS), validation
    told = [(trial.ordering, trial.role, trial.ok) for trial in validation.trials]
    assert told == [("buggy", Role.CONTROL, True), ("stack", Role.SUBJECT, True)]
    origin = {"name": stack, "target": "acme_stack.ddp:PlainDdp", "distribution": "acme-stack", "version": "1.2"}
    # By setting only a folder is named, of which a package without a list of its files says nothing.
    expected = origin if stack == "acme" else origin | {"distribution": None, "version": None}
    assert [rank["stack"] for rank in validation.fingerprint] == [expected] * 4


async def test_a_run_of_the_reference_says_nothing_of_the_stack_before_it(service: Service) -> None:
    validation = await service.validate(REQUEST | {"orderings": ["buggy", "own_bucket"]})
    assert validation.timings["warm"] is True
    assert [rank["stack"] for rank in validation.fingerprint] == [None] * 4


async def test_a_wrong_stack_fails_by_name(service: Service) -> None:
    validation = await service.validate(REQUEST | {"stack": "parameter-forgotten"})
    assert validation.verdict is Verdict.FAIL
    reason = next(reason for reason in validation.reasons if reason.code == "stack_gradient_wrong")
    assert "exact/stack parameter-forgotten: " in reason.message
    assert "on world_rank" in reason.message


async def test_a_stack_that_raises_is_named_with_its_rank(service: Service) -> None:
    validation = await service.validate(REQUEST | {"stack": "raises"})
    assert validation.error is not None
    assert (validation.error.code, validation.error.world_rank) == ("stack_failed", 1)
    assert "stack 'raises' (acme_stack.wrong:Raises, acme-stack 1.2) raised in finalize" in validation.error.message


async def test_a_stack_that_hangs_is_named_with_its_rank(service: Service) -> None:
    validation = await service.validate(REQUEST | {"stack": "hangs", "deadline_s": 20})
    assert validation.error is not None
    assert (validation.error.code, validation.error.world_rank) == ("deadline_exceeded", 1)
    assert "with stack 'hangs' under test" in validation.error.message


async def test_known_stacks_are_advertised_and_an_unknown_one_fails(service: Service) -> None:
    async with service.database.read() as connection:
        snapshot = await latest(connection, "test", 60)
    assert snapshot is not None
    assert {"reference", "acme", "by-setting", "raises"} <= set(snapshot.stacks)
    validation = await service.validate(REQUEST | {"stack": "nobodys"})
    assert validation.error is not None
    assert validation.error.code == "unknown_stack"
    assert "there is reference, acme" in validation.error.message
