"""Losses of many jobs as short series, each cached until its job has advanced: clients that watch a list repeat the
same request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Connection

from api.caches.kept_answers import KeptAnswers
from service.store import Store, job_rows, metrics
from workers.protocol.json_codec import spell_series

MAX_JOBS = 200
POINTS = 32
MAX_KEPT_BYTES = 8 * 2**20
"""Bytes of some 10,000 jobs."""


class RenderedSparklines:
    """The most recently requested sparklines. May be used by many threads."""

    def __init__(self) -> None:
        self._kept: KeptAnswers[tuple[Any, ...], bytes] = KeptAnswers(MAX_KEPT_BYTES)

    def some(self, store: Store, job_ids: Sequence[str], bound: str | None) -> bytes:
        """The sparklines of those of these jobs that exist, of the project `bound` if given, in the form of an
        answer."""
        with store.read_rows() as connection:
            moved = job_rows.moved(connection, job_ids, bound)
            items = [self._one(connection, *moved[job_id]) for job_id in job_ids if job_id in moved]
        return b'{"items":[%b],"next_cursor":null}' % b",".join(items)

    def _one(self, connection: Connection, job_id: str, *moved: Any) -> bytes:
        """`moved`: values that change with every row of the job's metrics."""
        kept = self._kept.get((job_id, *moved))
        if kept is None:
            losses = metrics.series(connection, job_id, ("loss",), max_points=POINTS).series["loss"]
            kept = to_json({"job": job_id, "loss": spell_series(losses)})
            self._kept.keep((job_id, *moved), kept, len(kept))
        return kept
