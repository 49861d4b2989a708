"""Pages of jobs as JSON, cached for a short time like the jobs in them (`rendered_jobs.py`): clients that watch a list
repeat the same request. Every answer is checked against the rows of its jobs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from api.caches.kept_answers import KeptAnswers
from api.caches.rendered_jobs import RenderedJobs
from service.store import Store, job_rows

MAX_KEPT_BYTES = 32 * 2**20
"""Bytes of answers and of what they are checked against: some 250 pages of 50 jobs."""


@dataclass(frozen=True)
class _RenderedPage:
    rows: str
    """The jobs' rows when the page was rendered, as text."""
    good_until: float
    """How long it is valid while the rows are the same, by the monotonic clock."""
    body: bytes
    """The answer."""


class RenderedPages:
    """The most recently requested pages. May be used by many threads."""

    def __init__(
        self,
        jobs: RenderedJobs,
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = MAX_KEPT_BYTES,
    ):
        """`jobs`: source of the jobs. `most_bytes`: maximum size."""
        self._jobs, self._clock = jobs, clock
        self._kept: KeptAnswers[tuple[Any, ...], _RenderedPage] = KeptAnswers(most_bytes)

    def page(self, store: Store, *filters: Any, with_spec: bool = True) -> bytes:
        """Jobs of a list in the form of an answer. For `filters` and errors see `job_rows.page`."""
        now = self._clock()
        question = (*filters, with_spec)
        kept = self._kept.get(question)
        if kept is not None and now < kept.good_until:
            with store.read_once() as connection:
                if kept.rows == job_rows.page_as_text(connection, *filters):
                    return kept.body
        with store.read_rows() as connection:
            rows = job_rows.page_as_text(connection, *filters)
            page = self._jobs.page(connection, *filters)
        bodies = (job.body if with_spec else job.brief for job in page.items)
        items, cursor = b",".join(bodies), json.dumps(page.next_cursor).encode()
        good_until = min((job.good_until for job in page.items), default=math.inf)
        made = _RenderedPage(rows, good_until, b'{"items":[%b],"next_cursor":%b}' % (items, cursor))
        self._kept.keep(question, made, len(rows) + len(made.body))
        return made.body
