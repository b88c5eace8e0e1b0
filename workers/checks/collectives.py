"""The self-test of the collectives: every primitive on every group of the mesh, before the first step relies on them.

Exact integers that carry the rank code go through the collectives of the step itself (`workers.communicator`), as views
inside a larger buffer, in sizes around powers of two and with odd tails. Every element is compared, the buffer around
the view too. Says what it found; must not judge.

Shape legend: n = elements of one message; m = ranks of a group; S = elements of the buffer around a view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from workers.communicator import ProcessGroups, part
from workers.contract import CollectiveFault, CollectiveOp, CollectiveRow, Coordinates, Mesh, Primitive
from workers.errors import CollectiveError
from workers.exactness import EXACT_LIMIT
from workers.grad_sync import Prescale
from workers.layout import PrescaleKind
from workers.mesh import (
    Members,
    MeshGroups,
    all_members,
    dp_members,
    ends_members,
    model_members,
    pp_members,
    stage_members,
    tie_members,
    tp_members,
    world_members,
)
from workers.rank_code import RankCode

SWEEP_SIZES = (1, 2, 3, 7, 8, 9, 127, 128, 129, 1023, 1025, 4099, 65537)
"""Elements of a message on a gang that has not swept this mesh yet."""
WARM_SIZES = (1, 129)
"""The same on one that has: a few milliseconds."""
MAX_TERMS = 1 << 22
"""Numbers of everybody's messages that every rank may compute; sizes that need more are left out of the sweep."""
_GUARD = 3
"""Elements on either side of a view: an odd start, so that nothing is aligned by luck."""
_UNTOUCHED = -7.0
_CODE_DIGITS = 4
_NOBODY = -1

CASES = (
    (Primitive.ALL_REDUCE, CollectiveOp.SUM),
    (Primitive.ALL_REDUCE, CollectiveOp.AVERAGE),
    (Primitive.REDUCE_SCATTER, CollectiveOp.SUM),
    (Primitive.REDUCE_SCATTER, CollectiveOp.AVERAGE),
    (Primitive.ALL_GATHER, None),
    (Primitive.BROADCAST, None),
    (Primitive.SEND_RECV, None),
)


def check_collectives(
    mesh: Mesh, at: Coordinates, groups: MeshGroups, device: torch.device, sizes: Sequence[int]
) -> tuple[CollectiveRow, ...]:
    """Run every case on every group of this rank. Collective over the mesh, in one order on all ranks.

    Raises CollectiveError, naming primitive, group and size, where one broke.
    """
    communicator = ProcessGroups(at.world_rank, groups)
    names = group_names(mesh, at)
    # Most of the sweep's time, and the same for all cases.
    terms = cache(message_terms)
    return tuple(
        _Case(primitive, op, names[members], members, communicator, groups[members], device, terms).run(sizes)
        for members in all_members(mesh)
        if at.world_rank in members and len(members) > 1
        for primitive, op in CASES
    )


def group_names(mesh: Mesh, at: Coordinates) -> dict[Members, str]:
    """What a rank's groups are for; a group that serves several ends has all their names. The same on all members."""
    named = {
        "dp": dp_members(mesh, at.pp_rank, at.tp_rank),
        "pp": pp_members(mesh, at.dp_rank, at.tp_rank),
        "tie": tie_members(mesh, at.dp_rank, at.tp_rank),
        "ends": ends_members(mesh, at.tp_rank),
        "world": world_members(mesh),
    }
    if mesh.tp > 1:
        named |= {
            "tp": tp_members(mesh, at.dp_rank, at.pp_rank),
            "stage": stage_members(mesh, at.pp_rank),
            "model": model_members(mesh, at.dp_rank),
        }
    names: dict[Members, str] = {}
    for name, members in named.items():
        names[members] = f"{names[members]}+{name}" if members in names else name
    return names


