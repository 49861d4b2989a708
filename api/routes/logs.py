"""What a job's ranks printed: a page, or a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
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
from service.logs import JobLogs, LogCursors, LogLine, LogsUnavailable, Position, read_page
from service.states import is_final
from service.store import Store, jobs
from service.store.tables import Job

router = APIRouter(prefix="/v1/jobs/{job_id}/logs", tags=["logs"])

_STREAM_PAGE = 500
_LATE_SECONDS = 60.0
# What comes later than that after the end of a job, no stream waits for.


@router.get(
    "",
    response_model=schemas.Stream[schemas.LogLine],
    responses={**event_stream(schemas.LogLine), **reads(*OF_A_JOB, "invalid_parameter", "logs_unavailable")},
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
    if streaming:
        tail = _Tail(control.store, control.logs, job_id, rank, cursors)
        return stream(request, lambda place: tail.look(cast(Position, place)), position, Watched(job_id, logs=True))
    page = await threads.run(lambda: read_page(control.logs.source(job_id), position, rank, limit))
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
    logs: JobLogs
    job_id: str
    rank: int | None
    cursors: LogCursors

    def look(self, position: Position) -> Batch:
        with self.store.read() as session:  # before the logs: what a final job printed is in them by then
            job = jobs.get(session, self.job_id)
        try:
            source = self.logs.source(self.job_id, fresh=False)
            whole = is_final(job.state) and self._is_whole(
                job
            )  # so that the source, which was there before, has it all
            page = read_page(source, position, self.rank, _STREAM_PAGE)
        except LogsUnavailable:  # it goes on once they can be read
            return Batch([], position, False, False, job.state)
        return Batch(self._entries(position, page.lines), page.position, page.more, whole, job.state)

    def _is_whole(self, job: Job) -> bool:
        over_for_long = time.time() - (job.finished_at or 0.0) > _LATE_SECONDS
        return job.generation == 0 or over_for_long or self.logs.is_whole(self.job_id)

    def _entries(self, position: Position, lines: list[LogLine]) -> list[Entry]:
        """The lines, each with the position after it, so that a stream can go on behind any line."""
        place, entries = dict(position), []
        for line in lines:
            place[line.rank] = line.end
            entries.append(Entry(self.cursors.encode(place), views.log_view(line).model_dump_json()))
        return entries
