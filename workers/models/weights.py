"""One tensor-parallel rank's part of a parameter, cut out of the whole as `workers.parameters` says.

Weights are drawn whole and then cut, so that they are the same model however many ranks share it. Must not communicate.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workers.contract import ModelSpec
from workers.errors import SpecError
from workers.parameters import Cut, cut_of, padded_vocab_size
from workers.tensor_parallel import WHOLE, TensorGroup


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the model a stage holds, and the ranks that hold the others."""

    group: TensorGroup = WHOLE
    tp_rank: int = 0

    @property
    def tp(self) -> int:
        """Number of parts."""
        return self.group.size

    def part(self, width: int) -> int:
        """A rank's part of a width. Raises SpecError where the parts would not be equal."""
        if width % self.tp:
            raise SpecError(f"a width of {width} cannot be cut into {self.tp} equal parts; choose a tp that divides it")
        return width // self.tp

    def vocab_rows(self, model: ModelSpec) -> int:
        """Rows of the padded vocabulary that a rank holds."""
        return padded_vocab_size(model.vocab_size, self.tp) // self.tp


def cut(name: str, whole: Tensor, shard: Shard) -> Tensor:
    """A rank's part of a whole parameter, or of its gradient; a view where there is nothing to cut."""
    if shard.tp == 1:
        return whole
    match cut_of(name):
        case Cut.ROWS:
            return whole.chunk(shard.tp, dim=0)[shard.tp_rank]
        case Cut.COLUMNS:
            return whole.chunk(shard.tp, dim=1)[shard.tp_rank]
        case Cut.HEADS:
            thirds = whole.view(3, shard.tp, -1, *whole.shape[1:])
            return thirds[:, shard.tp_rank].flatten(0, 1)
        case Cut.REPLICATED:
            return whole


def whole_shape(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """The shape of a parameter of which each of `tp` ranks holds `shape`."""
    dimension = {Cut.ROWS: 0, Cut.HEADS: 0, Cut.COLUMNS: 1}.get(cut_of(name))
    return tuple(length * tp if at == dimension else length for at, length in enumerate(shape))
