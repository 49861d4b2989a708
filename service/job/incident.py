"""A failure, from the moment it is noticed to the generation that recovers from it, and the failures before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manta.service.recovery.decisions import Death, PastFailure, past_failures
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store.recoveries import RecoveryStart
from manta.service.store.tables import Generation


@dataclass(frozen=True)
class Incident:
    """What the supervisor knows from the death of a rank to the launch of the next generation."""

    culprit: Death
    """The death that caused everything else."""
    failure: PastFailure
    """The culprit's death as a past failure, for later decisions."""
    timeline: RecoveryTimeline
    """When its phases ended, so far."""
    wait_seconds: float = 0.0
    """Seconds that the next generation was held back."""

    def beginning(self, source: str, resume_step: int) -> RecoveryStart:
        """The record of the recovery, which resumes at committed step `resume_step` from `source`."""
        return RecoveryStart(
            kind=self.culprit.kind,
            rank=self.culprit.rank,
            cause=self.culprit.sentence,
            timeline=self.timeline,
            node=self.failure.node,
            source=source,
            resume_step=resume_step,
            wait_seconds=self.wait_seconds,
        )


class FailureHistory:
    """The failures that one job has survived."""

    def __init__(self, retried_at: float):
        self.retried_at = retried_at
        """When the user last had it retried, in Unix seconds: earlier failures do not count."""
        self.failed_launches: list[PastFailure] = []
        """Failed launches since the last successful one: such failures have no rows."""

    def failures(self, lives: Sequence[Generation], incident: Incident | None = None) -> list[PastFailure]:
        """All that count, oldest first. `lives`: the job's generations; `incident`: caused the launch that is to be
        retried, and has no row yet."""
        known = past_failures([life for life in lives if life.started_at > self.retried_at])
        if incident is not None and incident.failure not in (*known, *self.failed_launches):
            known.append(incident.failure)
        return [*known, *self.failed_launches]
