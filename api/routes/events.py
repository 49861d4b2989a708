"""Events of a job, or of all jobs, as a page or a stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar, cast

from fastapi import APIRouter, Depends, Query, Request, Response

from manta.api import schemas, views
from manta.api.openapi import event_stream
from manta.api.parameters import Control, Cursor, Follow, LastEventId, Limit, RankNumber, event_number
from manta.api.problems import DATABASE_UNAVAILABLE, OF_A_JOB, reads
from manta.api.security.access import Caller, JobId
from manta.api.streams import Batch, Entry, Watched, stream, wants_stream
from manta.api.threads import Threads
from manta.service.control.running_ranks import RankNotFound
from manta.service.ids import JOB_ID_PATTERN
from manta.service.states import is_final
from manta.service.store import Event, Store, events, jobs
from manta.service.store.events import EventFilter
from manta.service.store.paging import Cursors, Page

router = APIRouter(prefix="/v1", tags=["events"])

Shown = TypeVar("Shown", bound=schemas.Event)
_STREAM_PAGE = 200


def _wanted_events(
    type: Annotated[
        str | None, Query(min_length=1, max_length=1000, description="Only events of these types, separated by commas")
    ] = None,
    generation: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Only events of this generation")] = None,
    rank: RankNumber = None,
) -> EventFilter:
    return EventFilter(tuple(sorted(set(type.split(",")))) if type else (), generation, rank)


Wanted = Annotated[EventFilter, Depends(_wanted_events)]


@router.get(
    "/jobs/{job_id}/events",
    response_model=schemas.Stream[schemas.Event],
    responses={**event_stream(schemas.Event), **reads(*OF_A_JOB, RankNotFound)},
)
async def list_job_events(
    request: Request,
    control: Control,
    threads: Threads,
    job_id: JobId,
    wanted: Wanted,
    order: Annotated[
        schemas.Direction, Query(description="desc: newest first; streams are always in order of time")
    ] = "asc",
    limit: Limit = 100,
    cursor: Cursor = None,
    follow: Follow = False,
    last_event_id: LastEventId = None,
) -> schemas.Stream[schemas.Event] | Response:
    """A job's events, oldest first by default; as a stream if requested by `Accept` or `follow`."""
    store, streaming = control.store, wants_stream(request, follow)
    if streaming or wanted.rank is not None:
        await threads.run(partial(_refuse_unknown, store, job_id, wanted.rank))
    if order == "desc" and not streaming:
        before = None if cursor is None else events.cursors(job_id, wanted, newest_first=True).decode_number(cursor)
        return await threads.run(partial(_page_back, store, job_id, before, limit, wanted))
    after = 0 if cursor is None else events.cursors(job_id, wanted).decode_number(cursor)
    if not streaming:
        return await threads.run(partial(_page, store, job_id, after, limit, wanted))
    start = after if last_event_id is None else event_number(last_event_id)
    return stream(request, lambda position: _poll(store, job_id, wanted, cast(int, position)), start, Watched(job_id))


@router.get(
    "/events",
    response_model=schemas.Stream[schemas.JobEvent],
    responses={
        **event_stream(schemas.JobEvent, ends=False),
        **reads(DATABASE_UNAVAILABLE),
    },
)
async def list_events(
    request: Request,
    control: Control,
    threads: Threads,
    caller: Caller,
    job: Annotated[str | None, Query(pattern=f"^{JOB_ID_PATTERN}$", description="Only events of this job")] = None,
    type: Annotated[str | None, Query(min_length=1, max_length=64, description="Only events of this type")] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
    follow: Annotated[bool, Query(description="Stream as text/event-stream until the client disconnects")] = False,
    last_event_id: LastEventId = None,
) -> schemas.Stream[schemas.JobEvent] | Response:
    """Events of all of the caller's jobs, oldest first; as a stream if requested by `Accept` or `follow`. Events of
    deleted jobs are not included."""
    cursors = events.cursors_of_all(job, type)
    after = 0 if cursor is None else cursors.decode_number(cursor)
    if wants_stream(request, follow):
        tail = partial(_poll_all, control.store, job, type, caller.bound)
        start = after if last_event_id is None else event_number(last_event_id)
        return stream(request, lambda position: tail(cast(int, position)), start, Watched(job))
    page = await threads.run(lambda: control.store.query(events.page_of_all, job, type, after, limit, caller.bound))
    return _answer(page, views.job_event_view, cursors, page.items[-1].id if page.items else after)


def _refuse_unknown(store: Store, job_id: str, rank: int | None) -> None:
    """Raise JobNotFound, or RankNotFound for a rank that the job does not have and of which it has no event either: the
    job may have been larger before."""
    with store.read() as session:
        count = views.ranks_of(jobs.get(session, job_id))
        if rank is None or count is None or rank < count:
            return
        if not events.page(session, job_id, limit=1, wanted=EventFilter(rank=rank)).items:
            raise RankNotFound(job_id, rank, count)


def _page(store: Store, job_id: str, after: int, limit: int, wanted: EventFilter) -> schemas.Stream[schemas.Event]:
    with store.read() as session:
        jobs.get(session, job_id)
        page = events.page(session, job_id, after, limit, wanted)
    end = page.items[-1].id if page.items else after
    return _answer(page, views.event_view, events.cursors(job_id, wanted), end)


def _page_back(
    store: Store, job_id: str, before: int | None, limit: int, wanted: EventFilter
) -> schemas.Stream[schemas.Event]:
    """Events newest first; its `resume_cursor` leads, oldest first, to events after all current ones."""
    with store.read() as session:
        jobs.get(session, job_id)
        newest = events.newest(session)
        page = events.page_back(session, job_id, before, limit, wanted)
    return _answer(page, views.event_view, events.cursors(job_id, wanted), newest)


def _answer(page: Page[Event], view: Callable[[Event], Shown], cursors: Cursors, end: int) -> schemas.Stream[Shown]:
    """The page as an answer, whose `resume_cursor` leads to events after the one with id `end`."""
    items = [view(event) for event in page.items]
    return schemas.Stream(items=items, next_cursor=page.next_cursor, resume_cursor=cursors.encode(str(end)))


def _poll(store: Store, job_id: str, wanted: EventFilter, after: int) -> Batch:
    with store.read() as session:  # one state of the database, so that no event between page and job is missed
        job = jobs.get(session, job_id)
        page = events.page(session, job_id, after, _STREAM_PAGE, wanted)
    position = page.items[-1].id if page.items else after
    return Batch(
        _entries(page, views.event_view), position, page.next_cursor is not None, is_final(job.state), job.state
    )


def _poll_all(store: Store, job: str | None, type: str | None, bound: str | None, after: int) -> Batch:
    with store.read() as session:
        page = events.page_of_all(session, job, type, after, _STREAM_PAGE, bound)
        newest = events.newest(session)  # do not read events again that were filtered out
    position = max(after, newest) if page.next_cursor is None else page.items[-1].id
    return Batch(_entries(page, views.job_event_view), position, page.next_cursor is not None, final=False, state="")


def _entries(page: Page[Event], view: Callable[[Event], schemas.Event]) -> list[Entry]:
    return [Entry(str(event.id), view(event).model_dump_json()) for event in page.items]
