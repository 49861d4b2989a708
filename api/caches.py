"""Answers that are kept for a moment, for clients that ask for the same again: jobs, pages of jobs, series of metrics
and sparklines, as JSON.

Every answer is checked against the jobs' rows, so the contents of a job's row are always current, and no series is
outdated, since a job's row changes with every row of its metrics; values computed from other tables (goodput, expected
end, place in the queue) may be `FRESH_SECONDS` old. A job that had been final for a while when it was rendered does not
change any more.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from pydantic_core import to_json
from sqlalchemy import Connection

from manta.api import schemas, views
from manta.service.store import Store, job_rows, metric_points, metrics
from manta.service.store.job_rows import JobRow
from manta.service.store.paging import Page
from manta.workers.protocol.json_codec import spell_series

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")
FRESH_SECONDS = 1.0
SETTLED_SECONDS = 60.0
"""Seconds after a job's end by which everything about it has been stored."""
MAX_JOBS_BYTES = 32 * 2**20
"""Bytes of JSON, of some 15,000 jobs; with their rows it is about twice that."""
MAX_PAGES_BYTES = 32 * 2**20
"""Bytes of answers and of what they are checked against: some 250 pages of 50 jobs."""
MAX_SERIES_BYTES = 16 * 2**20
"""Some 200 series of 1,000 points."""
MAX_JOBS = 200
POINTS = 32
MAX_SPARKLINES_BYTES = 8 * 2**20
"""Bytes of some 10,000 jobs."""


class AnswerCache(Generic[Question, Answer]):
    """The most recently made answers. May be used by many threads."""

    def __init__(self, max_bytes: int):
        """`max_bytes`: maximum size; the oldest answers are removed first."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Question, tuple[Answer, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, question: Question) -> Answer | None:
        """The answer, if it is kept."""
        with self._lock:
            kept = self._entries.get(question)
        return None if kept is None else kept[0]

    def put(self, question: Question, answer: Answer, size: int) -> None:
        """Keep an answer of `size` bytes, replacing an earlier one."""
        with self._lock:
            _, replaced = self._entries.pop(question, (None, 0))
            self._entries[question] = answer, size
            self._bytes += size - replaced
            while self._bytes > self._max_bytes:
                _, (_, oldest) = self._entries.popitem(last=False)
                self._bytes -= oldest


@dataclass(frozen=True)
class RenderedJob:
    """A job in the form of an answer."""

    row: JobRow
    """The job's row in the database when it was rendered."""
    valid_until: float
    """How long it is valid while the row is the same, by the monotonic clock."""
    etag: str
    """The job's `etag`."""
    body: bytes
    """The job as JSON."""
    brief: bytes
    """The job as JSON, with an empty spec."""


class RenderedJobs:
    """The most recently requested jobs. May be used by many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_bytes: int = MAX_JOBS_BYTES):
        """`max_bytes`: maximum size."""
        self._clock = clock
        self._entries: AnswerCache[str, RenderedJob] = AnswerCache(max_bytes)

    def one(self, store: Store, job_id: str) -> RenderedJob:
        """A job. Raises JobNotFound."""
        with store.read_once() as connection:
            row = job_rows.one(connection, job_id)
        kept = self._valid([row], self._clock()).get(job_id)
        if kept is not None:
            return kept
        with store.read_rows() as connection:
            return self._rendered(connection, [job_rows.one(connection, job_id)])[0]

    def page(self, connection: Connection, *filters: Any) -> Page[RenderedJob]:
        """Jobs of a list. For `filters` and errors see `job_rows.page`."""
        page = job_rows.page(connection, *filters)
        return Page(self._rendered(connection, page.items), page.next_cursor)

    def _rendered(self, connection: Connection, rows: Sequence[JobRow]) -> list[RenderedJob]:
        now = self._clock()
        good = self._valid(rows, now)
        stale = {row.id: row for row in rows if row.id not in good}
        if stale:
            new = {
                job.id: RenderedJob(
                    stale[job.id],
                    _valid_until(job, now),
                    job.etag or "",
                    job.model_dump_json().encode(),
                    job.model_copy(update={"spec": {}}).model_dump_json().encode(),
                )
                for job in views.job_views(connection, job_rows.understood(connection, stale))
            }
            for job_id, job in new.items():
                self._entries.put(job_id, job, len(job.body) + len(job.brief))
            good |= new
        return [good[row.id] for row in rows]

    def _valid(self, rows: Sequence[JobRow], now: float) -> dict[str, RenderedJob]:
        """Cached jobs of these that are still valid."""
        cached = {row.id: (row, self._entries.get(row.id)) for row in rows}
        return {
            job_id: job
            for job_id, (row, job) in cached.items()
            if job is not None and job.row == row and now < job.valid_until
        }


def _valid_until(job: schemas.Job, now: float) -> float:
    over_for = 0.0 if job.finished_at is None else (datetime.now(UTC) - job.finished_at).total_seconds()
    return math.inf if over_for > SETTLED_SECONDS else now + FRESH_SECONDS


@dataclass(frozen=True)
class _RenderedPage:
    rows: str
    """The jobs' rows when the page was rendered, as text."""
    valid_until: float
    """How long it is valid while the rows are the same, by the monotonic clock."""
    body: bytes
    """The answer."""


