"""A job's events: a page, or a stream."""

from __future__ import annotations

from functools import partial
from typing import cast

from fastapi import APIRouter, Request, Response

from api import schemas, views
from api.access import JobId
from api.changes import Watched
from api.openapi import event_stream
from api.parameters import Control, Cursor, Follow, LastEventId, Limit, event_number
from api.problem_codes import OF_A_JOB, reads
from api.sse_server import Batch, Entry, stream, wants_stream
from api.threads import Threads
from service.states import is_final
from service.store import Store, events, jobs

router = APIRouter(prefix="/v1/jobs/{job_id}/events", tags=["events"])

_STREAM_PAGE = 200


@router.get(
    "",
    response_model=schemas.Stream[schemas.Event],
    responses={**event_stream(schemas.Event), **reads(*OF_A_JOB, "invalid_parameter")},
)
async def list_job_events(
    request: Request,
    control: Control,
    threads: Threads,
    job_id: JobId,
    limit: Limit = 100,
    cursor: Cursor = None,
    follow: Follow = False,
    last_event_id: LastEventId = None,
) -> schemas.Stream[schemas.Event] | Response:
    """A job's events, oldest first; as a stream when `Accept` or `follow` asks for it."""
    after = 0 if cursor is None else events.cursors(job_id).decode_number(cursor)
    store = control.store
    if not wants_stream(request, follow):
        return await threads.run(partial(_page, store, job_id, after, limit))
    start = after if last_event_id is None else event_number(last_event_id)
    await threads.run(partial(_refuse_unknown, store, job_id))
    return stream(request, lambda position: _look(store, job_id, cast(int, position)), start, Watched(job_id))


def _refuse_unknown(store: Store, job_id: str) -> None:
    with store.read() as session:
        jobs.get(session, job_id)


def _page(store: Store, job_id: str, after: int, limit: int) -> schemas.Stream[schemas.Event]:
    with store.read() as session:
        jobs.get(session, job_id)
        page = events.page(session, job_id, after, limit)
    last = page.items[-1].id if page.items else after
    return schemas.Stream(
        items=[views.event_view(event) for event in page.items],
        next_cursor=page.next_cursor,
        resume_cursor=events.cursors(job_id).encode(str(last)),
    )


def _look(store: Store, job_id: str, after: int) -> Batch:
    with store.read() as session:  # one state of the database: no event can hide between page and job
        job = jobs.get(session, job_id)
        page = events.page(session, job_id, after, _STREAM_PAGE)
    entries = [Entry(str(event.id), views.event_view(event).model_dump_json()) for event in page.items]
    position = page.items[-1].id if page.items else after
    return Batch(entries, position, page.next_cursor is not None, is_final(job.state), job.state)
