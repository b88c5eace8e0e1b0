"""Which ranks held the others up: by their own work before each collective, never by how long a step took them.

A slow rank's victims wait in a collective or for the pipeline, and their steps are as long as its own. Pure rules over
what the ranks reported; what they find is an observation and decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from workers.contract import Observation, StepReport

WORK_RATIO = 2.0
"""A straggler works for more than twice as long as its peers: they wait for it for longer than they work themselves."""
LEAST_DELAY_S = 0.1
"""Shorter delays cannot be told from what the scheduler of a busy machine takes from a rank."""

Peers = tuple[int, int, int, int, str]
"""(trial_index, step, pp_rank, tp_rank, phase): ranks that did the same work on other data."""


@dataclass(frozen=True, slots=True)
class Delay:
    """One rank that worked longer than its peers in one phase of one step."""

    report: StepReport
    phase: str
    own_s: float
    peers_s: float

    @property
    def seconds(self) -> float:
        """By how much."""
        return self.own_s - self.peers_s


def delays(reports: Iterable[StepReport]) -> Iterator[Delay]:
    """Every delay; a rank is compared with the median of its dp peers of one stage, so that dp=1 shows none."""
    together: defaultdict[Peers, list[StepReport]] = defaultdict(list)
    for report in reports:
        for phase in report.compute_seconds:
            together[report.trial_index, report.step, report.pp_rank, report.tp_rank, phase].append(report)
    for (_, _, _, _, phase), peers in together.items():
        yield from _delays_among(peers, phase)


def observe_stragglers(reports: Sequence[StepReport]) -> tuple[Observation, ...]:
    """One observation for each straggler and phase, the one that cost most first."""
    found: defaultdict[tuple[int, str], list[Delay]] = defaultdict(list)
    for delay in delays(reports):
        found[delay.report.world_rank, delay.phase].append(delay)
    num_steps = len({(report.trial_index, report.step) for report in reports})
    worst_first = sorted(found.items(), key=lambda item: -max(delay.seconds for delay in item[1]))
    return tuple(_observation(world_rank, phase, of_rank, num_steps) for (world_rank, phase), of_rank in worst_first)


def _delays_among(peers: Sequence[StepReport], phase: str) -> Iterator[Delay]:
    seconds: Mapping[int, float] = {report.world_rank: report.compute_seconds[phase] for report in peers}
    for report in peers:
        others = [value for world_rank, value in seconds.items() if world_rank != report.world_rank]
        if not others:
            continue
        delay = Delay(report, phase, seconds[report.world_rank], median(others))
        if delay.seconds > LEAST_DELAY_S and delay.own_s > WORK_RATIO * delay.peers_s:
            yield delay


def _observation(world_rank: int, phase: str, of_rank: Sequence[Delay], num_steps: int) -> Observation:
    worst = max(of_rank, key=lambda delay: delay.seconds)
    at = f"trial {worst.report.trial_index}, step {worst.report.step}"
    message = (
        f"world_rank {world_rank} held its peers up in phase {phase} in {len(of_rank)} of {num_steps} steps: at worst, "
        f"in {at}, it worked for {worst.own_s * 1e3:.0f} ms before the next collective and the other replicas of its "
        f"stage for {worst.peers_s * 1e3:.0f} ms (median)"
    )
    return Observation("straggler", message, world_rank)
