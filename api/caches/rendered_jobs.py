"""Jobs as JSON, cached for a short time: clients that watch a job or a list repeat the same request.

Every answer is checked against the jobs' rows, so the contents of a job's row are always current; values computed from
other tables (goodput, expected end, place in the queue) may be `FRESH_SECONDS` old. A job that had been final for a
while when it was rendered does not change any more.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection

from api import schemas, views
from service.store import Store, job_rows
from service.store.job_rows import JobRow
from service.store.paging import Page

FRESH_SECONDS = 1.0
SETTLED_SECONDS = 60.0
"""Seconds after a job's end by which everything about it has been stored."""
MAX_KEPT_BYTES = 32 * 2**20
"""Bytes of JSON, of some 15,000 jobs; with their rows it is about twice that."""


@dataclass(frozen=True)
class RenderedJob:
    """A job in the form of an answer."""

    row: JobRow
    """The job's row in the database when it was rendered."""
    good_until: float
    """How long it is valid while the row is the same, by the monotonic clock."""
    etag: str
    """The job's `etag`."""
    body: bytes
    """The job as JSON."""
    brief: bytes
    """The job as JSON, with an empty spec."""


class RenderedJobs:
    """The most recently requested jobs. May be used by many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._kept: OrderedDict[str, RenderedJob] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def one(self, store: Store, job_id: str) -> RenderedJob:
        """A job. Raises JobNotFound."""
        with store.read_once() as connection:
            row = job_rows.one(connection, job_id)
        kept = self._good([row], self._clock()).get(job_id)
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
        good = self._good(rows, now)
        stale = {row.id: row for row in rows if row.id not in good}
        if stale:
            new = {
                job.id: RenderedJob(
                    stale[job.id],
                    _good_until(job, now),
                    job.etag or "",
                    job.model_dump_json().encode(),
                    job.model_copy(update={"spec": {}}).model_dump_json().encode(),
                )
                for job in views.job_views(connection, job_rows.understood(connection, stale))
            }
            self._keep(new)
            good |= new
        return [good[row.id] for row in rows]

    def _good(self, rows: Sequence[JobRow], now: float) -> dict[str, RenderedJob]:
        """Cached jobs of these that are still valid."""
        with self._lock:
            kept = [self._kept.get(row.id) for row in rows]
        return {
            row.id: job
            for row, job in zip(rows, kept, strict=True)
            if job is not None and job.row == row and now < job.good_until
        }

    def _keep(self, new: dict[str, RenderedJob]) -> None:
        with self._lock:
            for job_id, job in new.items():
                replaced = self._kept.pop(job_id, None)
                self._kept[job_id] = job
                self._kept_bytes += _bytes_of(job) - (0 if replaced is None else _bytes_of(replaced))
            while self._kept_bytes > MAX_KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= _bytes_of(oldest)


def _bytes_of(job: RenderedJob) -> int:
    return len(job.body) + len(job.brief)


def _good_until(job: schemas.Job, now: float) -> float:
    over_for = 0.0 if job.finished_at is None else (datetime.now(UTC) - job.finished_at).total_seconds()
    return math.inf if over_for > SETTLED_SECONDS else now + FRESH_SECONDS
