"""Events of all jobs, as a page or a stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, cast

from fastapi import APIRouter, Query, Request, Response

from manta.api import schemas, views
from manta.api.openapi import event_stream
from manta.api.parameters import Control, Cursor, LastEventId, Limit, event_number
from manta.api.problems import DATABASE_UNAVAILABLE, reads
from manta.api.security.access import Caller
from manta.api.streams.changes import Watched
from manta.api.streams.sse_server import Batch, Entry, stream, wants_stream
from manta.api.threads import Threads
from manta.service.errors import InvalidParameter
from manta.service.ids import JOB_ID_PATTERN
from manta.service.store import Event, Store, events
from manta.service.store.paging import Page

router = APIRouter(prefix="/v1/events", tags=["events"])

_STREAM_PAGE = 200


@dataclass(frozen=True)
class _Tail:
    """Repeated reads of one stream."""

    store: Store
    job: str | None
    type: str | None
    bound: str | None

    def poll(self, after: int) -> Batch:
        with self.store.read() as session:
            page = events.page_of_all(session, self.job, self.type, after, _STREAM_PAGE, self.bound)
            newest = events.newest(session)  # do not read events again that were filtered out
        entries = [Entry(str(event.id), views.job_event_view(event).model_dump_json()) for event in page.items]
        position = max(after, newest) if page.next_cursor is None else page.items[-1].id
        return Batch(entries, position, page.next_cursor is not None, final=False, state="")


def _page(store: Store, job: str | None, type: str | None, after: int, limit: int, bound: str | None) -> Page[Event]:
    return store.query(events.page_of_all, job, type, after, limit, bound)


@router.get(
    "",
    response_model=schemas.Stream[schemas.JobEvent],
    responses={
        **event_stream(schemas.JobEvent, ends=False),
        **reads(InvalidParameter, DATABASE_UNAVAILABLE),
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
        tail = _Tail(control.store, job, type, caller.bound)
        start = after if last_event_id is None else event_number(last_event_id)
        return stream(request, lambda position: tail.poll(cast(int, position)), start, Watched(job))
    page = await threads.run(partial(_page, control.store, job, type, after, limit, caller.bound))
    last = page.items[-1].id if page.items else after
    return schemas.Stream(
        items=[views.job_event_view(event) for event in page.items],
        next_cursor=page.next_cursor,
        resume_cursor=cursors.encode(str(last)),
    )
