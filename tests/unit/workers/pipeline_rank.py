"""One gloo rank of test_pipeline: runs every case's pipeline and saves what its tied weight's hook gathered.

A script rather than a function, so that ranks are plain processes. Usage: pipeline_rank.py WORLD_RANK WORLD_SIZE FOLDER
"""

import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from workers.contract import BatchSpec, Dtype, Mesh, ModelSpec, OrderingName, ProbeName, Schedule, TrialSpec
from workers.models import build_stage, microbatches, seed_weights
from workers.parameters import tied_parameter_name
from workers.pipeline import Pipeline

SMALL = ModelSpec(vocab_size=29, hidden_size=12, num_layers=4, num_heads=3, seq_len=7)
SHALLOW = ModelSpec(vocab_size=11, hidden_size=6, num_layers=1, num_heads=2, seq_len=5)
BASE = TrialSpec(ProbeName.GPT, OrderingName.FIXED, Mesh(1, 1), SMALL, BatchSpec(2, 5), seed=3)
MESHES = (Mesh(1, 1), Mesh(2, 1), Mesh(1, 2), Mesh(2, 2), Mesh(1, 3), Mesh(1, 4))
KINDS = ((ProbeName.GPT, Dtype.FLOAT32), (ProbeName.GPT, Dtype.BFLOAT16), (ProbeName.EXACT, Dtype.FLOAT32))
CASES = [
    replace(BASE, mesh=mesh, model=model, probe=probe, dtype=dtype)
    for mesh, (probe, dtype), model in product(MESHES, KINDS, (SMALL, SHALLOW))
]
CASES += [
    replace(BASE, mesh=mesh, probe=probe, batch=BatchSpec(1, num_microbatches), model=replace(SMALL, num_layers=7))
    for mesh, num_microbatches in ((Mesh(1, 2, vpp=2), 2), (Mesh(2, 2, vpp=3), 6), (Mesh(1, 3, vpp=2), 3))
    for probe in ProbeName
]
CASES += [replace(BASE, mesh=Mesh(1, pp), schedule=Schedule.GPIPE, batch=BatchSpec(1, 2)) for pp in (1, 2, 4)]
STEPS = {ProbeName.GPT: 1, ProbeName.EXACT: 3}


def gather_main_grad(stage: torch.nn.Module, name: str | None) -> torch.Tensor | None:
    """Float32 sum over backwards of one parameter's gradient; every other gradient is dropped."""
    main_grad = None
    for parameter_name, parameter in stage.named_parameters():
        if parameter_name == name:
            main_grad = torch.zeros(parameter.shape)
        parameter.register_post_accumulate_grad_hook(adder(main_grad if parameter_name == name else None))
    return main_grad


def adder(main_grad: torch.Tensor | None):
    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if main_grad is not None:
            main_grad.add_(parameter.grad)
        parameter.grad = None

    return add


def run_case(spec: TrialSpec, world_rank: int, pp_groups: dict) -> list[dict]:
    """Every step of one trial on this rank."""
    here = spec.mesh.coordinates(world_rank)
    device = torch.device("cpu")
    stages = spec.mesh.stages(here.pp_rank)
    modules = [build_stage(spec, stage, device) for stage in stages]
    gathered = [
        gather_main_grad(module, tied_parameter_name(spec.mesh.num_stages, stage))
        for module, stage in zip(modules, stages, strict=True)
    ]
    main_grad = next((grad for grad in gathered if grad is not None), None)
    pipeline = Pipeline(modules, spec, here.pp_rank, pp_groups[spec.mesh, here.dp_rank], device)
    results = []
    for step in range(STEPS[spec.probe]):
        for module, stage in zip(modules, stages, strict=True):
            seed_weights(module, spec, stage, step)
        if main_grad is not None:
            main_grad.zero_()
        began = time.perf_counter()
        loss = pipeline.run_step(*microbatches(spec, step, here.dp_rank, device))
        seconds = time.perf_counter() - began
        gradient = None if main_grad is None else main_grad.flatten().clone()
        parameters = [named for module in modules for named in module.named_parameters()]
        leftover = [name for name, parameter in parameters if parameter.grad is not None]
        results.append({"loss": loss, "gradient": gradient, "leftover": leftover, "seconds": seconds})
    return results


def main() -> None:
    world_rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=world_rank, world_size=world_size)
    pp_groups = {
        (mesh, dp_rank): dist.new_group([mesh.world_rank(dp_rank, pp_rank) for pp_rank in range(mesh.pp)])
        for mesh in dict.fromkeys(spec.mesh for spec in CASES)
        for dp_rank in range(mesh.dp)
    }
    results = {
        index: run_case(spec, world_rank, pp_groups)
        for index, spec in enumerate(CASES)
        if world_rank < spec.mesh.world_size
    }
    torch.save(results, folder / f"rank{world_rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
