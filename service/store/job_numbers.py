"""Monitoring's numbers of all jobs, in a number of queries that does not grow with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, func, or_, select
from sqlalchemy.orm import Session, aliased

from manta.service.ledger import Ledger
from manta.service.states import SUPERVISED, UNFINISHED, JobState
from manta.service.store import jobs, ledgers, recoveries
from manta.service.store.checkpoints import COMPLETE
from manta.service.store.installation_tables import ControlPlaneRow, Lease
from manta.service.store.leases import living
from manta.service.store.tables import Checkpoint, Event, Generation, Job, Recovery, StateChange

MAX_JOBS = 500
"""Most jobs that have numbers of their own."""
RECENT_SECONDS = 3600.0
RECENT_TYPES = ("straggler", "rank_hung", "gang_hung", "spike", "step_skipped", "rolled_back", "experts_unbalanced")
"""Seconds within which events are counted."""
_MAX_EVENTS = 20_000
"""Number of newest events that are searched: there is no index for them, and on a quiet day they cover months."""

_LISTED = (
    *(Job.id, Job.name, Job.project, Job.state, Job.spec, Job.step, Job.steps, Job.metrics, Job.restarts),
    Job.created_at,
)


@dataclass(frozen=True)
class RecoveryTotals:
    """Of all recoveries of a job."""

    by_kind: Mapping[str, int]
    """Number of recoveries by kind of failure."""
    ended: int
    """Number of recoveries that led to a step."""
    seconds: Mapping[str, float]
    """Seconds of those by phase."""
    steps_redone: int
    """Steps that those repeated."""


@dataclass(frozen=True)
class Saved:
    """When a checkpoint was saved, in Unix seconds."""

    began_at: float
    ended_at: float | None
    """None: unknown."""


@dataclass(frozen=True)
class JobNumbers:
    """One unfinished job. Times are Unix seconds."""

    row: Row[Any]
    """The job's id, name, project, state, spec, step, steps, metrics, restarts and created_at."""
    ledger: Ledger
    state_since: float
    placed_at: float | None
    """When it last left the queue; None: never."""
    last_step_at: float | None
    """When its newest step was committed; None before the first."""
    recovered: RecoveryTotals
    saved: Saved | None
    """The job's newest complete checkpoint."""
    recent_events: Mapping[str, int]
    """Number of events by type, of RECENT_TYPES within RECENT_SECONDS."""


@dataclass(frozen=True)
class FleetNumbers:
    """All jobs together."""

    by_state: Mapping[JobState, int]
    queued_since: float | None
    """Since when the longest-waiting job is in the queue; None if it is empty."""
    recent_failures: Mapping[str, int]
    """Number of jobs by reason that failed within RECENT_SECONDS."""
    without_owner: int
    """Jobs that may hold places but are owned by no living control plane."""
    control_planes: int
    """Number of living control planes."""
    listed: Sequence[JobNumbers]
    """Unfinished jobs, the earliest started first; at most MAX_JOBS."""


def read(session: Session, now: float, bound: str | None = None) -> FleetNumbers:
    """The numbers of all jobs, or of those of the project `bound`, at Unix time `now`."""
    return FleetNumbers(
        by_state=jobs.count_by_state(session, bound),
        queued_since=_queued_since(session, bound),
        recent_failures=_recent_failures(session, now, bound),
        without_owner=_without_owner(session, bound),
        control_planes=len(living(session)),
        listed=_listed(session, now, bound),
    )


def _of(bound: str | None) -> list[ColumnElement[bool]]:
    return [] if bound is None else [Job.project == bound]


def _queued_since(session: Session, bound: str | None) -> float | None:
    queued = select(func.max(StateChange.time).label("since")).join(Job, Job.id == StateChange.job_id)
    since = queued.where(Job.state == JobState.QUEUED, *_of(bound)).group_by(StateChange.job_id).subquery()
    return session.scalar(select(func.min(since.c.since)))


def _recent_failures(session: Session, now: float, bound: str | None) -> dict[str, int]:
    failed = and_(Job.state == JobState.FAILED, Job.finished_at > now - RECENT_SECONDS, *_of(bound))
    rows = session.execute(select(Job.reason, func.count()).where(failed).group_by(Job.reason))
    return {reason or "unknown": count for reason, count in rows}


