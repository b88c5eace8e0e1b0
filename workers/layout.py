"""Where each parameter of a chunk lies in its gradient buffer, and which dp rank owns which part, by Megatron version.

Pure arithmetic on names and shapes; no tensors, no process groups, and never a loop over elements. What each rule
yields is held against layouts captured from the real library (`tests/golden`).

Source: Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py (`grad_buffer.py` in old versions) at the
versions named in `RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import lcm
from types import MappingProxyType

from workers.errors import LayoutAssertionError, SpecError
from workers.intervals import Interval, Intervals, intersect, normalize, shift
from workers.parameters import ParameterShape


class LayoutVersion(StrEnum):
    """The first version, or a commit, of each range of Megatron-LM versions that lay out buffers alike."""

    DE4028A = "de4028a"
    DAF0006 = "daf0006"
    A67FFDA = "a67ffda"
    C0650D83 = "0650d83"
    V0_8 = "v0.8"
    V0_9 = "v0.9"
    V0_13 = "v0.13"


class PrescaleKind(StrEnum):
    """How a bucket is averaged before its sum: x / dp, or x * (1 / dp); they round differently."""

    DIVIDE = "divide"
    MULTIPLY_BY_INVERSE = "multiply_by_inverse"


class OwnBucketStart(StrEnum):
    """Where the tied weight starts when it gets a bucket of its own behind other parameters."""

    NOT_MOVED = "not_moved"
    """Right behind its predecessor: in the previous bucket's padding, if that has any."""
    MOVED_IF_INDIVISIBLE = "moved_if_indivisible"
    """At the previous bucket's padded end, but only if its own start is not a multiple of dp."""
    MOVED = "moved"
    """At the previous bucket's padded end: the whole weight lies inside its bucket."""


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """How one range of versions fills a buffer. Parameters are placed in reversed registration order."""

    version: LayoutVersion
    parameter_alignment: int
    """Parameters start at multiples of this."""
    bucket_alignment: int
    """Buckets end at multiples of lcm(dp, this)."""
    own_bucket: bool
    """Whether the tied weight gets a bucket of its own."""
    own_bucket_start: OwnBucketStart
    asserts_start: bool
    """Whether that version stops unless the own bucket's start is a multiple of dp."""
    prescale: PrescaleKind
    source: str

    def bucket_divisor(self, dp: int) -> int:
        """Bucket ends are multiples of this."""
        return lcm(dp, self.bucket_alignment)


def _rules() -> Iterator[LayoutRule]:
    divide, inverse = PrescaleKind.DIVIDE, PrescaleKind.MULTIPLY_BY_INVERSE
    stay, some, move = OwnBucketStart.NOT_MOVED, OwnBucketStart.MOVED_IF_INDIVISIBLE, OwnBucketStart.MOVED
    up_to_fix = "Megatron-LM up to the parent of daf0006: the tied weight shares its bucket"
    yield LayoutRule(LayoutVersion.DE4028A, 1, 1, False, stay, False, divide, up_to_fix)
    fix = "Megatron-LM daf0006: the tied weight gets its own bucket"
    yield LayoutRule(LayoutVersion.DAF0006, 1, 1, True, stay, False, divide, fix)
    # No vector was captured in this range; only the rounding of its pre-scale rests on its neighbour daf0006.
    asserting = "Megatron-LM a67ffda5a3 up to 4b44f0a1ee: asserts start % dp == 0"
    yield LayoutRule(LayoutVersion.A67FFDA, 1, 1, True, stay, True, divide, asserting)
    padded = "Megatron-LM 4b44f0a1ee up to 5467bef346 (0650d83): buckets padded to lcm(dp, 128)"
    yield LayoutRule(LayoutVersion.C0650D83, 1, 128, True, stay, True, inverse, padded)
    aligned = "Megatron-LM core_v0.8: parameters start at multiples of 64"
    yield LayoutRule(LayoutVersion.V0_8, 64, 128, True, stay, True, inverse, aligned)
    moved = "Megatron-LM core_v0.9 to core_v0.12: own bucket's start moved only if start % dp != 0"
    yield LayoutRule(LayoutVersion.V0_9, 64, 128, True, some, False, inverse, moved)
    right = "Megatron-LM core_v0.13 on: own bucket begins at its padded start"
    yield LayoutRule(LayoutVersion.V0_13, 64, 128, True, move, False, inverse, right)


