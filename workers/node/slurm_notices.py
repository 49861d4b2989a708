"""The end of a Slurm job, which Slurm tells all its processes when the job begins: no signal is needed.

Slurm also sends a signal, before the end if `--signal` requests it, and at the end: it reaches Ray's processes too,
which end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from workers.node.notices import Notice, SourceUnavailable
from workers.settings import read_slurm_job_end

LEAD_SECONDS = 600.0
"""The end is announced when it is this near."""


@dataclass(frozen=True)
class SlurmSource:
    """The Slurm job in which Ray was started."""

    lead_seconds: float = LEAD_SECONDS
    """How long before its end the node is to be drained."""
    name: str = "slurm"

    @classmethod
    def of(cls, text: str) -> SlurmSource:
        """From the seconds, or the default if `text` is empty. Raises ValueError."""
        seconds = float(text) if text else LEAD_SECONDS
        if not 0 <= seconds < float("inf"):
            raise ValueError(text)
        return cls(seconds)

    def notice(self, now: datetime) -> Notice | None:
        """A notice if the job reaches its time limit soon, otherwise None. Raises SourceUnavailable."""
        end = read_slurm_job_end()
        if end is None:
            raise SourceUnavailable("SLURM_JOB_END_TIME is not set: Ray was not started in a Slurm job on this machine")
        left = end - now.astimezone(UTC).timestamp()
        if left > self.lead_seconds:
            return None
        return Notice(f"end {end:.0f}", max(0.0, left), "the Slurm job reaches its time limit")
