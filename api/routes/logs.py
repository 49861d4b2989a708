"""What a job's ranks printed: a page, or a stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from fastapi import APIRouter, Request, Response

from api import schemas, views
from api.access import JobId
from api.changes import Watched
from api.openapi import event_stream
from api.parameters import Control, Cursor, Follow, LastEventId, Limit, RankNumber
from api.problem_codes import OF_A_JOB, reads
from api.sse_server import Batch, Entry, stream, wants_stream
from api.threads import Threads
from service.logs import LogCursors, LogLine, Position, log_folder, read_page
from service.states import is_final
from service.store import Store, jobs

router = APIRouter(prefix="/v1/jobs/{job_id}/logs", tags=["logs"])

_STREAM_PAGE = 500


@router.get(
    "",
    response_model=schemas.Stream[schemas.LogLine],
    responses={**event_stream(schemas.LogLine), **reads(*OF_A_JOB, "invalid_parameter")},
)
async def list_logs(
    request: Request,
    control: Control,
    threads: Threads,
    job_id: JobId,
    rank: RankNumber = None,
    limit: Limit = 500,
    cursor: Cursor = None,
    follow: Follow = False,
    last_event_id: LastEventId = None,
) -> schemas.Stream[schemas.LogLine] | Response:
    """Lines of one rank, or of all ranks merged by time; as a stream when `Accept` or `follow` asks for it."""
    streaming = wants_stream(request, follow)
    start = last_event_id if streaming and last_event_id is not None else cursor
    cursors = LogCursors(job_id, rank)
    position = {} if start is None else cursors.decode(start)
    await threads.run(partial(_refuse_unknown, control.store, job_id))
    folder = log_folder(control.home, job_id)
    if streaming:
        tail = _Tail(control.store, folder, job_id, rank, cursors)
        return stream(request, lambda place: tail.look(cast(Position, place)), position, Watched(job_id, folder))
    page = await threads.run(partial(read_page, folder, position, rank, limit))
    after = cursors.encode(page.position)
    return schemas.Stream(
        items=[views.log_view(line) for line in page.lines],
        next_cursor=after if page.more else None,
        resume_cursor=after,
    )


def _refuse_unknown(store: Store, job_id: str) -> None:
    with store.read() as session:
        jobs.get(session, job_id)


@dataclass(frozen=True)
class _Tail:
    """What is read again and again for one stream."""

    store: Store
    folder: Path
    job_id: str
    rank: int | None
    cursors: LogCursors

    def look(self, position: Position) -> Batch:
        with self.store.read() as session:  # before the files: what a final job printed is in them by then
            state = jobs.get(session, self.job_id).state
        page = read_page(self.folder, position, self.rank, _STREAM_PAGE)
        return Batch(self._entries(position, page.lines), page.position, page.more, is_final(state), state)

    def _entries(self, position: Position, lines: list[LogLine]) -> list[Entry]:
        """The lines, each with the position after it, so that a stream can go on behind any line."""
        place, entries = dict(position), []
        for line in lines:
            place[line.rank] = line.end
            entries.append(Entry(self.cursors.encode(place), views.log_view(line).model_dump_json()))
        return entries
