"""What snapshots of a real training step cost on a device: how fast they are copied, for how long they hold it up, and
a checkpoint that is written from one."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass

import torch

from benchmarks.support.gpu.contestants import WARM_UP, settle
from benchmarks.support.gpu.sizes import Size
from benchmarks.support.report import Report
from manta.workers.accounting.state_costs import checkpoint_bytes, snapshot_bytes, steps_between
from manta.workers.checkpoint.checkpointer import Checkpointer
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.paths import SHARED_MEMORY
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.interval import AGREE_EVERY
from manta.workers.snapshot.snapshots import Snapshots
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system import gpu
from manta.workers.system.host_memory import memory_available
from manta.workers.trainer import NO_PATHS, StatePaths, Trainer
from manta.workers.training.reporter import Reporter

GOAL_STALL = 0.01
"""Most of a step's time that snapshots may hold the device up, as a mean over steps, at the interval that a job chooses
by itself."""
INTERVALS_AFTER = 2
"""Of those that are measured."""


def measure_snapshots(
    report: Report, name: str, size: Size, seed: int, steps: int, device: torch.device, compiled: bool
) -> None:
    """Train without snapshots, with one after each step, and at the interval that the job chooses. Raises MantaError
    where there is no memory for them."""

    def job(every: int | str) -> JobSpec:
        return parse_job_spec(
            size.document(seed, compiled, checkpoint={"every_steps": 0, "snapshot_every_steps": every})
        )

    spec = job(1)
    needed = snapshot_bytes(spec)
    if needed > memory_available():
        raise MantaError(f"the snapshots of {name} take {needed} bytes, and {memory_available()} can be had")
    without = statistics.median(_trained(spec, device, NO_PATHS, steps).seconds)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared, tempfile.TemporaryDirectory() as durable:
        places = StatePaths("snapshots", snapshots=shared, checkpoints=durable)
        each = _trained(spec, device, places, steps)
    step, stall = statistics.median(each.seconds), statistics.median(each.stalls)
    report.add(f"snapshot_{name}_bytes", checkpoint_bytes(spec), "bytes")
    report.add(
        f"snapshot_{name}_copied", round(checkpoint_bytes(spec) / statistics.median(each.copies) / 1e9, 3), "GB/s"
    )
    report.add(f"snapshot_{name}_stall", round(1e3 * stall, 3), "ms")
    report.add(f"snapshot_{name}_each_step_to_without", round(step / without, 4), "ratio")
    report.add(f"snapshot_{name}_checkpoint_written_in", round(each.saved, 3), "s")
    if device.type == "cuda":
        report.add(f"snapshot_{name}_memory_is_pinned", each.pinned, "bool", True)
    counted = max(steps, INTERVALS_AFTER * steps_between(stall, step))
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
        chosen = _trained(
            job("auto"), device, StatePaths("snapshots", snapshots=shared), counted, warm_up=AGREE_EVERY + 1
        )
    report.add(f"snapshot_{name}_interval", chosen.interval, "steps")
    report.add(f"snapshot_{name}_stall_share", round(sum(chosen.stalls) / sum(chosen.seconds), 5), "ratio", GOAL_STALL)
    report.add(f"snapshot_{name}_step_to_without", round(statistics.mean(chosen.seconds) / without, 4), "ratio")


@dataclass(frozen=True)
class _Trained:
    """What was seen after warm-up."""

    seconds: list[float]
    """Of each step."""
    stalls: list[float]
    """Of each step, 0 where there was no snapshot to wait for."""
    copies: list[float]
    """Of the last copy before each step's end."""
    interval: int
    """Steps from one snapshot to the next, in the end."""
    saved: float
    """Seconds of a checkpoint."""
    pinned: bool
    """Whether the memory of the snapshots is."""


def _trained(spec: JobSpec, device: torch.device, places: StatePaths, steps: int, warm_up: int = WARM_UP) -> _Trained:
    gpu.use_for(spec, device)
    trainer = Trainer(spec, Comm(RankGrid(spec.layout), 0, device), Reporter(lambda messages: None), 1e12, places)
    trainer.restore(Resume())
    snapshots, checkpoints = trainer.state.snapshots, trainer.state.checkpoints
    seconds, stalls, copies = [], [], []
    for number in range(warm_up + steps):
        settle(device)
        waits = trainer.state.interval.due(trainer.step)
        began = time.perf_counter()
        trainer.train_step()
        settle(device)
        if number >= warm_up:
            seconds.append(time.perf_counter() - began)
            stalls.append(trainer.state.snapshots.stall_seconds if waits else 0.0)
            copies.append(snapshots.copy_seconds)
    began = time.perf_counter()
    if isinstance(checkpoints, Checkpointer):
        checkpoints.start(trainer.step)
        checkpoints.finish()
        if checkpoints.failure is not None:
            raise MantaError(f"the checkpoint could not be saved: {checkpoints.failure}")
    saved, pinned = time.perf_counter() - began, isinstance(snapshots, Snapshots) and snapshots.pin_error == 0
    trainer.close()
    trainer.reporter.close()
    return _Trained(seconds, stalls, copies, trainer.state.interval.every, saved, pinned)
