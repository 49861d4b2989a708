"""The failure that the demo injects: one rank's process is killed in the middle of the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from api.client import MantaClient
from api.schemas import Job, Rank, Recovery
from workers.errors import MantaError


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

    def __init__(self, client: MantaClient, job_id: str, at_step: int, console: Console):
        self._client, self._job_id, self._at_step, self._console = client, job_id, at_step, console
        self.killed: Killed | None = None
        """None until it is done."""

    def look(self, job: Job) -> None:
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
