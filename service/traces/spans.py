"""The history of a job and its spans: of a start, from the queue, which the job entered by its submission or when it
lost its places, to the next committed step; and of a recovery, from the failure to the next committed step, with the
phases of `docs/ledger.md`. Asks no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from manta.service.recovery.timeline import intervals
from manta.service.states import JobState
from manta.service.store.recoveries import timeline
from manta.service.store.tables import Generation, Job, Recovery, StateChange
from manta.workers.config import ParallelConfig

Value = str | int | float | Sequence[int]
"""Value of an attribute."""
START = "job.start"
START_PHASES = ("queued", "placing", "launching", "first_step")
"""In order: until the job leaves the queue for good; until its generation begins, with agents in all places; until the
rank that reports metrics begins to train, with its state; until the step is committed."""
RECOVERY = "job.recovery"


@dataclass(frozen=True)
class JobHistory:
    """One job and its rows of the database; all lists are sorted, oldest first."""

    job: Job
    states: Sequence[StateChange]
    generations: Sequence[Generation]
    recoveries: Sequence[Recovery] = ()
    layout: ParallelConfig | None = None
    """Layout of the newest generation; None if not known."""


@dataclass(frozen=True)
class Span:
    """Something that took time and is over. The same thing always has the same ids, whichever control plane sends
    it."""

    name: str
    trace_id: int
    """128 bits; the same for the whole job."""
    span_id: int
    """64 bits."""
    began_at: float
    """Unix seconds."""
    ended_at: float
    """Unix seconds, not before `began_at`."""
    attributes: Mapping[str, Value]
    parent_id: int | None = None
    """`span_id` of the span that contains it."""
    problem: str | None = None
    """Why it did not complete; None: it did."""


def trace_id(job_id: str) -> int:
    """The id of the trace that contains everything that happens to a job."""
    return _number(job_id, 16)


def span_id(job_id: str, generation: int, name: str) -> int:
    """The id of the span with this name in a generation of a job."""
    return _number(f"{job_id}/{generation}/{name}", 8)


def _number(of: str, size: int) -> int:
    """`size` bytes that are not all zero, since zero means no id."""
    return int.from_bytes(sha256(of.encode()).digest()[:size]) or 1


def spans_of(history: JobHistory, generation: int) -> list[Span]:
    """All spans that completed when `generation` committed its first step; none before that. The past does not change
    later, and neither do its spans."""
    committed = next((each for each in history.generations if each.generation == generation), None)
    if committed is None or committed.first_step_at is None:
        return []
    return [*start_spans(history, committed), *recovery_spans(history, committed)]


def start_spans(history: JobHistory, committed: Generation) -> list[Span]:
    """The spans of the start that completed with the first step of the generation `committed`; none if its job did not
    leave the queue since the previous step."""
    visit = _last_queue_visit(history, committed.started_at)
    if visit is None or committed.first_step_at is None:
        return []
    queued_at, left_at = visit
    since = [generation for generation in history.generations if generation.started_at >= queued_at]
    if next(each for each in since if each.first_step_at is not None) != committed:
        return []
    placed = next(each for each in since if each.started_at >= left_at)
    ends = (left_at, placed.started_at, committed.trained_from, committed.first_step_at)
    phases = dict(zip(START_PHASES, intervals(queued_at, ends), strict=True))
    attributes: dict[str, Value] = {
        "manta.cause": committed.cause,
        "manta.resume_source": committed.resume_source,
        "manta.resume_step": committed.resume_step,
        **_layout(history, committed),
    }
    return _with_phases(history, committed.generation, START, committed.first_step_at, phases, attributes)


def _last_queue_visit(history: JobHistory, until: float) -> tuple[float, float] | None:
    """When the job last entered the queue before `until`, and left it, in Unix seconds. A job that goes back because it
    could not be placed has waited all the time."""
    queued_at = left_at = None
    before = None
    for entry in history.states:
        if entry.time > until:
            break
        if entry.state == JobState.QUEUED and (queued_at is None or before != JobState.STARTING):
            queued_at, left_at = entry.time, None
        elif entry.state == JobState.STARTING:
            left_at = entry.time
        before = entry.state
    return None if queued_at is None or left_at is None else (queued_at, left_at)


def _layout(history: JobHistory, committed: Generation) -> dict[str, Value]:
    layout = history.layout
    if layout is None or committed.generation != history.generations[-1].generation:
        return {}
    return {
        "manta.layout.tensor": layout.tensor,
        "manta.layout.pipeline": layout.pipeline,
        "manta.layout.data": layout.data,
        "manta.layout.context": layout.context,
        "manta.layout.expert": layout.expert_size,
        "manta.ranks": layout.world_size,
    }


def recovery_spans(history: JobHistory, committed: Generation) -> list[Span]:
    """The spans of the recovery that completed with the first step of the generation `committed`, and of those directly
    before it that did not, because something else failed."""
    stepped = [generation.generation for generation in history.generations if generation.first_step_at is not None]
    last = max((number for number in stepped if number < committed.generation), default=0)
    return [
        span
        for recovery in history.recoveries
        if last < recovery.generation < committed.generation
        or (recovery.generation == committed.generation and recovery.first_step_at is not None)
        for span in _spans_of_one(history, recovery)
    ]


def _spans_of_one(history: JobHistory, recovery: Recovery) -> list[Span]:
    until, problem = recovery.first_step_at, None
    if until is None:
        until, problem = _broken_off(history, recovery.generation)
    known = {"manta.recovery.node": recovery.node, "manta.recovery.steps_redone": recovery.steps_redone}
    attributes: dict[str, Value] = {
        "manta.recovery.kind": recovery.kind,
        "manta.recovery.cause": recovery.cause,
        "manta.recovery.rank": recovery.rank,
        "manta.recovery.ranks_replaced": tuple(recovery.forked),
        "manta.recovery.ranks_kept": recovery.kept,
        "manta.recovery.wait_seconds": recovery.wait_seconds,
        "manta.resume_source": recovery.source,
        "manta.resume_step": recovery.resume_step,
        **{name: value for name, value in known.items() if value is not None},
    }
    return _with_phases(
        history, recovery.generation, RECOVERY, until, timeline(recovery).intervals(), attributes, problem
    )


def _broken_off(history: JobHistory, generation: int) -> tuple[float, str]:
    """When and why a generation ended that committed no step and was followed by another one."""
    after = next(each for each in history.generations if each.generation > generation)
    ends = (
        each.ended_at for each in history.generations if each.generation == generation and each.ended_at is not None
    )
    why = f"no step was committed before generation {after.generation} began: {after.cause}"
    return next(ends, after.started_at), why


def _with_phases(
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
    trace, number = trace_id(history.job.id), span_id(history.job.id, generation, name)
    job: dict[str, Value] = {
        "manta.job.id": history.job.id,
        "manta.job.name": history.job.name,
        "manta.job.project": history.job.project,
        "manta.generation": generation,
    }
    began_at, ended_at = next(iter(phases.values()))[0], max(until, *(end for _, end in phases.values()))
    whole = Span(name, trace, number, began_at, ended_at, {**job, **attributes}, problem=problem)
    parts = [
        Span(f"{name}.{phase}", trace, span_id(history.job.id, generation, f"{name}.{phase}"), begin, end, job, number)
        for phase, (begin, end) in phases.items()
        if end > begin
    ]
    return [whole, *parts]
