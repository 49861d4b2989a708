"""Numbers of jobs: all of them by state, and each unfinished one by its id. They come from the database, so that every
control plane that is scraped says the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from manta.api.metrics import Family, Samples, counter, gauge, if_known
from manta.service.states import FINAL, SUPERVISED
from manta.service.store import Store, job_numbers
from manta.service.store.job_numbers import RECENT_TYPES, FleetNumbers, JobNumbers
from manta.workers.training.metric_names import BALANCE_LOSS, EXPERT_LOAD

Read = Callable[[JobNumbers, float], Samples]
"""The samples of one job, its id aside, at a Unix time."""


def _always(value: Callable[[JobNumbers], float]) -> Read:
    return lambda job, now: [((), value(job))]


def _latest(key: str) -> Read:
    """The latest value of a metric of the steps."""
    return if_known(lambda job, now: job.row.metrics.get(key))


def _not_finite(job: JobNumbers, now: float) -> float | None:
    loss = job.row.metrics.get("loss")
    return None if loss is None else float(not math.isfinite(loss))


def _every_steps(job: JobNumbers) -> int:
    return int((job.row.spec.get("checkpoint") or {}).get("every_steps") or 0)


def _checkpoint_age(job: JobNumbers, now: float) -> float | None:
    """Of a job that saves none as it goes there is nothing to be late."""
    if job.placed_at is None or not _every_steps(job):
        return None
    return max(0.0, now - max(job.placed_at, job.placed_at if job.saved is None else job.saved.began_at))


def _checkpoint_seconds(job: JobNumbers, now: float) -> float | None:
    if job.saved is None or job.saved.ended_at is None:
        return None
    return max(0.0, job.saved.ended_at - job.saved.began_at)


def _recent(job: JobNumbers, now: float) -> Samples:
    known = RECENT_TYPES if job.row.state in SUPERVISED else ()
    return [((kind,), job.recent_events.get(kind, 0)) for kind in known]


_OF_JOB: tuple[tuple[Family, Read], ...] = (
    (
        gauge("manta_job_info", "1 for each unfinished job, with its name and project", "job", "name", "project"),
        lambda job, now: [((job.row.name, job.row.project), 1)],
    ),
    (
        gauge("manta_job_state", "1 for the state that the job is in", "job", "state"),
        lambda job, now: [((job.row.state,), 1)],
    ),
    (
        gauge("manta_job_state_timestamp_seconds", "When the job entered its state, Unix seconds", "job"),
        _always(lambda job: job.state_since),
    ),
    (gauge("manta_job_step", "Last committed step", "job"), _always(lambda job: job.row.step)),
    (gauge("manta_job_steps", "Steps of the whole job", "job"), _always(lambda job: job.row.steps)),
    (
        gauge("manta_job_last_step_timestamp_seconds", "When the last step was committed, Unix seconds", "job"),
        if_known(lambda job, now: job.last_step_at),
    ),
    (gauge("manta_job_step_seconds", "Duration of the last committed step", "job"), _latest("step_seconds")),
    (
        gauge("manta_job_tokens_per_second", "Throughput of the last committed step", "job"),
        _latest("tokens_per_second"),
    ),
    (
        gauge("manta_job_mfu_full_ratio", "Model FLOP utilisation, attention in full, 0 to 1", "job"),
        _latest("mfu_full"),
    ),
    (
        gauge("manta_job_mfu_causal_ratio", "Model FLOP utilisation, half of attention, 0 to 1", "job"),
        _latest("mfu_causal"),
    ),
    (
        gauge(
            "manta_job_hfu_full_ratio", "Hardware FLOP utilisation: recomputation too, attention in full, 0 to 1", "job"
        ),
        _latest("hfu_full"),
    ),
    (gauge("manta_job_loss", "Training loss of the last committed step, nats per token", "job"), _latest("loss")),
    (
        gauge(
            "manta_job_loss_not_finite", "1 where the loss of the last committed step is NaN or infinite, else 0", "job"
        ),
        if_known(_not_finite),
    ),
    (
        gauge("manta_job_grad_norm", "Norm of the last committed step's gradient before clipping", "job"),
        _latest("grad_norm"),
    ),
    (gauge("manta_job_memory_bytes", "Highest memory use of a rank", "job"), _latest("memory_bytes")),
    (
        gauge(
            "manta_job_expert_load_ratio",
            "Tokens of the busiest expert over the mean of its layer, in the layer where that is highest",
            "job",
        ),
        _latest(EXPERT_LOAD),
    ),
    (
        gauge("manta_job_balance_loss", "Balance loss of the last committed step, summed over layers", "job"),
        _latest(BALANCE_LOSS),
    ),
    (
        gauge("manta_job_goodput_ratio", "Compute / (wall - queue - pause), 0 to 1", "job"),
        if_known(lambda job, now: job.ledger.goodput),
    ),
    (
        # A gauge: what a step was is only known once it is committed, so time may still move to another class.
        gauge("manta_job_ledger_seconds", "Time since submission by class", "job", "class"),
        lambda job, now: [((kind,), seconds) for kind, seconds in job.ledger.seconds.items()],
    ),
    (counter("manta_job_restarts_total", "Automatic restarts", "job"), _always(lambda job: job.row.restarts)),
    (
        counter(
            "manta_job_recoveries_total", "Recoveries by the kind of failure that made them necessary", "job", "cause"
        ),
        lambda job, now: [((kind,), count) for kind, count in job.recovered.by_kind.items()],
    ),
    (
        counter("manta_job_recoveries_ended_total", "Recoveries that have led to the next step", "job"),
        _always(lambda job: job.recovered.ended),
    ),
    (
        counter("manta_job_recovery_seconds_total", "Time of the recoveries that have ended, by phase", "job", "phase"),
        lambda job, now: [((phase,), seconds) for phase, seconds in job.recovered.seconds.items()],
    ),
    (
        counter("manta_job_steps_redone_total", "Committed steps that recoveries had done again", "job"),
        _always(lambda job: job.recovered.steps_redone),
    ),
    (
        gauge("manta_job_checkpoint_every_steps", "Steps between durable checkpoints; 0: none as it goes", "job"),
        _always(_every_steps),
    ),
    (
        gauge(
            "manta_job_checkpoint_age_seconds",
            "Since the newest complete checkpoint began or, where that is later, since the job last left the queue",
            "job",
        ),
        if_known(_checkpoint_age),
    ),
    (
        gauge("manta_job_checkpoint_duration_seconds", "How long saving the newest complete checkpoint took", "job"),
        if_known(_checkpoint_seconds),
    ),
    (
        gauge("manta_job_recent_events", "Events of the last hour that tell of trouble, by type", "job", "type"),
        _recent,
    ),
)

_BY_STATE = gauge("manta_jobs", "Jobs by state", "state")
_UNLISTED = gauge("manta_jobs_unlisted", "Unfinished jobs that have no series of their own, since there are too many")
_FAILED = gauge("manta_jobs_failed_recently", "Jobs that failed within the last hour, by reason", "reason")
_WITHOUT_OWNER = gauge("manta_jobs_without_owner", "Jobs that may hold places and that no control plane owns")
_QUEUE_WAIT = gauge("manta_queue_oldest_wait_seconds", "How long the job that has waited longest is in the queue")
_PLANES = gauge("manta_control_planes", "Control planes that live")

FAMILIES: tuple[Family, ...] = (
    *(_BY_STATE, _UNLISTED, _FAILED, _WITHOUT_OWNER, _QUEUE_WAIT, _PLANES),
    *(family for family, _ in _OF_JOB),
)


class JobCollector(Collector):
    """Reads the database with every scrape; the same number of queries, however many jobs there are."""

    def __init__(self, store: Store, bound: str | None):
        """Reads from `store`; with `bound` only the jobs of that project."""
        self._store, self._bound = store, bound

    def collect(self) -> Iterable[Metric]:
        """All numbers as of now."""
        now = time.time()
        numbers = self._store.query(job_numbers.read, now, self._bound)
        yield from _of_all(numbers, now)
        for family, read in _OF_JOB:
            yield family.of(_by_job(numbers.listed, read, now))

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are unique by construction, and registering must not read the database."""
        return []


def _by_job(listed: Sequence[JobNumbers], read: Read, now: float) -> Iterator[tuple[Sequence[str], float]]:
    for job in listed:
        for labels, value in read(job, now):
            yield (job.row.id, *labels), value


def _of_all(numbers: FleetNumbers, now: float) -> Iterable[Metric]:
    unfinished = sum(count for state, count in numbers.by_state.items() if state not in FINAL)
    waited = 0.0 if numbers.queued_since is None else max(0.0, now - numbers.queued_since)
    return [
        _BY_STATE.of(((state.value,), count) for state, count in numbers.by_state.items()),
        _UNLISTED.of([((), unfinished - len(numbers.listed))]),
        _FAILED.of(((reason,), count) for reason, count in numbers.recent_failures.items()),
        _WITHOUT_OWNER.of([((), numbers.without_owner)]),
        _QUEUE_WAIT.of([((), waited)]),
        _PLANES.of([((), numbers.control_planes)]),
    ]
