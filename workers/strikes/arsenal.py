"""Which strike each fault of the catalogue is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from workers.contract import RankPhase
from workers.faults import FaultName, is_struck
from workers.strikes.collectives import (
    BitInReceiveBuffer,
    LayernormSkipped,
    NonfiniteBeforeGather,
    Reordered,
    Shortened,
    StaleView,
    TieDoubled,
    TieMean,
    TieOverWrongGroup,
    TieSkipped,
    TruncatedTail,
    WrongDivisor,
    WrongShardOwner,
)
from workers.strikes.gradients import (
    BitInGradient,
    MicrobatchLate,
    MicrobatchLost,
    MovingAverage,
    NonfiniteBefore,
    ParameterNotSynchronised,
)
from workers.strikes.process import MOMENTS, Breakdown
from workers.strikes.strike import Strike, Victim
from workers.strikes.weights import (
    BitInWeight,
    IdenticalData,
    OtherInitialWeights,
    OtherThreadCount,
    Slow,
    Tf32,
    TiedTwiceInNorm,
)

Make = Callable[[Victim, int], Strike]


def arm(victim: Victim, node: str) -> Strike:
    """The strike on this rank; one that does nothing where the drill is not for it. Local."""
    drill = victim.spec.drill
    if drill is None or not is_struck(victim.spec, victim.at.world_rank, node):
        return Strike(victim, 0)
    strike = STRIKES[FaultName(drill.fault)](victim, drill.step)
    if isinstance(strike, Breakdown):
        victim.links.intercept = strike
    return strike


def _breakdown(fault: FaultName) -> Make:
    return lambda victim, step: Breakdown(victim, step, fault)


def _nonfinite(value: float, phase: RankPhase) -> Make:
    if phase is RankPhase.OPTIMIZER:
        return lambda victim, step: NonfiniteBeforeGather(victim, step, value)
    return lambda victim, step: NonfiniteBefore(victim, step, value, phase)


STRIKES: Mapping[FaultName, Make] = MappingProxyType(
    {fault: _breakdown(fault) for fault in MOMENTS}
    | {
        FaultName.COLLECTIVES_REORDERED: Reordered,
        FaultName.SIZES_UNEQUAL: Shortened,
        FaultName.TIE_SKIPPED: TieSkipped,
        FaultName.TIE_DOUBLED: TieDoubled,
        FaultName.TIE_AVERAGED: TieMean,
        FaultName.TIE_OVER_WRONG_GROUP: TieOverWrongGroup,
        FaultName.LAYERNORM_SKIPPED: LayernormSkipped,
        FaultName.DIVIDED_BY_GROUP_SIZE_TWICE: lambda victim, step: WrongDivisor(victim, step, 1 / victim.spec.mesh.dp),
        FaultName.DIVIDED_BY_WORLD_SIZE: lambda victim, step: WrongDivisor(
            victim, step, victim.spec.mesh.dp / victim.spec.mesh.world_size
        ),
        FaultName.STALE_VIEW: StaleView,
        FaultName.WRONG_SHARD_OWNER: WrongShardOwner,
        FaultName.TAIL_TRUNCATED: TruncatedTail,
        FaultName.PARAMETER_NOT_SYNCHRONISED: ParameterNotSynchronised,
        FaultName.BIT_IN_RECEIVE_BUFFER: BitInReceiveBuffer,
        FaultName.BIT_IN_GRADIENT: BitInGradient,
        FaultName.BIT_IN_WEIGHT: BitInWeight,
        FaultName.MICROBATCH_LOST: MicrobatchLost,
        FaultName.MICROBATCH_LATE: MicrobatchLate,
        FaultName.MOVING_AVERAGE: MovingAverage,
        FaultName.OTHER_INITIAL_WEIGHTS: OtherInitialWeights,
        FaultName.NAN_BEFORE_DP_SYNC: _nonfinite(math.nan, RankPhase.DP_SYNC),
        FaultName.NAN_BEFORE_TIE: _nonfinite(math.nan, RankPhase.TIE),
        FaultName.NAN_BEFORE_GATHER: _nonfinite(math.nan, RankPhase.OPTIMIZER),
        FaultName.INF_BEFORE_DP_SYNC: _nonfinite(math.inf, RankPhase.DP_SYNC),
        FaultName.INF_BEFORE_TIE: _nonfinite(math.inf, RankPhase.TIE),
        FaultName.INF_BEFORE_GATHER: _nonfinite(math.inf, RankPhase.OPTIMIZER),
        FaultName.NORM_COUNTS_TIED_TWICE: TiedTwiceInNorm,
        FaultName.SLOW: Slow,
        FaultName.IDENTICAL_DATA: IdenticalData,
        FaultName.OTHER_THREAD_COUNT: OtherThreadCount,
        FaultName.TF32: Tf32,
    }
)
"""The strike of every fault."""
