"""When the phases of one recovery began and ended, some of whose ends may not have been recorded. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PHASES = ("detect", "rest", "re_form", "restore", "redo")
"""In order: until the failure is noticed; until every rank rests or is gone; until all have their groups again; until
all have their state; until the next step, usually the interrupted one, is committed."""


@dataclass
class RecoveryTimeline:
    """Unix seconds; None for what has not happened or is not known. Filled in by the code that carries out a
    recovery."""

    noticed_at: float
    """The control plane learned of the failure."""
    failed_at: float | None = None
    """The failure happened, as well as known: the culprit's exit as its agent saw it, or a hung rank's last
    progress."""
    rested_at: float | None = None
    """The last rank came to rest or was gone."""
    launched_at: float | None = None
    """Every rank had its order for the next generation."""
    connected_at: float | None = None
    """The last rank had its groups."""
    restored_at: float | None = None
    """The last rank had its state."""
    first_step_at: float | None = None
    """The next step was committed."""

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Begin and end of each phase that has ended, as returned by `manta.service.recovery.timeline.intervals`."""
        ends = (self.noticed_at, self.rested_at, self.connected_at, self.restored_at, self.first_step_at)
        return dict(zip(PHASES, intervals(self.began_at, ends), strict=False))

    def phases(self) -> dict[str, float | None]:
        """Seconds of each phase; None from the first one that has not ended. For a finished recovery they sum to the
        time from `began_at` to `first_step_at`."""
        lengths = {phase: end - begin for phase, (begin, end) in self.intervals().items()}
        return {phase: lengths.get(phase) for phase in PHASES}

    @property
    def began_at(self) -> float:
        """When the failure happened; if that is not known or is later than when it was noticed, when it was noticed."""
        return self.noticed_at if self.failed_at is None else min(self.failed_at, self.noticed_at)

    @property
    def total_seconds(self) -> float | None:
        """From the failure to the next committed step; None before that."""
        return None if self.first_step_at is None else max(0.0, self.first_step_at - self.began_at)

    def to_json(self) -> dict[str, float | None]:
        """The times by name."""
        return dict(vars(self))


def intervals(began_at: float, ends: Sequence[float | None]) -> list[tuple[float, float]]:
    """Begin and end of each phase, in Unix seconds, up to the first that has not ended. `ends`: when each ended; None
    for what has not happened or is not known: a phase whose own end is not known is counted with the one that follows.
    The clocks of several machines may disagree: no phase is negative, and each begins where the previous one ended."""
    spans: list[tuple[float, float]] = []
    last = began_at
    for place, end in enumerate(ends):
        later = [known for known in ends[place:] if known is not None]
        if not later:
            break
        until = last if end is None else max(last, min(end, *later))
        spans.append((last, until))
        last = until
    return spans
