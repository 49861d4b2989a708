"""The engine under Ray Train, as a baseline; takes the arguments of `baseline_ray_train.py`.

The job is the one that Manta's own recovery is measured with, at tensor 2 x data 2. What happened goes to the files of
`baseline_toy.py`. Run with a Python that has `ray[train]`, as a program of its own: it starts a Ray and ends it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray.train

from benchmarks.support.baseline_ray_train import fit
from benchmarks.support.jobs import quickstart
from manta.workers.integrations.ray_train import train

SEED = 1


def loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def note(row: dict[str, Any]) -> None:
        with (folder / "steps").open("a") as file:
            file.write(f"{time.time()} {row['step']} {row['generation']}\n")

    train(config["job"], on_row=note)


def main() -> int:
    """Train to the last step; returns the exit status."""
    folder, steps, every, workers, failures = sys.argv[1], *(int(word) for word in sys.argv[2:6])
    job = quickstart((2, 1, workers // 2), steps, SEED)
    job["checkpoint"] = {"every_steps": every}
    fit(loop, {"folder": folder, "job": job}, workers, failures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
