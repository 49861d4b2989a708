"""The spans of a job's history. Pure Python."""

from __future__ import annotations

from service.traces.history import JobHistory
from service.traces.recovery import recovery_spans
from service.traces.span import Span
from service.traces.start import start_spans


def spans_of(history: JobHistory, generation: int) -> list[Span]:
    """All spans that completed when `generation` committed its first step; none before that. The past does not change
    later, and neither do its spans."""
    committed = next((each for each in history.generations if each.number == generation), None)
    if committed is None or committed.first_step_at is None:
        return []
    return [*start_spans(history, committed), *recovery_spans(history, committed)]
