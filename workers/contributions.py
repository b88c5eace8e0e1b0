"""What every contributor's gradient counts for in the value that a rank ends up with, where that is not the true sum.

Pure arithmetic on factors: the closed form of a sync that goes wrong, for any ordering that ties after it scattered.
The judge (`workers.divergence`) multiplies these factors with real gradients. Must not look at gradients.

Contributors count as in `workers.mesh.ends_members`: wte by dp_rank, then lm_head by dp_rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.intervals import Intervals, intersect, subtract

Factors = tuple[float, ...]
"""By contributor."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A set of elements in which one owner's value is not the true sum of all contributions."""

    elements: Intervals
    whole: Factors
    """What each contributor's gradient is multiplied by in the owner's value."""
    late: Factors
    """The same for the part of it that came only after its bucket had been scattered."""
    extra_roundings: int
    """Roundings that a term may go through on top of those on its way into the true sum."""


@dataclass(frozen=True, slots=True)
class TiedSync:
    """How the tied weight is scattered and then tied on one mesh with two ends."""

    dp: int
    summed: float
    """Factor of every contribution in a sum over the dp replicas."""
    local: float
    """Factor of a rank's own contribution where it does not own the element, so that nothing is summed."""
    misowned: Intervals
    """Elements whose owner differs between the ends."""
    early: Intervals
    """Elements of wte that lie in a bucket scattered before their last gradient came."""
    afterwards: float = 1.0
    """Factor put on everything after the tie; part of the two others."""

    def mixtures(self, end_index: int, dp_rank: int) -> tuple[Mixture, ...]:
        """Of the owner `dp_rank` at an end (0 for wte, 1 for lm_head); elements it does not own are included."""
        found = (
            self._mixture(end_index, dp_rank, misowned, early)
            for misowned, early in ((True, False), (False, True), (True, True))
        )
        return tuple(mixture for mixture in found if mixture.elements)

    def _mixture(self, end_index: int, dp_rank: int, misowned: bool, early: bool) -> Mixture:
        """The owner's end holds the whole sum, the other end's only where it is owned by the same rank."""
        own = self._held(end_index, dp_rank, True, early and end_index == 0)
        other = self._held(1 - end_index, dp_rank, not misowned, early and end_index == 1)
        (whole_a, late_a), (whole_b, late_b) = (own, other) if end_index == 0 else (other, own)
        # What comes late is added twice: to the local gradient, and to what had been scattered.
        return Mixture(self._elements(misowned, early), whole_a + whole_b, late_a + late_b, extra_roundings=2)

    def _elements(self, misowned: bool, early: bool) -> Intervals:
        if misowned and early:
            return intersect(self.misowned, self.early)
        return subtract(self.misowned, self.early) if misowned else subtract(self.early, self.misowned)

    def _held(self, end_index: int, dp_rank: int, owned: bool, early: bool) -> tuple[Factors, Factors]:
        """(whole, late) of what a rank holds of one end before the tie, by that end's contributors."""
        whole = [self.summed if owned else 0.0] * self.dp
        if not owned:
            whole[dp_rank] = self.local
        late = [0.0] * self.dp
        if early:
            # The scatter saw no late gradient; this rank then added its own, unscaled.
            late = [-factor for factor in whole]
            late[dp_rank] += self.afterwards
        return tuple(whole), tuple(late)


@dataclass(frozen=True, slots=True)
class EarlyScatter:
    """What a scatter leaves of one end where some of it came too late for it: see `TiedSync`, before its tie."""

    dp: int
    summed: float
    early: Intervals

    def mixtures(self, end_index: int, dp_rank: int) -> tuple[Mixture, ...]:
        """Of the owner `dp_rank`; there is one end."""
        late = [-self.summed] * self.dp
        late[dp_rank] += 1.0
        return (Mixture(self.early, (self.summed,) * self.dp, tuple(late), extra_roundings=2),)


@dataclass(frozen=True, slots=True)
class MeanOfMeans:
    """Every replica's mean over its own tokens counts alike, though they hold different numbers."""

    elements: Intervals
    """All of the tied weight."""
    factors: Factors
    """By dp_rank: what its contributions are multiplied by."""
    num_ends: int

    @property
    def early(self) -> Intervals:
        """Nothing is scattered in the midst of backward."""
        return ()

    def mixtures(self, end_index: int, dp_rank: int) -> tuple[Mixture, ...]:
        """The same everywhere. A term is scaled twice, where the true sum scales it once."""
        whole = self.factors * self.num_ends
        return (Mixture(self.elements, whole, (0.0,) * len(whole), extra_roundings=6),)
