"""All queries about metrics: rows in, series out."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select, text
from sqlalchemy.orm import Session

from manta.service.states import FINAL
from manta.service.store import generations, jobs, metric_bins, metric_points
from manta.service.store.errors import JobNotFound
from manta.service.store.generations import TrainedStep
from manta.service.store.tables import METRIC_NAMES, Job, Metric
from manta.service.store.types import Reader
from manta.workers.protocol.json_codec import number
from manta.workers.training import metric_names

_NOT_METRICS = frozenset({"step", "time", "generation", "rank", "job"})
_COLUMNS = frozenset({*METRIC_NAMES, "time"})
_RECENT_STEPS = 20
MEANS = ("step_seconds", "tokens_per_second", "mfu_full", "mfu_causal", "hfu_full")
"""Metrics of which a job has means."""
_MAX_AVERAGED = 100
"""About as many steps are read of a job that is over, at equal distances."""


@dataclass(frozen=True)
class Series:
    """Metrics over steps, ready to be drawn."""

    steps: list[int]
    """The committed steps, ascending."""
    series: dict[str, list[float | None]]
    """For each name one value per step; None if unknown."""
    is_lagging: bool = False
    """Whether many rows are in no bin; `metric_bins.catch_up` makes the next reading quicker."""


def record(
    session: Session, job_id: str, generation: int, rank: int, sequence: int, rows: Sequence[dict[str, Any]]
) -> int:
    """Store the metrics of committed steps from one report, exactly once; returns how many rows were stored.

    Each row holds `step` and numbers by metric name; names without a column are kept as extra ones. It may hold
    `time` (Unix seconds of its commit), `generation` (the one that committed it, which may have ended: what it had
    not shipped is reported by the next; default: the reporting one) and `seconds` (since the commit before: `wall`
    and its parts by wait). A row for a step that is there already adds to it, replaces it where it comes from a
    higher generation, which has redone the step, and is dropped where it comes from a lower one. Returns 0, and
    changes nothing, when the report is of a lower generation than the job's or was stored before. Raises JobNotFound.
    """
    if not jobs.accept_report(session, job_id, generation, rank, sequence):
        return 0
    job = jobs.get(session, job_id)
    known = select(Metric).where(Metric.job_id == job_id, Metric.step.in_([int(row["step"]) for row in rows]))
    stored = {metric.step: metric for metric in session.scalars(known)}
    for row in rows:
        _store(session, job, generation, row, stored)
    job.updated_at = time.time()
    session.flush()
    metric_bins.update(session, job, [int(row["step"]) for row in rows])
    session.flush()
    return len(rows)


def series(
    reader: Reader,
    job_id: str,
    names: Sequence[str] = METRIC_NAMES,
    after_step: int = 0,
    max_points: int = 1000,
    until_step: int = metric_points.LAST_STEP,
    every: int = 1,
) -> Series:
    """The metrics called `names` at steps above `after_step` and up to `until_step`, at most `max_points` of them; with
    `every` above 1 at its multiples only, at equal distances. `time` is the Unix second of a step's commit.

    Where there are more steps, these are kept: the first, the last, and of each of at most `max_points - 2` equal
    ranges in between the one with the highest loss, so that a spike is never smoothed away. A loss that is not finite
    counts as highest. However many steps there are, a few rows are read for each point (`metric_bins`). Raises
    JobNotFound.
    """
    known = [name for name in names if name in _COLUMNS]
    others = [name for name in names if name not in _COLUMNS]
    columns = (*known, *(["extra"] if others else []))
    points = metric_points.points(reader, job_id, columns, after_step, max_points, until_step, every)
    steps, *numbers = map(list, zip(*points.rows, strict=True)) if points.rows else [[] for _ in (None, *columns)]
    values = {name: _numbers_in(column) for name, column in zip(known, numbers, strict=False)}
    values |= {name: [extra.get(name) for extra in numbers[-1]] for name in others}
    return Series(steps, {name: values[name] for name in names}, points.is_lagging)


def names_of(reader: Reader, job_id: str) -> tuple[str, ...]:
    """All metrics of a job that are drawn over its steps: the contract's, and those that depend on its spec. Raises
    JobNotFound."""
    spec = reader.execute(select(Job.spec).where(Job.id == job_id)).scalar_one_or_none()
    if spec is None:
        raise JobNotFound(job_id)
    return (*METRIC_NAMES, *metric_names.of_job(spec))


def _numbers_in(column: list[Any]) -> list[float | None]:
    """A column as numbers. They are only checked one by one if there is a text among them, as SQLite stores NaN."""
    return [number(value) for value in column] if str in set(map(type, column)) else column


def means(reader: Reader, some: Collection[Job | Row[Any]]) -> dict[str, dict[str, float]]:
    """Means of the metrics MEANS, by job and name: over the newest 20 steps, or over the whole run of a job that is
    over. The first step of each generation is left out, since it includes what a start takes once; jobs without any
    other are left out. Rates are averaged over time: 100 tokens in 1 s and 100 in 3 s are 50 tokens/s."""
    if not some:
        return {}
    # Constants, not a join: PostgreSQL would read all rows of the jobs. Text: building the conditions of fifty jobs as
    # expressions of SQLAlchemy takes longer than the rest of the list.
    wanted = " OR ".join(f"m.job_id = :job{i} AND m.step {_averaged(job)}" for i, job in enumerate(some))
    rates = ", ".join(f"sum(m.{name} * m.step_seconds) / sum(m.step_seconds)" for name in MEANS[1:])
    query = text(
        f"SELECT m.job_id, avg(m.step_seconds), {rates} FROM metrics m "
        "LEFT JOIN generations g ON g.job_id = m.job_id AND g.generation = m.generation "
        f"WHERE ({wanted}) AND m.step > coalesce(g.resume_step, 0) + 1 AND m.step_seconds > 0 GROUP BY m.job_id"
    )
    rows = reader.execute(query, {f"job{i}": job.id for i, job in enumerate(some)})
    known = {job_id: dict(zip(MEANS, values, strict=True)) for job_id, *values in rows}
    return {job_id: {name: mean for name, mean in of.items() if mean is not None} for job_id, of in known.items()}


def _averaged(job: Job | Row[Any]) -> str:
    """Which steps of a job are averaged, as the end of a condition in SQL."""
    if job.state not in FINAL:
        return f"> {job.step - _RECENT_STEPS}"
    every = max(1, job.step // _MAX_AVERAGED)
    return f"IN ({','.join(map(str, range(every, job.step + 1, every)))})"


def rows_at(reader: Reader, job_id: str, generation: int, steps: Collection[int]) -> list[dict[str, Any]]:
    """All metrics of these steps, as far as `generation` has committed them, by name; ascending."""
    query = select(Metric.__table__).where(Metric.job_id == job_id, Metric.step.in_(steps))
    rows = reader.execute(query.where(Metric.generation == generation).order_by(Metric.step))
    return [{name: number(row[name]) for name in METRIC_NAMES} | row["extra"] for row in rows.mappings()]


def losses_at(reader: Reader, job_id: str, steps: Collection[int]) -> dict[int, dict[str, float | None]]:
    """`loss` and `validation_loss` of these steps of a job, as far as they are committed; of a job that holds out
    nothing of its corpus, the loss of its first validation set."""
    query = select(Metric.step, Metric.loss, Metric.validation_loss, Metric.extra)
    losses = {}
    for step, loss, own, extra in reader.execute(query.where(Metric.job_id == job_id, Metric.step.in_(steps))):
        sets = (value for name, value in extra.items() if name.startswith(metric_names.VALIDATION_LOSS))
        losses[step] = {"loss": loss, "validation_loss": next(sets, None) if own is None else own}
    return losses


def _store(session: Session, job: Job, reporting: int, row: dict[str, Any], known: dict[int, Metric]) -> None:
    """Insert or update one step's row, and update the job's step, latest metrics and ledger. `known`: existing rows, by
    step."""
    step, generation = int(row["step"]), int(row.get("generation") or reporting)
    at = float(row.get("time") or time.time())
    stored = known.get(step)
    if stored is not None and stored.generation > generation:
        return
    if stored is not None and stored.generation == generation and row.get("rank"):
        return  # a copy from a peer of the reporting rank, with its own timestamp
    values = _numbers_of(row)
    # Within a generation only a rollback repeats a step; the same row twice has the same time.
    done_again = stored is not None and (stored.generation < generation or ("time" in row and stored.time < at))
    if stored is None or done_again:
        # If a rank's clock is ahead, it has still committed the step before now.
        trained = _trained(row, values, min(at, time.time()), redone=done_again or step <= job.step)
        generations.add_training(session, job.id, generation, trained)
        stored = known[step] = _emptied(stored or Metric(job_id=job.id, step=step))
        stored.generation, stored.time = generation, at
        session.add(stored)
    for name in METRIC_NAMES:
        if name in values:
            setattr(stored, name, float(values[name]))
    stored.extra = {**stored.extra, **{name: value for name, value in values.items() if name not in METRIC_NAMES}}
    job.step = max(job.step, step)
    job.metrics = {**job.metrics, **values, "step": step}


def _trained(row: dict[str, Any], values: dict[str, float | int], at: float, redone: bool) -> TrainedStep:
    """The step's time; if the row does not contain it, `step_seconds`, all of it computing."""
    known = row.get("seconds")
    seconds = known if isinstance(known, dict) else {"wall": values.get("step_seconds", 0.0)}
    return TrainedStep.of(seconds, at, redone)


def _numbers_of(row: dict[str, Any]) -> dict[str, float | int]:
    """The metrics in a report's row: its numbers, including non-finite ones as words."""
    values = {name: number(value) for name, value in row.items() if name not in _NOT_METRICS}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _emptied(row: Metric) -> Metric:
    """`row` without any metric, so that no values of a lower generation remain."""
    for name in METRIC_NAMES:
        setattr(row, name, None)
    row.extra = {}
    return row
