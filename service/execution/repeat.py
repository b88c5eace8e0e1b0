"""Whether a finished run failed, and how its failing trials are run again with the ranks in other seats.

The repeat keeps the reservation, so that no room has to be found, and starts fresh processes, so that nothing of the
first run is left in them. It can only explain a verdict: nothing that happens here changes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.domain.cause import Seat, Sighting, attribute, reseat, unknown
from service.execution.beacon import BeaconServer
from service.execution.gang import Gang, start_ranks
from service.execution.messages import Repeated
from workers.attribution import find_guilt
from workers.contract import Fingerprint, StepReport, TrialSpec
from workers.evidence import Evidence
from workers.verdict import failing, judge

NO_PERMUTATION_BY_TRAIN = "not repeated with the ranks in other seats: Ray Train places its ranks itself"


@dataclass(frozen=True, slots=True)
class Failure:
    """What failed in a run: the trials to repeat, what they are called, and whom each probe and ordering points to."""

    trials: tuple[TrialSpec, ...]
    titles: tuple[str, ...]
    suspects: tuple[frozenset[int], ...]

    def seen_from(self, seats: tuple[Seat, ...]) -> Sighting:
        """The failure with its ranks in these seats."""
        return Sighting(seats, self.suspects)


def failure_of(plan: Sequence[TrialSpec], reports: Sequence[StepReport]) -> Failure:
    """Judge a run; empty where nothing failed. Takes as long as the judge."""
    failed = failing(plan, reports)
    again = tuple(spec for evidence in failed for spec in evidence.specs.values())
    return Failure(again, tuple(evidence.title for evidence in failed), tuple(_suspects(each) for each in failed))


def _suspects(evidence: Evidence) -> frozenset[int]:
    guilt = find_guilt(evidence)
    return frozenset() if guilt is None else frozenset(guilt.suspects)


def seats_of(fingerprints: Sequence[Fingerprint]) -> tuple[Seat, ...]:
    """Where each rank sits, by world_rank."""
    return tuple(Seat(rank.node, rank.device_uuid) for rank in sorted(fingerprints, key=lambda rank: rank.world_rank))


def other_seats(failure: Failure, seats: Sequence[Seat]) -> tuple[int, ...] | Repeated:
    """Whose seat each rank is to take, or why a repeat would show nothing."""
    accused = failure.seen_from(tuple(seats)).accused
    if not accused:
        return _vain("the failures do not point to any rank, so that there is nothing to follow")
    if (taken := reseat(seats, accused)) is not None:
        return taken
    nodes = sorted({seat.node for seat in seats})
    if len(nodes) > 1:
        message = f"more than half of the ranks sit on one of {', '.join(nodes)}, too many to move to the others"
        return _vain(f"{message}; spread them evenly (placement.nodes) to tell a rank from a node")
    return _vain(f"all ranks sit on {nodes[0]}, which has no other device for them; use two nodes or several GPUs")


def _vain(message: str) -> Repeated:
    return Repeated(unknown(f"not repeated with the ranks in other seats: {message}"))


async def move(gang: Gang, taken: Sequence[int], beacons: BeaconServer) -> Gang:
    """End a gang's ranks and start others in its seats. The caller lets them join. Raises GangFailure."""
    return start_ranks(await gang.vacate(), beacons, taken)


async def run_elsewhere(
    gang: Gang, names: Mapping[str, str], failure: Failure, first_seats: tuple[Seat, ...]
) -> Repeated:
    """Run the failed trials on a gang that `move` started, and say what the fault follows. Raises GangFailure."""
    reports: list[StepReport] = []
    await gang.join(names)
    await gang.run(failure.trials, reports.extend)
    seats = seats_of(gang.fingerprints)
    nodes = {world_rank: seat.node for world_rank, seat in enumerate(seats)}
    again = await asyncio.to_thread(failure_of, failure.trials, reports)
    judgement = await asyncio.to_thread(judge, failure.trials, reports, nodes)
    if missing := [trial for trial in judgement.trials if trial.missing_reports]:
        return Repeated(
            unknown(f"the repeat with the ranks in other seats lacks reports of {missing[0].probe.value}"), seats
        )
    found = judgement.reasons if again.titles else ()
    return Repeated(attribute(failure.seen_from(first_seats), again.seen_from(seats)), seats, found)
