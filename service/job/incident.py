"""A failure, from the moment it is noticed to the generation that recovers from it."""

from __future__ import annotations

from dataclasses import dataclass

from manta.service.recovery.budgets import PastFailure
from manta.service.recovery.decisions import Death
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store.recoveries import RecoveryStart


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