RULES: Mapping[LayoutVersion, LayoutRule] = MappingProxyType({rule.version: rule for rule in _rules()})
"""Every known range of versions. (v0.13 on can also pad buckets to 2^16: `replace(rule, bucket_alignment=2**16)`.)"""


@dataclass(frozen=True, slots=True)
class BufferBucket:
    """One bucket: buffer elements offset to offset + numel, of which the first `unpadded` were asked for.

    Where a tied weight ends inside the previous bucket's padding its own bucket has no elements, and `unpadded` is
    negative, as in the modelled versions.
    """

    offset: int
    numel: int
    unpadded: int


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """A parameter's buffer elements start to stop. `bucket` is the one it was collected in: with a start inside the
    previous bucket's padding, its first elements lie in the bucket before.
    """

    name: str
    start: int
    stop: int
    bucket: int
    shared_embedding: bool

    @property
    def interval(self) -> Interval:
        """Its place in the buffer."""
        return Interval(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One chunk's buffer; dp rank d owns the d-th equal part of every bucket."""

    dp: int
    buffer_numel: int
    buckets: tuple[BufferBucket, ...]
    params: tuple[PlacedParameter, ...]

    def param(self, name: str) -> PlacedParameter:
        """A parameter's place. KeyError when the chunk has no such parameter."""
        for placed in self.params:
            if placed.name == name:
                return placed
        raise KeyError(f"no parameter {name!r} in this chunk; it holds {[placed.name for placed in self.params]}")

    def shard(self, bucket_index: int, dp_rank: int) -> Interval:
        """The part of a bucket that a dp rank owns, in buffer coordinates; padding included."""
        if not 0 <= dp_rank < self.dp:
            raise IndexError(f"dp_rank {dp_rank} is outside 0 to {self.dp - 1}")
        bucket = self.buckets[bucket_index]
        size = bucket.numel // self.dp
        return Interval(bucket.offset + dp_rank * size, bucket.offset + (dp_rank + 1) * size)

    def owned_buffer_intervals(self, dp_rank: int) -> Intervals:
        """All that a dp rank owns, in buffer coordinates; padding included."""
        return normalize(self.shard(index, dp_rank) for index in range(len(self.buckets)))

    def owned_intervals(self, name: str, dp_rank: int) -> Intervals:
        """The elements of a parameter that a dp rank owns, in the parameter's own flat coordinates."""
        placed = self.param(name)
        return shift(intersect(self.owned_buffer_intervals(dp_rank), normalize([placed.interval])), -placed.start)

    def owners(self, name: str) -> tuple[tuple[Interval, int], ...]:
        """A parameter cut by owner: (elements, dp_rank) in rising order, in the parameter's own coordinates."""
        return tuple(self._owners(self.param(name)))

    def _owners(self, placed: PlacedParameter) -> Iterator[tuple[Interval, int]]:
        for bucket in self.buckets:
            start, stop = max(placed.start, bucket.offset), min(placed.stop, bucket.offset + bucket.numel)
            while start < stop:
                size = bucket.numel // self.dp
                dp_rank = (start - bucket.offset) // size
                end = min(stop, bucket.offset + (dp_rank + 1) * size)
                yield Interval(start - placed.start, end - placed.start), dp_rank
                start = end


def build_layout(
    parameters: Sequence[ParameterShape], rule: LayoutRule, dp: int, bucket_size: int | None = None
) -> BufferLayout:
    """Lay a chunk's parameters, given in registration order, out in one buffer of the distributed optimizer.

    `bucket_size` (elements) closes a bucket as soon as it holds that many; None keeps one bucket, plus the tied
    weight's own. Megatron cuts by size only with overlap, on the first pipeline rank's first chunk. Raises
    LayoutAssertionError where that version would stop with an assertion of its own.
    """
    if dp < 1:
        raise SpecError(f"dp is {dp}; a buffer is shared by at least 1 rank; ask for 1 or more")
    if bucket_size is not None and bucket_size < 1:
        raise SpecError(f"bucket_size is {bucket_size}; a bucket holds at least 1 element; ask for more, or null")
    packer = _Packer(rule, dp, bucket_size)
    for parameter in reversed(parameters):
        packer.place(parameter)
    packer.finish()
    return BufferLayout(dp, packer.bucket_start, tuple(packer.buckets), tuple(packer.params))


def default_bucket_size(dp: int) -> int:
    """Elements at which Megatron-LM closes a bucket with overlap where nothing else is asked for."""
    return max(40_000_000, 1_000_000 * dp)


_COMMITS: Mapping[str, LayoutVersion] = MappingProxyType(
    {
        "de4028a": LayoutVersion.DE4028A,
        "daf0006": LayoutVersion.DAF0006,
        "a67ffda": LayoutVersion.A67FFDA,
        "4b44f0a": LayoutVersion.C0650D83,
        "0650d83": LayoutVersion.C0650D83,
    }
)
_RELEASES = (((0, 13), LayoutVersion.V0_13), ((0, 9), LayoutVersion.V0_9), ((0, 8), LayoutVersion.V0_8))


def resolve(version: str) -> LayoutVersion:
    """The layout of a Megatron version: a commit of LayoutVersion, or a release: "v0.10", "0.12.1", "core_v0.14.0".

    Raises SpecError for anything else. Releases before 0.8 are known by commit only.
    """
    text = version.strip().lower()
    if re.fullmatch(r"[0-9a-f]{7,40}", text) and text[:7] in _COMMITS:
        return _COMMITS[text[:7]]
    match = re.fullmatch(r"(?:core[_-]?)?[rv]?(\d{1,4})\.(\d{1,4})(?:\.\d{1,4})?(?:[-.]?(?:rc|dev|post)\d{0,4})?", text)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    for first, layout in _RELEASES:
        if release >= first:
            return layout
    known = ", ".join(LayoutVersion)
    raise SpecError(f"Megatron version {version!r} has no known layout; give a release from 0.8 on, or one of {known}")


class _Packer:
    """The state of one pass over a chunk's parameters: the open bucket and where the next parameter goes."""

    def __init__(self, rule: LayoutRule, dp: int, bucket_size: int | None) -> None:
        self.rule, self.dp, self.bucket_size = rule, dp, bucket_size
        self.buckets: list[BufferBucket] = []
        self.params: list[PlacedParameter] = []
        self.bucket_start = 0
        self.cursor = 0
        self.is_open = False

    def place(self, parameter: ParameterShape) -> None:
        """Put one parameter behind what is there, in a bucket of its own where the rule says so."""
        own_bucket = self.rule.own_bucket and parameter.shared_embedding
        start = _pad(self.cursor, self.rule.parameter_alignment)
        if own_bucket and self.is_open:
            start = self._begin_own_bucket(start)
        stop = start + parameter.numel
        self.params.append(PlacedParameter(parameter.name, start, stop, len(self.buckets), parameter.shared_embedding))
        self.is_open = True
        self.cursor = stop
        full = self.bucket_size is not None and stop - self.bucket_start >= self.bucket_size
        if own_bucket or full:
            self.cursor = self._close_bucket(stop)

    def finish(self) -> None:
        """Close the bucket that is still open, if any."""
        if self.is_open:
            self._close_bucket(self.cursor)

    def _begin_own_bucket(self, start: int) -> int:
        """Close the open bucket in front of the tied weight; the weight's start. The versions differ here only."""
        if self.rule.asserts_start and start % self.dp:
            raise LayoutAssertionError(
                f"the tied weight would start at {start}, which is not a multiple of dp {self.dp}: "
                f"{self.rule.version.value} asserts start % dp == 0 and stops; use another dp, or v0.9 or later"
            )
        if self.rule.own_bucket_start is OwnBucketStart.MOVED_IF_INDIVISIBLE and start % self.dp:
            start = _pad(start, self.rule.bucket_divisor(self.dp))
        padded_end = self._close_bucket(start)
        return padded_end if self.rule.own_bucket_start is OwnBucketStart.MOVED else start

    def _close_bucket(self, end: int) -> int:
        padded_end = _pad(end, self.rule.bucket_divisor(self.dp))
        self.buckets.append(BufferBucket(self.bucket_start, padded_end - self.bucket_start, end - self.bucket_start))
        self.bucket_start = padded_end
        self.is_open = False
        return padded_end


def _pad(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
