"""What a process learns from its launcher's variables, and what it says where they are missing or do not fit."""

from __future__ import annotations

import pytest

from workers.contract import Device, Mesh
from workers.launch import LaunchError, Place, first_node, open_store, read_place, speaks, take_device

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[03-04,9],login1",
}


def test_torchrun_and_slurm_say_the_same() -> None:
    assert read_place(TORCHRUN, Mesh(2, 2)) == Place(3, 4, 1, 2, "head", 29500)
    assert read_place(SLURM, Mesh(2, 2)) == Place(3, 4, 1, 2, "gpu03", 20_000 + 123456 % 20_000)


def test_what_is_set_by_hand_beats_slurm_s_guess() -> None:
    place = read_place(SLURM | {"MASTER_ADDR": "gpu09", "MASTER_PORT": "4000"}, Mesh(2, 2))
    assert (place.master_host, place.master_port) == ("gpu09", 4000)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[003-007,9],x", "gpu003"), ("n-1-[4,6]", "n-1-4"), ("", None)],
)
def test_first_node(node_list: str, first: str | None) -> None:
    assert first_node(node_list) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": ""}, "torchrun --nproc_per_node 4 -m workers"),
        ({"WORLD_SIZE": "8"}, "8 ranks were started for a mesh of dp 2 x pp 2 = 4"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'; it must be a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is ''"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is None"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as raised:
        read_place(TORCHRUN | changes, Mesh(2, 2))
    assert message in str(raised.value)


def test_one_rank_speaks_for_all() -> None:
    assert not speaks(TORCHRUN)
    assert not speaks(SLURM)
    assert speaks(TORCHRUN | {"RANK": "0"})
    assert speaks({})


def test_nobody_to_meet_is_an_error_that_names_the_place() -> None:
    place = Place(1, 2, 0, 1, "127.0.0.1", 9)
    with pytest.raises(LaunchError, match=r"could not meet the others at 127\.0\.0\.1:9 within 0.5 s"):
        open_store({}, place, 0.5)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    place = Place(0, 1, 0, 1, "h", 1)
    assert take_device(Device.AUTO, place, None) is Device.CPU
    with pytest.raises(LaunchError, match="torch sees no GPU here"):
        take_device(Device.CUDA, place, None)


def test_nccl_needs_a_gpu_for_each_rank_and_gloo_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    place = Place(3, 4, 3, 4, "h", 1)
    with pytest.raises(LaunchError, match="host with 2 GPUs"):
        take_device(Device.CUDA, place, None)
    assert take_device(Device.CUDA, place, "gloo") is Device.CUDA
    assert take_device(Device.AUTO, place, None) is Device.CPU
    assert take_device(Device.AUTO, Place(1, 2, 1, 2, "h", 1), None) is Device.CUDA
    assert taken == [1, 1]
