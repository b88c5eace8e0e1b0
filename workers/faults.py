"""The catalogue of faults that a drill can inject, what must come of each, and when one strikes.

Pure data and pure rules: requests are checked against it where torch must not be loaded. How a fault perturbs a step
is in `workers.strikes`; nothing here or there touches a report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from workers.contract import REFERENCE_STACK, Drill, JudgeName, Mesh, OrderingName, RankPhase, TrialSpec


class FaultName(StrEnum):
    """The catalogue. `raise` leaves by an exception, `kill` by SIGKILL; `in` means issued and not yet waited for."""

    RAISE_BEFORE = "raise_before_collective"
    RAISE_IN = "raise_in_collective"
    RAISE_AFTER = "raise_after_collective"
    KILL_BEFORE = "kill_before_collective"
    KILL_IN = "kill_in_collective"
    KILL_AFTER = "kill_after_collective"
    COLLECTIVES_REORDERED = "collectives_reordered"
    SIZES_UNEQUAL = "sizes_unequal"
    TIE_SKIPPED = "tie_skipped"
    TIE_DOUBLED = "tie_doubled"
    TIE_AVERAGED = "tie_averaged"
    TIE_OVER_WRONG_GROUP = "tie_over_wrong_group"
    LAYERNORM_SKIPPED = "layernorm_skipped"
    DIVIDED_BY_GROUP_SIZE_TWICE = "divided_by_group_size_twice"
    DIVIDED_BY_WORLD_SIZE = "divided_by_world_size"
    STALE_VIEW = "stale_view"
    WRONG_SHARD_OWNER = "wrong_shard_owner"
    TAIL_TRUNCATED = "tail_truncated"
    PARAMETER_NOT_SYNCHRONISED = "parameter_not_synchronised"
    BIT_IN_RECEIVE_BUFFER = "bit_flipped_in_receive_buffer"
    BIT_IN_GRADIENT = "bit_flipped_in_gradient"
    BIT_IN_WEIGHT = "bit_flipped_in_weight"
    MICROBATCH_LOST = "microbatch_lost"
    MICROBATCH_LATE = "microbatch_late"
    MOVING_AVERAGE = "moving_average"
    OTHER_INITIAL_WEIGHTS = "other_initial_weights"
    NAN_BEFORE_DP_SYNC = "nan_before_dp_sync"
    NAN_BEFORE_TIE = "nan_before_tie"
    NAN_BEFORE_GATHER = "nan_before_gather"
    INF_BEFORE_DP_SYNC = "inf_before_dp_sync"
    INF_BEFORE_TIE = "inf_before_tie"
    INF_BEFORE_GATHER = "inf_before_gather"
    NORM_COUNTS_TIED_TWICE = "norm_counts_tied_twice"
    IDENTICAL_DATA = "identical_data"
    SLOW = "slow"
    OTHER_THREAD_COUNT = "other_thread_count"
    TF32 = "tf32"


class Outcome(StrEnum):
    """What must come of a fault."""

    FAIL = "fail"
    """A verdict `fail`."""
    ERROR = "error"
    """No verdict: the rank breaks, and the error names it."""
    HARMLESS = "harmless"
    """Anything but `fail`: it is no fault of numerics, and must not look like one."""


class Place(StrEnum):
    """Which parameter a fault is in."""

    TIED = "tied"
    LAYERNORM = "layernorm"
    """Of those whose gradients tensor-parallel ranks sum; the first of them is named."""
    ONE = "one"
    """A single one, whichever it strikes."""
    MANY = "many"


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the catalogue, with the attribution that must come of it on two or more replicas and stages."""

    name: FaultName
    summary: str
    """What the struck rank does, in one sentence."""
    outcome: Outcome
    judges: frozenset[JudgeName] = field(default_factory=frozenset)
    """Who must find it, over both probes."""
    phase: RankPhase | None = None
    place: Place = Place.MANY
    names_rank: bool = True
    """Whether one rank is at fault and must be named."""
    in_tie: bool = False
    """It needs two ends, and a rank that holds one."""
    in_tensor_group: bool = False
    """It needs two tensor-parallel ranks or more."""
    at_last_stage: bool = False
    """It needs a rank of the last of several stages."""
    reported_as: str | None = None
    """The code of the observation that must name its rank and no other, where it makes no verdict `fail`."""
    differs_in: str | None = None
    """`order` or `shape`: what the error must say of its rank's collective, before anybody enters it."""


