"""The span of a recovery, from the failure to the next committed step; its phases are those of `docs/ledger.md`. Pure
Python."""

from __future__ import annotations

from service.traces.history import JobHistory, PastGeneration, PastRecovery
from service.traces.parts import with_phases
from service.traces.span import Span, Value

NAME = "job.recovery"


def recovery_spans(history: JobHistory, committed: PastGeneration) -> list[Span]:
    """The spans of the recovery that completed with the first step of the generation `committed`, and of those directly
    before it that did not, because something else failed."""
    stepped = [each.number for each in history.generations if each.first_step_at is not None]
    last = max((number for number in stepped if number < committed.number), default=0)
    return [
        span
        for recovery in history.recoveries
        if last < recovery.generation < committed.number
        or (recovery.generation == committed.number and recovery.timeline.first_step_at is not None)
        for span in _spans(history, recovery)
    ]


def _spans(history: JobHistory, recovery: PastRecovery) -> list[Span]:
    timeline = recovery.timeline
    until, problem = timeline.first_step_at, None
    if until is None:
        until, problem = _broken_off(history, recovery.generation)
    known = {"manta.recovery.node": recovery.node, "manta.recovery.steps_redone": recovery.steps_redone}
    attributes: dict[str, Value] = {
        "manta.recovery.kind": recovery.kind,
        "manta.recovery.cause": recovery.cause,
        "manta.recovery.rank": recovery.rank,
        "manta.recovery.ranks_replaced": tuple(recovery.replaced),
        "manta.recovery.ranks_kept": recovery.kept,
        "manta.recovery.wait_seconds": recovery.wait_seconds,
        "manta.resume_source": recovery.source,
        "manta.resume_step": recovery.resume_step,
        **{name: value for name, value in known.items() if value is not None},
    }
    return with_phases(history, recovery.generation, NAME, until, timeline.intervals(), attributes, problem)


def _broken_off(history: JobHistory, generation: int) -> tuple[float, str]:
    """When and why a generation ended that committed no step and was followed by another one."""
    after = next(each for each in history.generations if each.number > generation)
    ends = (each.ended_at for each in history.generations if each.number == generation and each.ended_at is not None)
    why = f"no step was committed before generation {after.number} began: {after.cause}"
    return next(ends, after.began_at), why
