"""Carries a job's metrics over as they come, until the job is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from api.cli.progress import JobReader, watch
from api.client.patience import Patience
from api.schemas import Job, MetricSeries
from api.tracking.targets import Row, Target
from service.states import JobState

MAX_STEPS = 10_000
"""In one answer; where there are more, the service thins them out."""
POLL_SECONDS = 2.0


class MetricReader(JobReader, Protocol):
    """What can be asked for a job and its metrics, such as `api.client.MantaClient`."""

    def metrics(
        self, job_id: str, names: Sequence[str] | None = None, after_step: int = 0, max_points: int = 1000
    ) -> MetricSeries:
        """Metrics of the steps after `after_step`."""


def track(
    reader: MetricReader,
    job_id: str,
    targets: Sequence[Target],
    poll_seconds: float = POLL_SECONDS,
    on_progress: Callable[[Job], None] = lambda job: None,
) -> Job:
    """Write a job's metrics into `targets` from its first step on, until it is final, and return it. A step that is
    done again after a recovery is written once. Raises what reading and writing raise."""
    written, patience = 0, Patience()
    for job in watch(reader, job_id, poll_seconds, patience):
        after = written
        new = patience.ask(lambda: reader.metrics(job_id, after_step=after, max_points=MAX_STEPS))  # noqa: B023
        for step, row in _rows(new):
            for target in targets:
                target.write(step, row)
            written = step
        on_progress(job)
    for target in targets:
        target.close(job.state == JobState.SUCCEEDED)
    return job


def _rows(series: MetricSeries) -> Iterator[tuple[int, Row]]:
    """(Step, its numbers), of which those that are not known or not finite are left out."""
    for index, step in enumerate(series.steps):
        values = ((name, column[index]) for name, column in series.series.items())
        yield step, {name: value for name, value in values if value is not None and math.isfinite(value)}
