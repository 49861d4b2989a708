"""What snapshots of a real training step cost on a device: how fast they are copied, for how long they hold it up, and
a checkpoint that is written from one."""

from __future__ import annotations

import statistics
import tempfile
import time

import torch

from benchmarks.support.gpu.contestants import WARM_UP, settle
from benchmarks.support.gpu.sizes import Size
from benchmarks.support.report import Report
from workers.accounting.snapshot_bytes import checkpoint_bytes, snapshot_bytes
from workers.comm.comm import Comm
from workers.comm.grid import RankGrid
from workers.config import JobSpec
from workers.errors import MantaError
from workers.paths import SHARED_MEMORY
from workers.protocol.messages import Resume
from workers.reporter import Reporter
from workers.spec.reading import parse_job_spec
from workers.system import gpu
from workers.system.host_memory import memory_available
from workers.trainer import NO_PLACES, Places, Trainer

GOAL_STALL = 0.01
"""Most of a step's time that a snapshot may hold the device up."""


def measure_snapshots(
    report: Report, name: str, size: Size, seed: int, steps: int, device: torch.device, compiled: bool
) -> None:
    """Train without snapshots, then with one after each step. Raises MantaError where there is no memory for them."""
    spec = parse_job_spec(size.document(seed, compiled, checkpoint={"every_steps": 0, "snapshot_every_steps": 1}))
    needed = snapshot_bytes(spec)
    if needed > memory_available():
        raise MantaError(f"the snapshots of {name} take {needed} bytes, and {memory_available()} can be had")
    without = statistics.median(_trained(spec, device, NO_PLACES, steps)[0])
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared, tempfile.TemporaryDirectory() as durable:
        places = Places("snapshots", snapshots=shared, checkpoints=durable)
        seconds, stalls, copies, saved, pinned = _trained(spec, device, places, steps)
    step, copied = statistics.median(seconds), statistics.median(copies)
    report.add(f"snapshot_{name}_bytes", checkpoint_bytes(spec), "bytes")
    report.add(f"snapshot_{name}_copied", round(checkpoint_bytes(spec) / copied / 1e9, 3), "GB/s")
    report.add(f"snapshot_{name}_stall_share", round(statistics.median(stalls) / step, 5), "ratio", GOAL_STALL)
    report.add(f"snapshot_{name}_step_to_without", round(step / without, 4), "ratio")
    report.add(f"snapshot_{name}_checkpoint_written_in", round(saved, 3), "s")
    if device.type == "cuda":
        report.add(f"snapshot_{name}_memory_is_pinned", pinned, "bool", True)


def _trained(
    spec: JobSpec, device: torch.device, places: Places, steps: int
) -> tuple[list[float], list[float], list[float], float, bool]:
    """Seconds of each step, of each stall and of each copy after warm-up; seconds of a checkpoint; whether the memory
    of the snapshots is pinned."""
    gpu.use_for(spec, device)
    trainer = Trainer(spec, Comm(RankGrid(spec.layout), 0, device), Reporter(lambda messages: None), 1e12, places)
    trainer.restore(Resume())
    snapshots, checkpoints = trainer.state.snapshots, trainer.state.checkpoints
    seconds, stalls, copies = [], [], []
    for number in range(WARM_UP + steps):
        settle(device)
        began = time.perf_counter()
        trainer.train_step()
        settle(device)
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
            stalls.append(trainer.state.stall_seconds)
            copies.append(snapshots.copy_seconds if snapshots is not None else 0.0)
    began = time.perf_counter()
    if checkpoints is not None:
        checkpoints.start(trainer.step)
        checkpoints.finish()
        if checkpoints.failure is not None:
            raise MantaError(f"the checkpoint could not be saved: {checkpoints.failure}")
    saved, pinned = time.perf_counter() - began, snapshots is not None and snapshots.pin_error == 0
    trainer.close()
    trainer.reporter.close()
    return seconds, stalls, copies, saved, pinned
