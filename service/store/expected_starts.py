"""When queued jobs can be expected to start, from the progress of the jobs that run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Row, select

from manta.service.cluster.placement import plural_of, unit_of
from manta.service.cluster.sizes import layout_in_use
from manta.service.states import SUPERVISED, JobState
from manta.service.store import jobs, metrics
from manta.service.store.tables import Job
from manta.service.store.types import Reader
from manta.workers.config import ParallelConfig

MAX_FORECAST = 50
"""Number of jobs at the head of the queue whose start is estimated."""
_SIZES = (Job.tensor, Job.pipeline, Job.context, Job.expert, Job.replicas)
_COLUMNS = (Job.id, Job.state, Job.spec, *_SIZES, Job.step, Job.steps, Job.waiting_for)


class Ending(NamedTuple):
    """When a job that holds units is expected to release them."""

    seconds: float | None
    """From now; None: unknown."""
    units: int


def starts(needed: Iterable[tuple[str, int]], free: int, endings: Collection[Ending]) -> dict[str, float]:
    """Seconds until each job can start that waits for units of one kind. `needed`: id and units of each waiting job, in
    the order of the queue; every job keeps what it gets. Jobs that take more than all units are skipped; those behind
    a job whose start is unknown are left out."""
    released = sorted((each for each in endings if each.seconds is not None), reverse=True)
    most = free + sum(each.units for each in endings)
    found, at = dict[str, float](), 0.0
    for job_id, units in needed:
        if units > most:
            continue
        while free < units and released:
            last = released.pop()
            free, at = free + last.units, last.seconds or 0.0
        if free < units:
            break
        free -= units
        found[job_id] = at
    return found


def expected_starts(reader: Reader) -> dict[str, float]:
    """Seconds until the start of the jobs at the head of the queue, by job; those whose start is unknown are left
    out."""
    in_turn = select(*_COLUMNS).where(Job.state == JobState.QUEUED.value).order_by(Job.priority.desc(), Job.id)
    queued = list(reader.execute(in_turn.limit(MAX_FORECAST)))
    free = {
        job.waiting_for["unit"]: int(job.waiting_for["free"])
        for job in reversed(queued)  # the first one was looked at last
        if job.waiting_for and "free" in job.waiting_for
    }
    if not free:
        return {}
    holding = list(reader.execute(select(*_COLUMNS).where(Job.state.in_([state.value for state in SUPERVISED]))))
    means = metrics.means(reader, [job for job in holding if job.step > 0])
    seconds = {job_id: of.get("step_seconds") for job_id, of in means.items()}
    found: dict[str, float] = {}
    for unit in free:
        needed = [(job.id, _units_of(job)) for job in queued if _kind_of(job, free) == unit]
        endings = [_ending(job, seconds.get(job.id)) for job in holding if _kind_of(job, free) == unit]
        found |= starts(needed, free[unit], endings)
    return found


def _kind_of(job: Row[Any], kinds: Collection[str]) -> str:
    return plural_of(unit_of(jobs.accelerator_of(job), cluster_has_gpus="gpus" in kinds)).lower()


def _units_of(job: Row[Any]) -> int:
    if job.state == JobState.QUEUED and job.waiting_for and "needed" in job.waiting_for:
        return int(job.waiting_for["needed"])
    try:
        return layout_in_use(ParallelConfig.model_validate(job.spec["parallel"]), job).world_size
    except ValidationError:  # stored by another release
        return 0


def _ending(job: Row[Any], step_seconds: float | None) -> Ending:
    if job.state in (JobState.PAUSING, JobState.CANCELLING):
        return Ending(0.0, _units_of(job))
    left = None if step_seconds is None else step_seconds * (job.steps - job.step)
    return Ending(left, _units_of(job))