STRAGGLER = "straggler"
"""The code of the observation that tells of a slow rank."""
SETTINGS_DIFFER = "settings_differ"
"""The code of the observation that tells of ranks that compute with other settings than the others."""
_DP, _TIE, _OWN = RankPhase.DP_SYNC, RankPhase.TIE, RankPhase.FORWARD_BACKWARD
_SYNC = frozenset({JudgeName.EXACT, JudgeName.SYNC})
_LOCAL = frozenset({JudgeName.EXACT, JudgeName.REFERENCE})
_FINITE = frozenset({JudgeName.FINITE})
_REPLICAS = frozenset({JudgeName.REPLICAS})


def _breaks(name: FaultName, how: str) -> Fault:
    return Fault(name, how, Outcome.ERROR, phase=_DP)


def _does_not_fit(name: FaultName, differs_in: str, how: str) -> Fault:
    return Fault(name, how, Outcome.ERROR, phase=_DP, differs_in=differs_in)


def _kills(name: FaultName, how: str) -> Fault:
    """No phase: a rank that is killed says nothing, and the others notice at whichever collective they need it next."""
    return Fault(name, how, Outcome.ERROR)


def _in_tie(name: FaultName, summary: str, names_rank: bool = True) -> Fault:
    return Fault(name, summary, Outcome.FAIL, _SYNC, _TIE, Place.TIED, names_rank, in_tie=True)


def _in_sync(name: FaultName, summary: str, place: Place = Place.MANY) -> Fault:
    return Fault(name, summary, Outcome.FAIL, _SYNC, _DP, place)


def _before_sync(name: FaultName, summary: str, place: Place = Place.MANY) -> Fault:
    return Fault(name, summary, Outcome.FAIL, _LOCAL, _OWN, place)


def _nonfinite(name: FaultName, value: str, phase: RankPhase, what: str) -> Fault:
    summary = f"{what} is {value}."
    in_tie = phase is _TIE
    return Fault(name, summary, Outcome.FAIL, _FINITE, phase, Place.TIED if in_tie else Place.ONE, in_tie=in_tie)


def _setting(name: FaultName, summary: str) -> Fault:
    return Fault(name, summary, Outcome.HARMLESS, reported_as=SETTINGS_DIFFER)


