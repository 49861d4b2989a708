"""The part of a job's rows from which its spans are computed. Pure Python."""

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
    """Source of its state: start, snapshot, memory or checkpoint."""
    resume_step: int = 0
    """Committed step of the state."""
    trained_from: float | None = None
    """When its training loop began; None before its first committed step."""
    first_step_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class PastRecovery:
    """A recovery, which began a generation after a failure."""

    generation: int
    """The generation that it began."""
    kind: str
    """Kind of the failure, such as killed or hung."""
    cause: str
    """What happened, in one sentence."""
    rank: int
    """Rank that failed."""
    timeline: RecoveryTimeline
    node: str | None = None
    """Node where that rank ran."""
    replaced: Sequence[int] = ()
    """Ranks that got a new process."""
    kept: int = 0
    """Number of ranks that kept theirs."""
    source: str = "start"
    """Source of the state, such as snapshot or replica."""
    resume_step: int = 0
    """Committed step of the state."""
    steps_redone: int | None = None
    """Committed steps that were repeated; None if it did not get to a step."""
    wait_seconds: float = 0.0
    """How long it was delayed."""


@dataclass(frozen=True)
class JobHistory:
    """One job; all lists are sorted, oldest first."""

    id: str
    name: str
    project: str
    states: Sequence[StateEntry]
    generations: Sequence[PastGeneration]
    recoveries: Sequence[PastRecovery] = ()
    layout: ParallelConfig | None = None
    """Layout of the newest generation; None if not known."""