@dataclass
class _Case:
    """One primitive on one group."""

    primitive: Primitive
    op: CollectiveOp | None
    name: str
    members: Members
    communicator: ProcessGroups
    group: dist.ProcessGroup
    device: torch.device
    terms: Callable[[int, int], Tensor]
    seconds: float = 0.0
    num_bytes: int = 0
    num_wrong: int = 0
    first: CollectiveFault | None = None

    def run(self, sizes: Sequence[int]) -> CollectiveRow:
        """Every size in turn."""
        (world_rank,) = self.communicator.hosted
        self.me = self.members.index(world_rank)
        fitting = [size for size in sizes if size * len(self.members) ** 2 <= MAX_TERMS] or [1]
        for size in fitting:
            self._try(size)
        return CollectiveRow(
            group=self.name,
            members=self.members,
            primitive=self.primitive,
            op=self.op,
            num_elements=tuple(fitting),
            size_bytes=self.num_bytes,
            seconds=self.seconds,
            wrong_elements=self.num_wrong,
            first_wrong=self.first,
        )

    def _try(self, size: int) -> None:
        is_cut = self.primitive in (Primitive.REDUCE_SCATTER, Primitive.ALL_GATHER)
        terms_mn = self.terms(len(self.members), size * len(self.members) if is_cut else size)
        # Over gloo the pipeline passes messages through host memory.
        through_host = self.primitive is Primitive.SEND_RECV and dist.get_backend(self.group) == dist.Backend.GLOO
        device = torch.device("cpu") if through_host else self.device
        num_elements = terms_mn.shape[1]
        buffer_S = torch.full((num_elements + 2 * _GUARD,), _UNTOUCHED, device=device)
        view_n = buffer_S[_GUARD:-_GUARD]
        act, expected_n, suspect = self._prepare(terms_mn, view_n)
        self._run(act, num_elements)
        self.num_bytes += num_elements * view_n.element_size()
        guard = torch.full((_GUARD,), _UNTOUCHED)
        self._compare(buffer_S.cpu(), torch.cat([guard, expected_n.float(), guard]), num_elements, suspect)

    def _run(self, act: Callable[[], None], num_elements: int) -> None:
        self._synchronize()
        started_s = time.perf_counter()
        try:
            act()
        except (CollectiveError, RuntimeError, ValueError, TypeError) as error:
            title = f"{self.primitive.value} on group {self.name} (world ranks {list(self.members)})"
            raise CollectiveError(f"self-test: {title} of {num_elements} elements broke: {error}") from error
        self._synchronize()
        self.seconds += time.perf_counter() - started_s

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _prepare(self, terms_mn: Tensor, view_n: Tensor) -> tuple[Callable[[], None], Tensor, Callable[[int], int]]:
        """Fill the view; (the collective, what the view must then hold, the member whose share an element shows)."""
        num_members, num_elements = terms_mn.shape
        size = num_elements // num_members
        tensors = {self.members[self.me]: view_n}
        if self.primitive is Primitive.SEND_RECV:
            before = (self.me - 1) % num_members
            return lambda: self._pass_on(terms_mn[self.me].float(), view_n), terms_mn[before], lambda _: before
        if self.primitive is Primitive.BROADCAST:
            source = num_elements % num_members
            if source == self.me:
                view_n.copy_(terms_mn[source])
            act = lambda: self.communicator.broadcast(self.members, self.members[source], tensors)  # noqa: E731
            return act, terms_mn[source], lambda _: source
        if self.primitive is Primitive.ALL_GATHER:
            part(view_n, self.me, num_members).copy_(part(terms_mn[self.me], self.me, num_members))
            expected_n = torch.cat([part(terms_mn[index], index, num_members) for index in range(num_members)])
            return lambda: self.communicator.all_gather(self.members, tensors), expected_n, lambda e: e // size
        view_n.copy_(terms_mn[self.me])
        return self._prepare_sum(terms_mn, view_n, tensors)

    def _prepare_sum(
        self, terms_mn: Tensor, view_n: Tensor, tensors: dict[int, Tensor]
    ) -> tuple[Callable[[], None], Tensor, Callable[[int], int]]:
        num_members = len(self.members)
        averaging = self.op is CollectiveOp.AVERAGE
        # As the step averages: what was summed is scaled, and by a power of two no bit is lost.
        scale = Prescale(PrescaleKind.MULTIPLY_BY_INVERSE, 1 << (num_members - 1).bit_length(), averaging)
        summed_n = terms_mn.sum(dim=0).double()
        scale.settle(summed_n)
        scattering = self.primitive is Primitive.REDUCE_SCATTER
        expected_n, mine_n = summed_n, view_n
        if scattering:
            mine_n = part(view_n, self.me, num_members)
            # What is not this rank's keeps its value.
            expected_n = terms_mn[self.me].double()
            part(expected_n, self.me, num_members).copy_(part(summed_n, self.me, num_members))

        def act() -> None:
            run = self.communicator.reduce_scatter if scattering else self.communicator.all_reduce
            run(self.members, tensors)
            scale.settle(mine_n)

        factor = scale.divisor if averaging else 1
        size = mine_n.numel()

        def suspect(element: int) -> int:
            if scattering and element // size != self.me:
                return _NOBODY
            return self._misread(float(view_n[element]) * factor, element)

        return act, expected_n, suspect

    def _misread(self, total: float, element: int) -> int:
        """The member whose digit in a sum is not 1, where just one's is not."""
        if not (total.is_integer() and abs(total) <= EXACT_LIMIT):
            return _NOBODY
        code = RankCode(len(self.members), _CODE_DIGITS)
        contributors, digits = code.read(torch.tensor([int(total)]), torch.tensor([element]))
        odd = [int(c) for c, d in zip(contributors.flatten(), digits.flatten(), strict=True) if d != 1]
        odd = [member for member in odd if member < len(self.members)]
        return odd[0] if len(odd) == 1 else _NOBODY

    def _pass_on(self, sent_n: Tensor, view_n: Tensor) -> None:
        """Send to the next member, receive from the one before."""
        after, before = ((self.me + distance) % len(self.members) for distance in (1, -1))
        sends = dist.P2POp(dist.isend, sent_n.to(view_n.device), self.members[after], self.group)
        receives = dist.P2POp(dist.irecv, view_n, self.members[before], self.group)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    def _compare(self, found_S: Tensor, expected_S: Tensor, num_elements: int, suspect: Callable[[int], int]) -> None:
        wrong = (found_S != expected_S).nonzero().flatten()
        self.num_wrong += wrong.numel()
        if self.first is None and wrong.numel():
            at = int(wrong[0])
            element = at - _GUARD
            member = suspect(element) if 0 <= element < num_elements else _NOBODY
            share = None if member == _NOBODY else self.members[member]
            self.first = CollectiveFault(num_elements, element, float(expected_S[at]), float(found_S[at]), share)


def message_terms(num_members: int, num_elements: int) -> Tensor:
    """What each member sends: small integers, signed with the rank code, so that any sum is exact. Int64 [m, n]."""
    code = RankCode(num_members, _CODE_DIGITS)
    elements_n = torch.arange(num_elements)
    return torch.stack([code.sign(1 + (elements_n + 5 * member) % 3, member) for member in range(num_members)])