_IN_SYNC = "a collective of the data-parallel sync"
_GRADIENT = "An element of its gradient, when the data-parallel sync begins,"
_TIED = "An element of its tied gradient, when the tie begins,"
_WEIGHT = "A weight that it has just updated, when the replicas gather theirs,"
_ENTRIES = (
    _breaks(FaultName.RAISE_BEFORE, f"Raises before {_IN_SYNC}."),
    _breaks(FaultName.RAISE_IN, f"Raises with {_IN_SYNC} issued and not yet waited for."),
    _breaks(FaultName.RAISE_AFTER, f"Raises after {_IN_SYNC}."),
    _kills(FaultName.KILL_BEFORE, f"Is killed before {_IN_SYNC}."),
    _kills(FaultName.KILL_IN, f"Is killed with {_IN_SYNC} issued and not yet waited for."),
    _kills(FaultName.KILL_AFTER, f"Is killed after {_IN_SYNC}."),
    _does_not_fit(
        FaultName.COLLECTIVES_REORDERED, "order", "It issues two collectives of one shape in the other order."
    ),
    _does_not_fit(FaultName.SIZES_UNEQUAL, "shape", "It sends its first bucket without the last dp elements."),
    _in_tie(FaultName.TIE_SKIPPED, "The other end's gradient never reaches it."),
    _in_tie(FaultName.TIE_DOUBLED, "It adds the other end's gradient twice."),
    _in_tie(FaultName.TIE_AVERAGED, "It takes the mean of the two ends instead of their sum."),
    _in_tie(FaultName.TIE_OVER_WRONG_GROUP, "Its pipeline and the next swap partners in the tie.", names_rank=False),
    Fault(
        FaultName.LAYERNORM_SKIPPED,
        "The other tensor-parallel ranks' parts of its layernorm gradients never reach it.",
        Outcome.FAIL,
        _SYNC,
        RankPhase.LAYERNORM,
        Place.LAYERNORM,
        in_tensor_group=True,
    ),
    _in_sync(FaultName.DIVIDED_BY_GROUP_SIZE_TWICE, "It divides its own share by dp once more."),
    _in_sync(FaultName.DIVIDED_BY_WORLD_SIZE, "It divides its own share by the world size instead of dp."),
    _in_sync(FaultName.STALE_VIEW, "The sums land in a copy of its buffer that nobody reads."),
    _in_sync(FaultName.WRONG_SHARD_OWNER, "It puts its sums where the next owner's belong."),
    _in_sync(FaultName.TAIL_TRUNCATED, "The last dp - 1 elements of each of its shards are left out of the sync."),
    _in_sync(FaultName.PARAMETER_NOT_SYNCHRONISED, "One parameter keeps its own gradient.", Place.ONE),
    _in_sync(FaultName.BIT_IN_RECEIVE_BUFFER, "One bit is flipped in the first sum that it receives.", Place.ONE),
    _before_sync(FaultName.BIT_IN_GRADIENT, "One bit is flipped in its own gradient.", Place.ONE),
    Fault(
        FaultName.BIT_IN_WEIGHT,
        "One bit is flipped in a weight, once the weights are whole.",
        Outcome.FAIL,
        _REPLICAS,
        RankPhase.OPTIMIZER,
    ),
    _before_sync(FaultName.MICROBATCH_LOST, "Its last microbatch adds nothing to its gradient."),
    _before_sync(FaultName.MICROBATCH_LATE, "Its last microbatch is added when the data-parallel sync is over."),
    _before_sync(FaultName.MOVING_AVERAGE, "It averages each microbatch with what is there instead of adding it."),
    Fault(
        FaultName.OTHER_INITIAL_WEIGHTS,
        "It begins with the weights of another seed; strikes in step 0.",
        Outcome.FAIL,
        _LOCAL | _REPLICAS,
        RankPhase.BUILDING,
    ),
    _nonfinite(FaultName.NAN_BEFORE_DP_SYNC, "NaN", _DP, _GRADIENT),
    _nonfinite(FaultName.NAN_BEFORE_TIE, "NaN", _TIE, _TIED),
    _nonfinite(FaultName.NAN_BEFORE_GATHER, "NaN", RankPhase.OPTIMIZER, _WEIGHT),
    _nonfinite(FaultName.INF_BEFORE_DP_SYNC, "infinite", _DP, _GRADIENT),
    _nonfinite(FaultName.INF_BEFORE_TIE, "infinite", _TIE, _TIED),
    _nonfinite(FaultName.INF_BEFORE_GATHER, "infinite", RankPhase.OPTIMIZER, _WEIGHT),
    Fault(
        FaultName.NORM_COUNTS_TIED_TWICE,
        "Its copy of the tied weight counts in the gradient norm, beside the first stage's.",
        Outcome.FAIL,
        frozenset({JudgeName.NORM}),
        RankPhase.OPTIMIZER,
        Place.TIED,
        at_last_stage=True,
    ),
    Fault(FaultName.SLOW, "It begins its backward 300 ms late.", Outcome.HARMLESS, reported_as=STRAGGLER),
    Fault(FaultName.IDENTICAL_DATA, "Every dp rank trains on dp rank 0's data.", Outcome.HARMLESS, names_rank=False),
    _setting(FaultName.OTHER_THREAD_COUNT, "It computes with one more thread than the others."),
    _setting(FaultName.TF32, "It may round matrix products to TF32, as far as its device can."),
)
FAULTS: Mapping[FaultName, Fault] = MappingProxyType({fault.name: fault for fault in _ENTRIES})
"""Every fault by its name."""


