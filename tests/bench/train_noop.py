"""Ray Train's own cost: a TorchTrainer whose four workers do nothing, on a local Ray of their own."""

from __future__ import annotations

import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def main() -> None:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage_path:
        TorchTrainer(
            lambda: None,
            scaling_config=ScalingConfig(num_workers=4),
            run_config=RunConfig(storage_path=storage_path),
        ).fit()


if __name__ == "__main__":
    main()
