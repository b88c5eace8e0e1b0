"""Which ranks compute with other settings than the rest, step by step. Pure; what it finds decides nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from workers.attribution import odd_ones_out
from workers.contract import ComputeSettings, Observation, StepReport
from workers.faults import SETTINGS_DIFFER


def observe_settings(reports: Sequence[StepReport]) -> Iterator[Observation]:
    """One observation for each rank that is unlike most others; one for all where no setting is most ranks'."""
    used: defaultdict[int, dict[str, None]] = defaultdict(dict)
    for report in reports:
        if report.settings is not None:
            used[report.world_rank][_words(report.settings)] = None
    said = {world_rank: " and then ".join(words) for world_rank, words in used.items()}
    odd = odd_ones_out(said) if said else ()
    usual = next((words for world_rank, words in said.items() if world_rank not in odd), None)
    for world_rank in odd if usual else ():
        message = f"world_rank {world_rank} computes with {said[world_rank]}, most ranks with {usual}"
        yield Observation(SETTINGS_DIFFER, f"{message}; their roundings may differ.", world_rank)
    if odd and not usual:
        listed = "; ".join(f"world_rank {world_rank}: {said[world_rank]}" for world_rank in odd[:8])
        yield Observation(SETTINGS_DIFFER, f"Ranks compute with different settings: {listed}.", None)


def _words(settings: ComputeSettings) -> str:
    threads = f"{settings.num_threads} thread" + ("s" if settings.num_threads != 1 else "")
    tf32 = ", TF32" if settings.allow_tf32 else ""
    return threads + tf32 + (", bf16 reductions" if settings.allow_bf16_reduction else "")