class RenderedPages:
    """The most recently requested pages. May be used by many threads."""

    def __init__(
        self,
        jobs: RenderedJobs,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = MAX_PAGES_BYTES,
    ):
        """`jobs`: source of the jobs. `max_bytes`: maximum size."""
        self._jobs, self._clock = jobs, clock
        self._entries: AnswerCache[tuple[Any, ...], _RenderedPage] = AnswerCache(max_bytes)

    def page(self, store: Store, *filters: Any, with_spec: bool = True) -> bytes:
        """Jobs of a list in the form of an answer. For `filters` and errors see `job_rows.page`."""
        now = self._clock()
        question = (*filters, with_spec)
        kept = self._entries.get(question)
        if kept is not None and now < kept.valid_until:
            with store.read_once() as connection:
                if kept.rows == job_rows.page_as_text(connection, *filters):
                    return kept.body
        with store.read_rows() as connection:
            rows = job_rows.page_as_text(connection, *filters)
            page = self._jobs.page(connection, *filters)
        bodies = (job.body if with_spec else job.brief for job in page.items)
        items, cursor = b",".join(bodies), json.dumps(page.next_cursor).encode()
        valid_until = min((job.valid_until for job in page.items), default=math.inf)
        made = _RenderedPage(rows, valid_until, b'{"items":[%b],"next_cursor":%b}' % (items, cursor))
        self._entries.put(question, made, len(rows) + len(made.body))
        return made.body


@dataclass(frozen=True)
class RenderedSeries:
    """A series in the form of an answer."""

    extent: metric_points.Extent
    """The version of the job's metrics when it was rendered."""
    body: bytes
    """The answer."""
    is_lagging: bool
    """See `metrics.Series.is_lagging`."""


class RenderedSeriesOfJobs:
    """The most recently requested series. May be used by many threads."""

    def __init__(self) -> None:
        self._entries: AnswerCache[tuple[Any, ...], RenderedSeries] = AnswerCache(MAX_SERIES_BYTES)

    def one(
        self,
        store: Store,
        job_id: str,
        names: Sequence[str] | None,
        after_step: int,
        max_points: int,
        until_step: int = metric_points.LAST_STEP,
        every: int = 1,
    ) -> RenderedSeries:
        """The result of `metrics.series`, for all metrics of the job if `names` is None. Raises JobNotFound."""
        if names is None:
            with store.read_rows() as connection:
                names = metrics.names_of(connection, job_id)
        question = job_id, tuple(names), after_step, max_points, until_step, every
        kept = self._entries.get(question)
        if kept is not None:
            with store.read_once() as connection:
                if kept.extent == metric_points.extent(connection, job_id, after_step, max_points, until_step):
                    return kept
        with store.read_rows() as connection:
            extent = metric_points.extent(connection, job_id, after_step, max_points, until_step)
            points = metrics.series(connection, job_id, names, after_step, max_points, until_step, every)
        # Validation of ten thousand numbers by Pydantic is not worthwhile.
        spelled = {name: spell_series(numbers) for name, numbers in points.series.items()}
        made = RenderedSeries(extent, to_json({"steps": points.steps, "series": spelled}), points.is_lagging)
        self._entries.put(question, made, len(made.body))
        return made


class RenderedSparklines:
    """The most recently requested sparklines. May be used by many threads."""

    def __init__(self) -> None:
        self._entries: AnswerCache[tuple[Any, ...], bytes] = AnswerCache(MAX_SPARKLINES_BYTES)

    def some(self, store: Store, job_ids: Sequence[str], bound: str | None) -> bytes:
        """The sparklines of those of these jobs that exist, of the project `bound` if given, in the form of an
        answer."""
        with store.read_rows() as connection:
            moved = job_rows.moved(connection, job_ids, bound)
            items = [self._one(connection, *moved[job_id]) for job_id in job_ids if job_id in moved]
        return b'{"items":[%b],"next_cursor":null}' % b",".join(items)

    def _one(self, connection: Connection, job_id: str, *moved: Any) -> bytes:
        """`moved`: values that change with every row of the job's metrics."""
        kept = self._entries.get((job_id, *moved))
        if kept is None:
            losses = metrics.series(connection, job_id, ("loss",), max_points=POINTS).series["loss"]
            kept = to_json({"job": job_id, "loss": spell_series(losses)})
            self._entries.put((job_id, *moved), kept, len(kept))
        return kept
