"""The failure that the demo injects: one rank's process is killed in the middle of the run. The steps around it are
trained a second time without it, by the engine alone, from the job's checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from manta.api.client import Client
from manta.api.schemas import Job, Rank, Recovery
from manta.workers.errors import MantaError

COMPARED = ("loss", "grad_norm")
REPLAY_SECONDS = 120.0


class NotRecovered(MantaError):
    """The job has no record of a recovery from the failure that was made."""


@dataclass(frozen=True)
class Killed:
    """A rank whose process was killed."""

    rank: Rank
    """As it was, with the process id that was killed."""
    ranks: int
    """Of the job."""
    step: int
    """Last step that was known to be committed then."""
    at: float
    """Unix time in seconds."""


@dataclass(frozen=True)
class Outcome:
    """What the failure cost."""

    killed: Killed
    seconds: float
    """From the kill to the next committed step."""
    kept: int
    """Processes that kept running, with their weights."""
    steps_redone: int
    """Committed steps that were done again."""


class RankKiller:
    """Kills one rank of a job, once, when the job has committed a certain step."""

    def __init__(self, client: Client, job_id: str, at_step: int, console: Console):
        self._client, self._job_id, self._at_step, self._console = client, job_id, at_step, console
        self.killed: Killed | None = None
        """None until it is done."""

    def poll(self, job: Job) -> None:
        """Kill a rank if the time has come."""
        if self.killed is not None or job.step < self._at_step or job.step >= job.steps:
            return
        ranks = self._client.ranks(self._job_id).items
        victim = ranks[len(ranks) // 2 + 1 if len(ranks) > 2 else -1]
        if victim.pid is None:
            return
        self.killed = Killed(victim, len(ranks), job.step, time.time())
        os.kill(victim.pid, signal.SIGKILL)
        self._console.print(f"kill -9 {victim.pid}: {described(victim)}, after step {job.step}", highlight=False)


def outcome_of(recoveries: Sequence[Recovery], killed: Killed) -> Outcome:
    """What the recovery from the kill of a rank cost. Raises NotRecovered where there is none."""
    for recovery in recoveries:
        if recovery.rank == killed.rank.rank and recovery.total_seconds is not None:
            next_step = recovery.time.timestamp() + recovery.total_seconds
            return Outcome(killed, next_step - killed.at, recovery.kept, recovery.steps_redone or 0)
    raise NotRecovered(f"rank {killed.rank.rank} was killed, but `manta recoveries` shows no recovery from that")


def described(rank: Rank) -> str:
    """Which part of the layout a rank is."""
    return f"rank {rank.rank} (tensor {rank.tensor}, pipeline {rank.pipeline}, data {rank.data})"


class ReplayFailed(MantaError):
    """The steps could not be trained again; the message says why."""


@dataclass(frozen=True)
class Comparison:
    """Steps of the job next to the same steps of the replay."""

    first: int
    last: int
    differing: tuple[int, ...]
    """Steps whose numbers have other bits."""

    @property
    def holds(self) -> bool:
        """Whether all have the same."""
        return not self.differing

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.last}"
        if self.holds:
            return f"{steps} trained again from the checkpoint of step {self.first - 1} without the kill: same bits"
        return f"of {steps}, trained again without the kill, {list(self.differing)} have OTHER BITS"


def replay(client: Client, document: dict[str, Any], job_id: str, saved: int, last: int, folder: Path) -> Comparison:
    """Train the steps from the job's checkpoint of step `saved` to step `last` again, in `folder`, and compare losses
    and gradient norms with the job's. Raises ReplayFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints = [Path(item.path) for item in client.checkpoints(job_id).items if item.step == saved and item.path]
    source = next((path for path in checkpoints if path.is_dir()), None)
    if source is None:
        raise ReplayFailed(f"the checkpoint of step {saved} is not there to start from")
    shutil.copytree(source, folder / "checkpoints" / source.name)
    rows = _train(document, folder, last)
    metrics = client.metrics(job_id, names=list(COMPARED), after_step=saved, max_points=10_000)
    job_rows = {step: [metrics.series[name][at] for name in COMPARED] for at, step in enumerate(metrics.steps)}
    steps = range(saved + 1, last + 1)
    return Comparison(saved + 1, last, tuple(step for step in steps if job_rows.get(step) != rows.get(step)))


def _train(document: dict[str, Any], folder: Path, last: int) -> dict[int, list[float]]:
    """By step what the engine alone computes, on as many processes as the layout has ranks."""
    config, metrics = folder / "job.yaml", folder / "metrics.jsonl"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    layout = document["parallel"]
    ranks = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("data", 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "manta.workers.run", str(config), "--metrics", str(metrics)]
    command += ["--checkpoints", str(folder / "checkpoints"), "--stop-after-step", str(last)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPLAY_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ReplayFailed(f"`{' '.join(command[1:])}` took more than {REPLAY_SECONDS:g} s") from error
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ReplayFailed(f"`{' '.join(command[1:])}` failed: {reason}")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {row["step"]: [row[name] for name in COMPARED] for row in rows}
