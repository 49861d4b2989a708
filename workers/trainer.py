"""The step loop of one rank."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.accounting import step_flops
from workers.checkpoint.checkpointer import Checkpointer
from workers.checkpoint.snapshot import Snapshots, fingerprint
from workers.comm import Comm
from workers.config import JobSpec
from workers.data.batches import Batches
from workers.learning_rate import learning_rate
from workers.messages import Resume
from workers.model.gpt import GPTStage
from workers.parallel.flat import FlatParameters
from workers.parallel.pipeline import Pipeline
from workers.parallel.shards import initialise
from workers.parallel.zero import StepStatistics, ZeroOptimizer
from workers.reporter import Reporter

# Rows of metrics kept in a snapshot: more steps than are ever under way to the database.
JOURNAL_ROWS = 256


@dataclass(frozen=True)
class Places:
    """Where a rank keeps its state outside of its process; None turns the kind off."""

    job: str = "local"
    """Job id, written into checkpoints."""
    snapshots: str | None = None
    """Folder in shared memory."""
    checkpoints: str | None = None
    """Folder for durable checkpoints."""


class Trainer:
    """One rank of a job: its stage of the model, its part of the optimizer, its share of every batch."""

    def __init__(self, spec: JobSpec, comm: Comm, reporter: Reporter, peak_flops: float, places: Places = Places()):
        self.spec, self.comm, self.reporter, self.peak_flops = spec, comm, reporter, peak_flops
        self.batches = Batches(spec, comm.index("data"), comm.device)
        self.model = GPTStage(spec, comm).to(comm.device)
        self.shards = self.model.named_shards()
        self.flat = FlatParameters(self.shards, comm.size("data"), comm.device)
        self.optimizer = ZeroOptimizer(
            self.flat, spec.train.optimizer, comm, spec.layout.sequence_parallel_on, spec.model.tie_embeddings
        )
        self.pipeline = Pipeline(spec, self.model, comm)
        self.flops = step_flops(spec)
        self.snapshots = self._open_snapshots(places)
        self.checkpoints: Checkpointer | None = None
        if places.checkpoints is not None:
            self.checkpoints = Checkpointer(places.checkpoints, places.job, spec, self.optimizer, comm, reporter.event)
        self.step = 0
        """Last committed step."""
        self._journal: deque[bytes] = deque(maxlen=JOURNAL_ROWS)

    def _open_snapshots(self, places: Places) -> Snapshots | None:
        if places.snapshots is None:
            return None
        state = [self.optimizer.parameters, self.optimizer.exp_avg, self.optimizer.exp_avg_sq]
        identity = fingerprint(self.spec.model_dump(mode="json"), self.comm.rank)
        return Snapshots(places.snapshots, self.comm.rank, state, identity)

    def restore(self, resume: Resume) -> None:
        """Bring the state to committed step `resume.step`. Raises CheckpointError when it cannot be had."""
        if resume.source == "start":
            initialise(self.shards, self.spec.train.seed)
        elif resume.source == "snapshot" and self.snapshots is not None:
            self._report_again(self.snapshots.load(resume.step))
        elif resume.source == "checkpoint" and self.checkpoints is not None and resume.path is not None:
            self.checkpoints.restore(resume.path)
        else:
            raise ValueError(f"cannot resume from {resume} without a place for it")
        if resume.source != "start":
            self.optimizer.gather_parameters()
        self.optimizer.set_step(resume.step)
        self.step = resume.step
        if self.snapshots is not None and resume.source != "snapshot":
            self.snapshots.clear()
            self.snapshots.save(self.step)

    def train(self) -> None:
        """Run all steps that are left, and save what the last generation did not get to save."""
        if self.checkpoints is not None and self.checkpoints.is_missing(self.step):
            self.checkpoints.start(self.step)
        while self.step < self.spec.train.steps:
            self.train_step()
        if self.checkpoints is not None:
            self.checkpoints.finish()
        self.comm.barrier()

    def train_step(self) -> StepStatistics:
        """One step: compute, agree, update, keep, report."""
        began = time.perf_counter()
        step = self.step + 1
        rate = learning_rate(self.spec.train.optimizer, step, self.spec.train.steps)
        batch = self.batches.training(step) if self._reads_data else []
        loss_sum = self.pipeline.train(batch)
        statistics = self.optimizer.step(rate, loss_sum, memory_in_use(self.comm.device))
        self.step = step
        validation_loss = self.validate() if self._validates(step) else None

        def row() -> dict[str, Any]:
            return self._row(step, statistics, rate, time.perf_counter() - began, validation_loss)

        self._keep_and_report(step, row)
        if self.checkpoints is not None and self.checkpoints.due(step):
            self.checkpoints.start(step)
        return statistics

    def _keep_and_report(self, step: int, make_row: Callable[[], dict[str, Any]]) -> None:
        """Snapshot the step and report its row. The snapshot holds the rows of the last steps too: a process that is
        killed takes the rows with it that it had not shipped yet."""
        made: list[dict[str, Any]] = []

        def note() -> bytes:
            if self.comm.rank > 0:
                return b""
            made.append(make_row())
            self._journal.append(json.dumps(made[0]).encode())
            return b"\n".join(self._journal)

        if self.snapshots is not None and step % self.spec.checkpoint.snapshot_every_steps == 0:
            self.snapshots.save(step, note)
        else:
            note()
        for row in made:
            self.reporter.metrics(row)

    def _report_again(self, note: bytes) -> None:
        """Report the rows that came with a snapshot; the receiver knows most of them already."""
        for line in note.splitlines():
            self._journal.append(line)
            self.reporter.metrics(json.loads(line))

    def validate(self) -> float:
        """Mean loss over the validation batches, in nats a token; the same on every rank."""
        count = self.batches.validation_batches()
        total = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        for index in range(count):
            total += self.pipeline.evaluate(self.batches.validation(index) if self._reads_data else [])
        self.comm.all_reduce("world", total)
        return float(total) / count

    @property
    def _reads_data(self) -> bool:
        return self.model.is_first or self.model.is_last

    def _validates(self, step: int) -> bool:
        every = self.spec.train.validate_every
        return every > 0 and step % every == 0

    def _row(
        self, step: int, statistics: StepStatistics, rate: float, seconds: float, validation_loss: float | None
    ) -> dict[str, Any]:
        """The step's numbers by the names of the REST contract. MFU: arXiv:2204.02311, appendix B."""
        tokens = self.pipeline.tokens_per_step
        available = seconds * self.peak_flops * self.comm.size("world")
        row = {
            "step": step,
            "loss": statistics.loss,
            "grad_norm": statistics.grad_norm,
            "learning_rate": rate,
            "tokens": step * tokens,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
            "mfu_full": self.flops.model_full / available,
            "mfu_causal": self.flops.model_causal / available,
            "hfu_full": self.flops.hardware_full / available,
            "memory_bytes": statistics.memory_bytes,
        }
        if validation_loss is not None:
            row["validation_loss"] = validation_loss
        return row


def memory_in_use(device: torch.device) -> int:
    """Bytes of device memory at its peak on a GPU; of resident memory now on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