def _without_owner(session: Session, bound: str | None) -> int:
    owned = select(Lease.name).join(ControlPlaneRow, ControlPlaneRow.id == Lease.owner)
    unowned = select(func.count()).where(Job.state.in_(SUPERVISED), Job.id.not_in(owned), *_of(bound))
    return session.scalar(unowned) or 0


def _listed(session: Session, now: float, bound: str | None) -> list[JobNumbers]:
    begun = or_(Job.state != JobState.QUEUED, Job.started_at.is_not(None))
    query = select(*_LISTED).where(Job.state.in_(UNFINISHED), *_of(bound))
    rows = session.execute(query.order_by(begun.desc(), Job.priority.desc(), Job.id).limit(MAX_JOBS)).all()
    ids = [row.id for row in rows]
    books = ledgers.of_jobs(session, rows, now)
    entered = _latest(session, StateChange.job_id, StateChange.time, ids)
    placed = _latest(session, StateChange.job_id, StateChange.time, ids, StateChange.state == JobState.STARTING)
    stepped = _latest(session, Generation.job_id, Generation.trained_until, ids)
    recovered, saved, events = _recoveries(session, ids), _saved(session, ids), _recent_events(session, ids, now)
    return [
        JobNumbers(
            row=row,
            ledger=books[row.id],
            state_since=entered.get(row.id, row.created_at),
            placed_at=placed.get(row.id),
            last_step_at=stepped.get(row.id),
            recovered=_totals(recovered.get(row.id, [])),
            saved=saved.get(row.id),
            recent_events=events.get(row.id, {}),
        )
        for row in rows
    ]


def _latest(
    session: Session, job_id: Any, time: Any, ids: Collection[str], *where: ColumnElement[bool]
) -> dict[str, float]:
    rows = session.execute(select(job_id, func.max(time)).where(job_id.in_(ids), *where).group_by(job_id))
    return {job: at for job, at in rows if at is not None}


def _recoveries(session: Session, ids: Collection[str]) -> dict[str, list[Recovery]]:
    by_job: dict[str, list[Recovery]] = {}
    for row in session.scalars(select(Recovery).where(Recovery.job_id.in_(ids))):
        by_job.setdefault(row.job_id, []).append(row)
    return by_job


def _totals(rows: Sequence[Recovery]) -> RecoveryTotals:
    ended = [row for row in rows if row.first_step_at is not None]
    seconds: Counter[str] = Counter()
    for row in ended:
        seconds.update({phase: took or 0.0 for phase, took in recoveries.timeline(row).phases().items()})
    redone = sum(row.steps_redone or 0 for row in ended)
    return RecoveryTotals(Counter(row.kind for row in rows), len(ended), seconds, redone)


def _saved(session: Session, ids: Collection[str]) -> dict[str, Saved]:
    """By a lookup at the end of the index for each job, which may have many checkpoints."""
    candidate = aliased(Checkpoint)
    newest = select(candidate.id).where(candidate.job_id == Job.id, candidate.state == COMPLETE)
    newest = newest.order_by(candidate.step.desc(), candidate.generation.desc()).limit(1)
    query = select(Checkpoint.job_id, Checkpoint.created_at, Checkpoint.completed_at).join(
        Job, Checkpoint.id == newest.correlate(Job).scalar_subquery()
    )
    return {job: Saved(began, ended) for job, began, ended in session.execute(query.where(Job.id.in_(ids)))}


def _recent_events(session: Session, ids: Collection[str], now: float) -> dict[str, dict[str, int]]:
    newest = session.scalar(select(func.max(Event.id))) or 0
    recent = and_(Event.id > newest - _MAX_EVENTS, Event.time > now - RECENT_SECONDS, Event.type.in_(RECENT_TYPES))
    # Counted here: with GROUP BY, SQLite would read all events.
    wanted, by_job = set(ids), dict[str, dict[str, int]]()
    for job, kind in session.execute(select(Event.job_id, Event.type).where(recent)):
        if job in wanted:
            counts = by_job.setdefault(job, {})
            counts[kind] = counts.get(kind, 0) + 1
    return by_job
