"""The span of a start: from the queue, which the job entered by its submission or when it lost its places, to the next
committed step. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from service.recovery.phases import intervals
from service.states import JobState
from service.traces.history import JobHistory, PastGeneration
from service.traces.parts import with_phases
from service.traces.span import Span, Value

NAME = "job.start"
PHASES = ("queued", "placing", "launching", "first_step")
"""In order: until the job leaves the queue for good; until its generation begins, with agents in all places; until the
rank that reports metrics begins to train, with its state; until the step is committed."""


@dataclass(frozen=True)
class _Turn:
    """Unix seconds."""

    queued_at: float
    left_at: float


def start_spans(history: JobHistory, committed: PastGeneration) -> list[Span]:
    """The spans of the start that completed with the first step of the generation `committed`; none if its job did not
    leave the queue since the previous step."""
    turn = _last_turn(history, committed.began_at)
    if turn is None or committed.first_step_at is None:
        return []
    since = [each for each in history.generations if each.began_at >= turn.queued_at]
    if next(each for each in since if each.first_step_at is not None) != committed:
        return []
    placed = next(each for each in since if each.began_at >= turn.left_at)
    ends = (turn.left_at, placed.began_at, committed.trained_from, committed.first_step_at)
    phases = dict(zip(PHASES, intervals(turn.queued_at, ends), strict=True))
    attributes: dict[str, Value] = {
        "manta.cause": committed.cause,
        "manta.resume_source": committed.resume_source,
        "manta.resume_step": committed.resume_step,
        **_layout(history, committed),
    }
    return with_phases(history, committed.number, NAME, committed.first_step_at, phases, attributes)


def _last_turn(history: JobHistory, until: float) -> _Turn | None:
    """When the job last entered the queue before `until`, and left it. A job that goes back because it could not be
    placed has waited all the time."""
    queued_at = left_at = None
    before = None
    for entry in history.states:
        if entry.at > until:
            break
        if entry.state == JobState.QUEUED and (queued_at is None or before != JobState.STARTING):
            queued_at, left_at = entry.at, None
        elif entry.state == JobState.STARTING:
            left_at = entry.at
        before = entry.state
    return None if queued_at is None or left_at is None else _Turn(queued_at, left_at)


def _layout(history: JobHistory, committed: PastGeneration) -> dict[str, Value]:
    layout = history.layout
    if layout is None or committed.number != history.generations[-1].number:
        return {}
    return {
        "manta.layout.tensor": layout.tensor,
        "manta.layout.pipeline": layout.pipeline,
        "manta.layout.data": layout.data,
        "manta.ranks": layout.world_size,
    }