def is_struck(spec: TrialSpec, world_rank: int, node: str) -> bool:
    """Whether the trial's drill strikes on this rank: it is bound to it or to its node, and the draw says so."""
    drill = spec.drill
    if drill is None:
        return False
    if drill.fault == FaultName.IDENTICAL_DATA:
        return True
    if drill.fault == FaultName.TIE_OVER_WRONG_GROUP:
        # Both partners of a tie must agree to meet others.
        return draw(spec, drill, drill.world_rank or 0) < drill.probability
    if drill.world_rank != world_rank if drill.node is None else drill.node != node:
        return False
    return draw(spec, drill, world_rank) < drill.probability


def draw(spec: TrialSpec, drill: Drill, world_rank: int) -> float:
    """A number in [0, 1) that follows from the trial's seed and names alone, evenly spread over trials and ranks."""
    what = (spec.seed, spec.repeat, spec.probe.value, spec.ordering.value, drill.fault, drill.step, world_rank)
    drawn = blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "big") / 2**64


def data_rank(spec: TrialSpec, dp_rank: int) -> int:
    """Whose data a dp rank trains on: its own, unless the drill gives everybody the same."""
    drill = spec.drill
    identical = drill is not None and drill.fault == FaultName.IDENTICAL_DATA
    return 0 if identical else dp_rank


def data_of(spec: TrialSpec) -> TrialSpec:
    """The trial without what changes neither its data nor its weights: equal ones share every replay."""
    drill = spec.drill if data_rank(spec, 1) != 1 else None
    return replace(spec, ordering=OrderingName.FIXED, stack=REFERENCE_STACK, steps=1, repeat=0, drill=drill)


def why_not(fault: Fault, mesh: Mesh, world_rank: int | None) -> str | None:
    """Why a fault cannot be exercised on this mesh and rank; None where it can."""
    if fault.in_tensor_group:
        # A rank sees for itself what it takes of that sum, with replicas or without.
        return None if mesh.tp > 1 else "with tp=1 no rank has a part only, and nothing sums layernorm gradients"
    if (fault.in_tie or fault.at_last_stage) and mesh.pp == 1:
        return "with pp=1 there is one copy of the tied weight and nothing to tie"
    if fault.at_last_stage and world_rank is not None and mesh.coordinates(world_rank).pp_rank != mesh.pp - 1:
        return f"world_rank {world_rank} is not on the last stage, whose copy of the tied weight it is about"
    if fault.in_tie and world_rank is not None and mesh.coordinates(world_rank).pp_rank not in (0, mesh.pp - 1):
        return f"world_rank {world_rank} is on a stage between the first and the last, which ties nothing"
    if fault.differs_in is not None and mesh.dp == 1:
        return "with dp=1 there are no replicas"
    if fault.outcome is Outcome.FAIL and fault.judges & {JudgeName.SYNC, JudgeName.REPLICAS} and mesh.dp == 1:
        return "with dp=1 there are no replicas" if not fault.in_tie or not fault.names_rank else None
    return None


DRILL_FORM = "FAULT[:WORLD_RANK|@NODE[:STEP[:PROBABILITY]]]"
_DRILL = re.compile(
    r"(?P<fault>[^:]+)(:((?P<world_rank>\d+)|@(?P<node>[^:]+))(:(?P<step>\d+)(:(?P<probability>\d*\.?\d+))?)?)?"
)


def read_drill(text: str) -> dict[str, Any]:
    """The fields of a drill written as `DRILL_FORM`; what was left out is left out. ValueError for another form."""
    found = _DRILL.fullmatch(text)
    if found is None:
        raise ValueError(f"needs the form {DRILL_FORM}, as kill_in_collective:1:0")
    kinds = {"fault": str, "world_rank": int, "node": str, "step": int, "probability": float}
    return {name: kinds[name](value) for name, value in found.groupdict().items() if value is not None}
