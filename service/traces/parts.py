"""A span and the phases in it. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping

from service.traces.history import JobHistory
from service.traces.span import Span, Value, span_id, trace_id


def with_phases(
    history: JobHistory,
    generation: int,
    name: str,
    until: float,
    phases: Mapping[str, tuple[float, float]],
    attributes: Mapping[str, Value],
    problem: str | None = None,
) -> list[Span]:
    """The span `name` of a generation, from the begin of its first phase to at least `until` Unix seconds, and below it
    one for each of `phases`, which are given as begin and end by name. A phase that took no time, or whose own end is
    not known, has none. `problem`: why it did not complete."""
    trace, number = trace_id(history.id), span_id(history.id, generation, name)
    job: dict[str, Value] = {
        "manta.job.id": history.id,
        "manta.job.name": history.name,
        "manta.job.project": history.project,
        "manta.generation": generation,
    }
    began_at, ended_at = next(iter(phases.values()))[0], max(until, *(end for _, end in phases.values()))
    whole = Span(name, trace, number, began_at, ended_at, {**job, **attributes}, problem=problem)
    parts = [
        Span(f"{name}.{phase}", trace, span_id(history.id, generation, f"{name}.{phase}"), begin, end, job, number)
        for phase, (begin, end) in phases.items()
        if end > begin
    ]
    return [whole, *parts]
