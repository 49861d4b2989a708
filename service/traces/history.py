"""The part of a job's rows that its spans are computed from. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.ledger import StateEntry
from service.recovery.timeline import RecoveryTimeline
from workers.config import ParallelConfig


@dataclass(frozen=True)
class PastGeneration:
    """One start of the job's gang. Times are Unix seconds."""

    number: int
    cause: str
    began_at: float
    resume_source: str = "start"
    """Where its state came from: start, snapshot, memory or checkpoint."""
    resume_step: int = 0
    """Committed step that the state belongs to."""
    trained_from: float | None = None
    """When its training loop began; None before its first committed step."""
    first_step_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class PastRecovery:
    """How a generation came about that a failure made necessary."""

    generation: int
    """The one that it began."""
    kind: str
    """Of the failure, such as killed or hung."""
    cause: str
    """What happened, in one sentence."""
    rank: int
    """To which rank."""
    timeline: RecoveryTimeline
    node: str | None = None
    """Where that rank ran."""
    replaced: Sequence[int] = ()
    """Ranks that got a new process."""
    kept: int = 0
    """How many kept theirs."""
    source: str = "start"
    """Where the state came from, such as snapshot or replica."""
    resume_step: int = 0
    """Committed step that it belongs to."""
    steps_redone: int | None = None
    """Committed steps that were done again; None where it did not get to a step."""
    wait_seconds: float = 0.0
    """How long it was held back."""


@dataclass(frozen=True)
class JobHistory:
    """One job; everything oldest first."""

    id: str
    name: str
    project: str
    states: Sequence[StateEntry]
    generations: Sequence[PastGeneration]
    recoveries: Sequence[PastRecovery] = ()
    layout: ParallelConfig | None = None
    """Of the newest generation; None where it is not known."""
