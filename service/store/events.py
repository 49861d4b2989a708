"""All queries about events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, func, insert, select
from sqlalchemy.orm import Session

from manta.service.store.locks import EVENTS_LOCK
from manta.service.store.paging import MAX_INTEGER, Cursors, Page
from manta.service.store.tables import Event, Job

_INSERT = insert(Event)
_LOCK = select(func.pg_advisory_xact_lock(EVENTS_LOCK))
_SCANNED_EVENTS = 2_000
"""For up to this many events, the project of each is looked up one by one."""
_IN_ORDER = "manta_events_in_order"
"""Key in a session's info for the transaction in which it holds the lock."""


def append(
    session: Session,
    job_id: str,
    type: str,
    message: str,
    *,
    generation: int | None = None,
    rank: int | None = None,
    step: int | None = None,
    data: dict[str, Any] | None = None,
    at: float | None = None,
) -> int:
    """Add an event of `type`, with one sentence for people; returns its id. `at`: when it happened, in Unix seconds;
    default: now."""
    in_order(session)
    session.flush()  # the job itself, if it is new
    values = {
        "job_id": job_id,
        "time": time.time() if at is None else at,
        "type": type,
        "generation": generation,
        "rank": rank,
        "step": step,
        "message": message,
        "data": data or {},
    }
    inserted = session.connection().execute(_INSERT, values)  # no ORM object, for a row that is not read again
    assert inserted.inserted_primary_key is not None
    return int(inserted.inserted_primary_key[0])


def in_order(session: Session) -> None:
    """Until this transaction ends, no other one appends an event: a reader that has read up to an id never finds a
    lower one later. This also holds for submissions, which begin with it. SQLite has one writer anyway."""
    transaction = session.get_transaction()
    if transaction is not None and session.info.get(_IN_ORDER) is transaction:
        return
    if session.get_bind().dialect.name == "postgresql":
        session.execute(_LOCK)
    session.info[_IN_ORDER] = session.get_transaction()


def data_of(session: Session, job_id: str, type: str) -> list[dict[str, Any]]:
    """The data of all of a job's events of `type`, oldest first."""
    query = select(Event.data).where(Event.job_id == job_id, Event.type == type).order_by(Event.id)
    return list(session.scalars(query))


def newest(session: Session) -> int:
    """The id of the newest event of all jobs; 0 if there is none."""
    return session.scalar(select(func.max(Event.id))) or 0


def newest_of_jobs(session: Session, after_id: int) -> dict[str, int]:
    """The id of the newest event of each job that has one above `after_id`."""
    # With GROUP BY, SQLite would read all events, in the order of the jobs' index.
    query = select(Event.job_id, Event.id).where(Event.id > after_id).order_by(Event.id)
    by_job: dict[str, int] = {row[0]: row[1] for row in session.execute(query)}
    return by_job


def has_event_since(session: Session, job_id: str, type: str, message: str, since: str) -> bool:
    """Whether the job has an event of `type` with this `message`, newer than its newest event of type `since`."""
    last = select(func.max(Event.id)).where(Event.job_id == job_id, Event.type == since)
    newer = Event.id > func.coalesce(last.scalar_subquery(), 0)
    query = select(Event.id).where(Event.job_id == job_id, Event.type == type, Event.message == message, newer)
    return session.scalars(query.limit(1)).first() is not None


@dataclass(frozen=True)
class EventFilter:
    """Conditions for the events of a job; an empty or None one filters nothing."""

    types: tuple[str, ...] = ()
    """Of one of these types."""
    generation: int | None = None
    rank: int | None = None

    def applied(self, query: Select[Event]) -> Select[Event]:
        """`query` for those events."""
        query = query.where(Event.type.in_(self.types)) if self.types else query
        query = query if self.generation is None else query.where(Event.generation == self.generation)
        return query if self.rank is None else query.where(Event.rank == self.rank)


EVERY_EVENT = EventFilter()


def cursors(job_id: str, wanted: EventFilter = EVERY_EVENT, newest_first: bool = False) -> Cursors:
    """Of a job's events; they contain the id of an event."""
    types = ",".join(wanted.types) or None
    given = {"types": types, "generation": wanted.generation, "rank": wanted.rank}
    return Cursors("events", job=job_id, order="desc" if newest_first else None, **given)


def page(
    session: Session, job_id: str, after_id: int = 0, limit: int = 100, wanted: EventFilter = EVERY_EVENT
) -> Page[Event]:
    """A job's events with an id above `after_id`, oldest first."""
    query = select(Event).where(Event.job_id == job_id, Event.id > after_id).order_by(Event.id).limit(limit + 1)
    rows = list(session.scalars(wanted.applied(query)))
    return Page.of(rows, limit, cursors(job_id, wanted), lambda event: str(event.id))


def page_back(
    session: Session, job_id: str, before_id: int | None = None, limit: int = 100, wanted: EventFilter = EVERY_EVENT
) -> Page[Event]:
    """A job's events with an id below `before_id`, or all, newest first."""
    query = select(Event).where(Event.job_id == job_id).order_by(Event.id.desc()).limit(limit + 1)
    query = query if before_id is None else query.where(Event.id < before_id)
    rows = list(session.scalars(wanted.applied(query)))
    return Page.of(rows, limit, cursors(job_id, wanted, newest_first=True), lambda event: str(event.id))


def cursors_of_all(job_id: str | None, type: str | None) -> Cursors:
    """Of the events of all jobs; they contain the id of an event."""
    return Cursors("all events", job=job_id, type=type)


def page_of_all(
    session: Session,
    job_id: str | None = None,
    type: str | None = None,
    after_id: int = 0,
    limit: int = 100,
    bound: str | None = None,
) -> Page[Event]:
    """Events of all jobs with an id above `after_id`, oldest first, optionally only those of one job, of `type`, or of
    the jobs of the project `bound`."""
    query = select(Event).where(Event.id > after_id).order_by(Event.id).limit(limit + 1)
    if job_id is not None:
        query = query.where(Event.job_id == job_id)
    if type is not None:
        query = query.where(Event.type == type)
    if bound is not None and job_id is not None:
        query = query.where(_is_of(bound))
    elif bound is not None:
        return _page_of_project(session, query, type, after_id, limit, bound)
    return Page.of(list(session.scalars(query)), limit, cursors_of_all(job_id, type), lambda event: str(event.id))


def _page_of_project(
    session: Session, query: Select[Event], type: str | None, after_id: int, limit: int, project: str
) -> Page[Event]:
    """The events of `query` whose job is of `project`. First each event's job is looked up: to query the events of all
    jobs of a project, SQLite takes time in proportion to the number of jobs, even if there is hardly anything new."""
    end = min(after_id + _SCANNED_EVENTS, MAX_INTEGER)
    rows = list(session.scalars(query.where(Event.id <= end, _is_of(project))))
    if len(rows) <= limit and newest(session) > end:
        of_project = select(Job.id).where(Job.project == project)
        rows = list(session.scalars(query.where(Event.job_id.in_(of_project))))
    return Page.of(rows, limit, cursors_of_all(None, type), lambda event: str(event.id))


def _is_of(project: str) -> ColumnElement[bool]:
    """Whether the job of an event, which is looked up for each event, is of `project`."""
    return select(Job.project).where(Job.id == Event.job_id).scalar_subquery() == project
