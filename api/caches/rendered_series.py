"""Series of metrics as JSON, cached for clients that draw the same ones repeatedly, such as dashboards. Every answer is
checked against the job's row, which changes with every row of its metrics, so none is outdated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from api.caches.kept_answers import KeptAnswers
from service.store import Store, metric_points, metrics
from workers.protocol.json_codec import spell_series

MAX_KEPT_BYTES = 16 * 2**20
"""Some 200 series of 1,000 points."""


@dataclass(frozen=True)
class RenderedSeries:
    """A series in the form of an answer."""

    extent: metric_points.Extent
    """The version of the job's metrics when it was rendered."""
    body: bytes
    """The answer."""
    behind: bool
    """See `metrics.Series.behind`."""


class RenderedSeriesOfJobs:
    """The most recently requested series. May be used by many threads."""

    def __init__(self) -> None:
        self._kept: KeptAnswers[tuple[Any, ...], RenderedSeries] = KeptAnswers(MAX_KEPT_BYTES)

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
        kept = self._kept.get(question)
        if kept is not None:
            with store.read_once() as connection:
                if kept.extent == metric_points.extent(connection, job_id, after_step, max_points, until_step):
                    return kept
        with store.read_rows() as connection:
            extent = metric_points.extent(connection, job_id, after_step, max_points, until_step)
            points = metrics.series(connection, job_id, names, after_step, max_points, until_step, every)
        # Validation of ten thousand numbers by Pydantic is not worthwhile.
        spelled = {name: spell_series(numbers) for name, numbers in points.series.items()}
        made = RenderedSeries(extent, to_json({"steps": points.steps, "series": spelled}), points.behind)
        self._kept.keep(question, made, len(made.body))
        return made
