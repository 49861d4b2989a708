"""The baselines' job under Ray Train: `baseline_ray_train.py FOLDER STEPS CHECKPOINT_EVERY WORKERS MAX_FAILURES`.

Run with a Python that has `ray[train]`, as a program of its own: it starts a Ray and ends it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.support.baseline_toy import Toy, train


def loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    context = ray.train.get_context()
    rank = context.get_world_rank()

    def load() -> dict | None:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            state: dict = torch.load(Path(folder) / "checkpoint.pt")
        return state

    def save(step: int, state: dict) -> None:
        if rank != 0:
            ray.train.report({"step": step})
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder) / "checkpoint.pt")
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))

    folder = Path(config["folder"])
    attempt = str(len(list(folder.glob("began-*"))) if rank else _begin(folder))
    world = context.get_world_size()
    train(Toy(rank, world, attempt, folder, config["steps"], config["checkpoint_every"], load, save))


def _begin(folder: Path) -> int:
    number = len(list(folder.glob("began-*"))) + 1
    (folder / f"began-{number}").touch()
    return number


def fit(loop: Callable[[dict[str, Any]], None], config: dict[str, Any], workers: int, failures: int) -> None:
    """Have `workers` run `loop` with `config` to its end, through as many `failures`, on a Ray of its own."""
    root = str(Path(__file__).resolve().parents[2])
    ray.init(
        "local",
        num_cpus=workers + 1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}},
    )
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            storage_path=str(Path(config["folder"]) / "storage"),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()
    ray.shutdown()


def main() -> int:
    """Train to the last step; returns the exit status."""
    folder, steps, every, workers, failures = sys.argv[1], *(int(word) for word in sys.argv[2:6])
    fit(loop, {"folder": folder, "steps": steps, "checkpoint_every": every}, workers, failures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
