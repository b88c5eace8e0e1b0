"""The real library's `final` gradients from its `local` ones, bit for bit, through the code of the live step."""

from __future__ import annotations

from typing import Any

import golden_cases
import numpy as np
import pytest
import torch
from gloo_world import run_world

from workers.communicator import ProcessGroups, VirtualRanks
from workers.grad_sync import sync_gradients


def bits(values: np.ndarray) -> np.ndarray:
    """NaN-safe and sign-of-zero-safe comparison needs the bits themselves."""
    return np.ascontiguousarray(values).view(np.uint32)


@pytest.mark.parametrize("name", golden_cases.NAMES)
def test_virtual_ranks_reproduce_final(name: str) -> None:
    case = golden_cases.load(name)
    buffers = {rank: case.buffers(rank) for rank in range(case.mesh.world_size)}
    communicator = VirtualRanks(case.mesh.world_size)
    sync_gradients(case.ordering, case.mesh, buffers, communicator, case.prescale, lambda _: None)
    for rank, (buffer,) in buffers.items():
        np.testing.assert_array_equal(bits(buffer.tied_grad().numpy()), bits(case.expected_final(rank)), str(rank))


@pytest.mark.parametrize("name", golden_cases.NAMES)
def test_gloo_ranks_reproduce_final(name: str) -> None:
    case = golden_cases.load(name)
    finals = run_world(case.mesh.world_size, golden_final, name)
    for rank, final in enumerate(finals):
        np.testing.assert_array_equal(bits(final), bits(case.expected_final(rank)), f"world_rank {rank}")


@pytest.mark.parametrize("name", golden_cases.NAMES)
def test_assembled_ends_show_the_captured_error(name: str) -> None:
    case = golden_cases.load(name)
    buffers = {rank: case.buffers(rank) for rank in range(case.mesh.world_size)}
    communicator = VirtualRanks(case.mesh.world_size)
    sync_gradients(case.ordering, case.mesh, buffers, communicator, case.prescale, lambda _: None)
    wte, lm_head = (assemble(case, buffers, pp_rank) for pp_rank in (0, 1))
    assert int((wte != lm_head).sum()) == case.facts["assembled_elements_unequal"]
    assert float(np.abs(wte - lm_head).max()) == pytest.approx(case.facts["assembled_tied_max_abs"], abs=0, rel=1e-6)
    wte_error = float(np.abs(wte - case.reference).max())
    assert wte_error == pytest.approx(case.facts["assembled_wte_vs_reference_max_abs"], rel=1e-6)


@pytest.mark.parametrize("name", golden_cases.NAMES)
def test_owned_elements_are_the_library_s(name: str) -> None:
    case = golden_cases.load(name)
    for rank in range(case.mesh.world_size):
        at = case.mesh.coordinates(rank)
        owned = np.zeros(case.local.shape[-1], dtype=bool)
        for interval in case.owned_intervals(rank):
            owned[interval.start : interval.stop] = True
        np.testing.assert_array_equal(owned, case.owned[at.pp_rank, at.dp_rank])


def assemble(case: golden_cases.GoldenCase, buffers: dict[int, Any], pp_rank: int) -> np.ndarray:
    """One end's gradient, each element from its owner."""
    whole = np.full(case.local.shape[-1], np.nan, dtype=np.float32)
    for dp_rank in range(case.dp):
        rank = case.mesh.world_rank(dp_rank, pp_rank)
        for interval in case.owned_intervals(rank):
            view = slice(interval.start, interval.stop)
            whole[view] = buffers[rank][0].tied_grad()[view].numpy()
    return whole


def golden_final(session: Any, name: str) -> np.ndarray:
    """On one rank: put the captured local gradient in place, synchronise, return what this rank holds."""
    case = golden_cases.load(name)
    groups = session.mesh_groups(case.mesh)
    buffers = case.buffers(session.world_rank)
    communicator = ProcessGroups(session.world_rank, groups)
    with torch.no_grad():
        sync_gradients(
            case.ordering, case.mesh, {session.world_rank: buffers}, communicator, case.prescale, lambda _: None
        )
    return buffers[0].tied_grad().numpy().copy()
