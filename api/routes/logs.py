"""Output of a job's ranks: a page, the last lines, or a stream."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Request, Response

from manta.api import schemas, views
from manta.api.openapi import event_stream
from manta.api.parameters import MAX_CURSOR_CHARACTERS, Control, Cursor, Follow, LastEventId, Limit, RankNumber, refused
from manta.api.problems import OF_A_JOB, reads
from manta.api.security.access import JobId
from manta.api.streams import Batch, Entry, Watched, stream, wants_stream
from manta.api.threads import Threads
from manta.service.control.running_ranks import RankNotFound
from manta.service.logs.filters import MAX_REGEX_CHARACTERS, InvalidPattern, Level, LineTest, LogFilter, Stream
from manta.service.logs.pages import (
    JobLogs,
    LogCursors,
    LogLine,
    LogPage,
    LogSource,
    LogsUnavailable,
    Position,
    read_page,
)
from manta.service.logs.tail import LogTail, read_tail
from manta.service.states import is_final
from manta.service.store import Store, jobs
from manta.service.store.tables import Job

router = APIRouter(prefix="/v1/jobs/{job_id}/logs", tags=["logs"])

_STREAM_PAGE = 500
_LATE_SECONDS = 60.0
# How long streams wait for more lines after the end of a job.
_SEARCH_SECONDS = 2.0


def _wanted_lines(
    stream: Annotated[Stream | None, Query(description="Only lines of this stream")] = None,
    search: Annotated[
        str | None, Query(min_length=1, max_length=500, description="Only lines that contain this, ignoring case")
    ] = None,
    regex: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=MAX_REGEX_CHARACTERS,
            description="Only lines with a match of this regular expression, in RE2's syntax",
        ),
    ] = None,
    level: Annotated[Level | None, Query(description="Only lines of at least this level")] = None,
    notices: Annotated[
        bool, Query(description="Whether to include notices that PyTorch and Ray print about themselves")
    ] = True,
) -> LogFilter:
    return LogFilter(stream, search, regex, level, notices)


Wanted = Annotated[LogFilter, Depends(_wanted_lines)]
Tail = Annotated[
    int | None, Query(ge=1, le=10_000, description="Only this number of newest lines; a stream starts with them")
]
Before = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_CURSOR_CHARACTERS,
        description="With `tail`: the lines before the page with this earlier_cursor",
    ),
]


@router.get(
    "",
    response_model=schemas.LogLines,
    responses={
        **event_stream(schemas.LogLine),
        **reads(*OF_A_JOB, RankNotFound, LogsUnavailable),
    },
)
async def list_logs(
    request: Request,
    control: Control,
    threads: Threads,
    job_id: JobId,
    wanted: Wanted,
    rank: RankNumber = None,
    tail: Tail = None,
    before: Before = None,
    limit: Limit = 500,
    cursor: Cursor = None,
    follow: Follow = False,
    last_event_id: LastEventId = None,
) -> schemas.LogLines | Response:
    """Lines of one rank, or of all ranks merged by time, from the beginning or with `tail` from the end; as a stream if
    requested by `Accept` or `follow`."""
    test = _test_of(wanted)
    streaming = wants_stream(request, follow)
    start = last_event_id if streaming and last_event_id is not None else cursor
    cursors = LogCursors(job_id, rank, wanted)
    position = {} if start is None else cursors.decode(start)
    await threads.run(partial(_refuse_unknown, control.store, control.logs, job_id, rank))
    begins_at_end = tail if start is None else None
    if before is not None and (begins_at_end is None or streaming):
        raise refused("before", "requires tail, and neither a stream nor a cursor: it returns earlier lines")
    if streaming:
        live = _Live(control.store, control.logs, job_id, rank, cursors, test, begins_at_end)
        return stream(request, lambda place: live.poll(cast(Position, place)), position, Watched(job_id, logs=True))
    if begins_at_end is not None:
        count, until = begins_at_end, None if before is None else cursors.decode(before)
        last_lines = await threads.run(lambda: read_tail(control.logs.source(job_id), count, rank, test, until))
        return _tail_view(last_lines, cursors)
    page = await threads.run(lambda: _page(control.logs.source(job_id), position, rank, limit, test))
    after = cursors.encode(page.position)
    return schemas.LogLines(
        items=[views.answer(schemas.LogLine, line) for line in page.lines],
        next_cursor=after if page.more else None,
        resume_cursor=after,
    )


def _test_of(wanted: LogFilter) -> LineTest | None:
    """Raises RequestValidationError."""
    try:
        return wanted.test()
    except InvalidPattern as error:
        raise refused("regex", str(error)) from error


def _tail_view(last_lines: LogTail, cursors: LogCursors) -> schemas.LogLines:
    items = [views.answer(schemas.LogLine, line) for line in last_lines.lines]
    earlier = cursors.encode(last_lines.earlier) if last_lines.more else None
    return schemas.LogLines(
        items=items, resume_cursor=cursors.encode(last_lines.end), earlier=last_lines.more, earlier_cursor=earlier
    )


def _page(source: LogSource, position: Position, rank: int | None, limit: int, test: LineTest | None) -> LogPage:
    """A page; if few lines match, the search continues for a limited time."""
    stops_at, lines = time.monotonic() + _SEARCH_SECONDS, list[LogLine]()
    while True:
        page = read_page(source, position, rank, limit - len(lines), test=test)
        lines, position = lines + page.lines, page.position
        if not page.more or len(lines) == limit or test is None or time.monotonic() > stops_at:
            return LogPage(lines, position, page.more)


def _refuse_unknown(store: Store, logs: JobLogs, job_id: str, rank: int | None) -> None:
    """Raise JobNotFound, or RankNotFound for a rank that the job does not have and that has printed nothing either: the
    job may have been larger before."""
    with store.read() as session:
        job = jobs.get(session, job_id)
        count = None if rank is None else views.ranks_of(job)  # which validates the whole layout
    if rank is None or count is None or rank < count:
        return
    with contextlib.suppress(LogsUnavailable):  # whoever reads them says so, or waits for them
        if rank not in logs.source(job_id).ranks():
            raise RankNotFound(job_id, rank, count)


@dataclass
class _Live:
    """Repeated reads of one stream."""

    store: Store
    logs: JobLogs
    job_id: str
    rank: int | None
    cursors: LogCursors
    test: LineTest | None
    tail: int | None
    """Number of newest lines to start with."""

    def poll(self, position: Position) -> Batch:
        with self.store.read() as session:  # read before the logs, so that they contain all output of a final job
            job = jobs.get(session, self.job_id)
        try:
            source = self.logs.source(self.job_id, fresh=False)
            whole = is_final(job.state) and self._is_complete(job)  # so that the source, there before, has it all
            position, page = self._read(source, position)
        except LogsUnavailable:  # continue when they can be read again
            return Batch([], position, more=False, final=False, state=job.state)
        return Batch(self._entries(position, page.lines), page.position, page.more, whole, job.state)

    def _read(self, source: LogSource, position: Position) -> tuple[Position, LogPage]:
        """The next lines, and their position."""
        if self.tail is None:
            return position, read_page(source, position, self.rank, _STREAM_PAGE, test=self.test)
        last_lines = read_tail(source, self.tail, self.rank, self.test)
        self.tail = None
        return last_lines.begin, LogPage(last_lines.lines, last_lines.end, more=True)

    def _is_complete(self, job: Job) -> bool:
        over_for_long = time.time() - (job.finished_at or 0.0) > _LATE_SECONDS
        return job.generation == 0 or over_for_long or self.logs.is_complete(self.job_id)

    def _entries(self, position: Position, lines: list[LogLine]) -> list[Entry]:
        """The lines, each with the position after it, so that a stream can resume after any line."""
        place, entries = dict(position), []
        for line in lines:
            place[line.rank] = line.end
            entries.append(Entry(self.cursors.encode(place), views.answer(schemas.LogLine, line).model_dump_json()))
        return entries
