"""One rank that trains while something runs alongside it: nothing, a save of its own, or a process that brings the
same bytes to the same place. Runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.plain_store import READ_SECONDS
from benchmarks.support.report import ROOT
from benchmarks.support.resident_memory import forget_peak, status_bytes
from manta.workers.checkpoint.checkpointer import Checkpointer
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError
from manta.workers.protocol.messages import Resume
from manta.workers.storage import object_files
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import parse_location
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

WARM_UP_STEPS = 3

Beside = Callable[[], bool]
"""Whether it still goes on. Raises MantaError where it has failed."""


@dataclass(frozen=True)
class Plan:
    """What the rank is to do."""

    arms: tuple[str, ...]
    """What runs alongside it, in turn: alone, local, upload, plain_copy, plain_upload."""
    alone_steps: int
    """Steps of a turn alone."""
    store: str
    """URL below which checkpoints are uploaded."""
    folder: str
    """Where they are saved on disk."""


@dataclass
class Turn:
    """What the trainer saw while something ran alongside it."""

    arm: str
    steps: list[float] = field(default_factory=list)
    """Seconds of each step that ended before that did."""
    seconds: float = 0.0
    """What went on took so long."""
    wait: float = 0.0
    """Seconds for which it kept the training thread waiting."""
    peak: int = 0
    """Most memory of the trainer's process and of the one that uploads, bytes."""


@dataclass
class Turns:
    """All that the trainer saw."""

    first: list[Turn]
    """Alone, then with its first save on disk, then with its first upload: for the memory, which the process keeps."""
    turns: list[Turn]
    """Turns of the plan."""
    bytes: int
    """Of a checkpoint."""


def train_in_turns(comm: Comm, spec: JobSpec, plan: Plan) -> Turns:
    """Take the turns of `plan`."""
    # A server that shares two cores with all this may take minutes to put a large object together.
    object_files.OPTIONS["s3"]["config_kwargs"]["read_timeout"] = READ_SECONDS
    rank = _Rank(comm, spec, plan)
    source = f"{plan.folder}/source"
    first = [rank.turn("alone", source), rank.turn("local", source), rank.turn("upload", f"{plan.store}/first")]
    files_of(parse_location(plan.store)).remove_folder(parse_location(f"{plan.store}/first"))
    turns = []
    for number, arm in enumerate(plan.arms):
        to = parse_location(f"{plan.store if arm in ('upload', 'plain_upload') else plan.folder}/{number}")
        turns.append(rank.turn(arm, str(to)))
        files_of(to).remove_folder(to)
    rank.trainer.close()
    rank.rows.close()
    return Turns(first, turns, files_of(Path(source)).bytes_in(Path(source)))


class _Rows(Reporter):
    """Keeps the rows of metrics."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.rows: list[dict[str, Any]] = []

    def metrics(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


class _Rank:
    def __init__(self, comm: Comm, spec: JobSpec, plan: Plan):
        self._plan, self._comm, self.rows = plan, comm, _Rows()
        self.trainer = Trainer(spec, comm, self.rows, 1e12, StatePaths("benchmark", None, plan.folder))
        self.trainer.restore(Resume())
        for _ in range(WARM_UP_STEPS):
            self.trainer.train_step()

    def turn(self, arm: str, to: str) -> Turn:
        """Train while something is brought to `to`, if that is not "alone"."""
        self.rows.rows.clear()
        forget_peak()
        turn = Turn(arm)
        goes_on = self._begin(arm, to, turn)
        began = time.perf_counter()
        while goes_on():
            at = time.perf_counter()
            self.trainer.train_step()
            now = time.perf_counter()
            if goes_on() or not turn.steps:
                turn.steps.append(now - at)
            turn.seconds = now - began
        turn.wait = sum(row["seconds"]["checkpoint_stall"] for row in self.rows.rows)
        turn.peak = _peak()
        return turn

    def _begin(self, arm: str, to: str, turn: Turn) -> Beside:
        if arm == "alone":
            return lambda: len(turn.steps) < self._plan.alone_steps
        if arm.startswith("plain_"):
            (checkpoint,) = (Path(self._plan.folder) / "source").iterdir()
            return _plain(checkpoint, to)
        checkpoints = self._checkpoints
        checkpoints.folder = to
        with self._comm.step.phase("checkpoint"):
            checkpoints.start(self.trainer.step)
        return self._saves

    @property
    def _checkpoints(self) -> Checkpointer:
        assert isinstance(self.trainer.state.checkpoints, Checkpointer)
        return self.trainer.state.checkpoints

    def _saves(self) -> bool:
        if self._checkpoints.writing:
            return True
        self._checkpoints.finish()
        if self._checkpoints.failure is not None:
            raise MantaError(f"a checkpoint could not be saved: {self._checkpoints.failure}")
        return False


def _plain(checkpoint: Path, to: str) -> Beside:
    command = [sys.executable, "-m", "benchmarks.support.plain_store", str(checkpoint), to]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()

    def goes_on() -> bool:
        if process.poll() is None:
            return True
        if process.returncode != 0:
            raise MantaError(f"the plain copy to {to} ended with exit code {process.returncode}")
        return False

    return goes_on


def _peak() -> int:
    """Of this process, and of those that it has started what they do not share with it."""
    beside = [child.pid for child in psutil.Process().children()]
    alone = sum(status_bytes("VmHWM", pid) - status_bytes("RssShmem", pid) for pid in beside)
    return status_bytes("VmHWM") + alone
