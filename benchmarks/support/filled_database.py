"""A job database as years leave it, made with SQL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from manta.service.store import Store, job_rows, jobs, metric_bins
from manta.service.store.job_rows import JobFilter
from manta.service.store.tables import Job
from manta.workers.spec.reading import parse_job_spec

DOCUMENT: dict[str, Any] = {
    "name": "bench",
    "model": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8},
    "data": {"source": "python-stdlib"},
    "train": {"steps": 1_000_000, "global_batch_size": 4},
}
RUNNING = 100
"""Jobs of these that run; the others succeeded."""
SINCE_THE_END = 3600.0
"""Seconds since those that succeeded ended."""


@dataclass(frozen=True)
class Filled:
    """What is in a filled database."""

    longest: str
    """The job with the longest series."""
    some: str
    """One of the others."""
    running: list[str]
    """Jobs that run."""


def fill(store: Store, count: int, points: int, longest: int) -> Filled:
    """`count` jobs with `points` rows of metrics, of which one has `longest` and the others equal shares; each has a
    generation, states and events, and all bins."""
    job = store.write(lambda session: jobs.create(session, parse_job_spec(DOCUMENT)))[0]
    ended = f"created_at - {SINCE_THE_END}"
    _in_transaction(
        store, f"UPDATE jobs SET state = 'SUCCEEDED', step = {longest}, finished_at = {ended} WHERE id = '{job.id}'"
    )
    share = max(1, (points - longest) // max(1, count - 1))
    # Ids below the next ones that the service gives, so that these are the newest.
    ids = f"'job_' || {_padded('number', 12)}"
    columns = [column.name for column in Job.__table__.columns]
    changed = {
        "id": ids,
        "state": f"CASE WHEN number > {count - 1 - RUNNING} THEN 'RUNNING' ELSE 'SUCCEEDED' END",
        "finished_at": f"CASE WHEN number > {count - 1 - RUNNING} THEN NULL ELSE jobs.{ended} END",
        "step": str(share),
        "generation": "1",
    }
    values = ", ".join(changed.get(name, f"jobs.{name}") for name in columns)
    _in_transaction(
        store,
        f"INSERT INTO jobs ({', '.join(columns)}) {_numbers(store, count - 1)} "
        f"SELECT {values} FROM jobs, numbers WHERE jobs.id = '{job.id}'",
        "INSERT INTO generations (job_id, generation, cause, resume_source, resume_step, started_at, data, "
        "committed_steps, redone_steps, compute_seconds, data_wait_seconds, snapshot_stall_seconds, "
        "checkpoint_stall_seconds, redo_seconds) "
        "SELECT id, 1, 'submitted', 'start', 0, created_at, '{}', step, 0, 1.0, 0, 0, 0, 0 FROM jobs",
        "INSERT INTO state_changes (job_id, time, state) "
        f"SELECT id, created_at, 'RUNNING' FROM jobs WHERE id <> '{job.id}'",
        "INSERT INTO events (job_id, time, type, message, data) "
        "SELECT id, created_at, 'first_step', 'the first step', '{}' FROM jobs",
    )
    _add_metrics(store, f"jobs.id <> '{job.id}'", share)
    _add_metrics(store, f"jobs.id = '{job.id}'", longest)
    _add_bins(store, max(share, longest))
    _in_transaction(store, "ANALYZE")
    with store.read_rows() as connection:
        running = [each.id for each in job_rows.page(connection, JobFilter(states=("RUNNING",)), limit=RUNNING).items]
    return Filled(job.id, running[0] if running else job.id, running or [job.id])


def _add_metrics(store: Store, which: str, steps: int) -> None:
    _in_transaction(
        store,
        "INSERT INTO metrics (job_id, step, generation, time, loss, grad_norm, learning_rate, tokens, "
        f"tokens_per_second, step_seconds, extra) {_numbers(store, steps)} "
        "SELECT jobs.id, number, 1, 1.7e9 + number, 2.0 + (number % 1000 * 7919 % 1000) / 1000.0, 1.0, 0.001, "
        f"number * 1000.0, 50000.0, 0.02, '{{}}' FROM jobs, numbers WHERE {which} ORDER BY jobs.id, number",
    )


def _add_bins(store: Store, most: int) -> None:
    """As `metric_bins` makes them, for all jobs at once."""
    level = 1
    while metric_bins.width(level) <= most + 1:
        wide = metric_bins.width(level)
        below = "metrics" if level == 1 else f"metric_bins WHERE level = {level - 1}"
        complete = f"{metric_bins.SMALLEST} * ((jobs.step + 1) / {metric_bins.SMALLEST})"
        _in_transaction(
            store,
            "INSERT INTO metric_bins (job_id, level, bin, step, loss) "
            f"SELECT job_id, {level}, bin, ranked.step, loss FROM (SELECT job_id, step / {wide} AS bin, step, loss, "
            f"row_number() OVER (PARTITION BY job_id, step / {wide} ORDER BY loss DESC, step) AS place FROM {below}) "
            f"AS ranked JOIN jobs ON jobs.id = job_id WHERE place = 1 AND (bin + 1) * {wide} <= {complete}",
        )
        level += 1
    _in_transaction(
        store,
        f"UPDATE jobs SET binned_generation = generation, "
        f"binned_until = {metric_bins.SMALLEST} * ((step + 1) / {metric_bins.SMALLEST})",
    )


def _numbers(store: Store, last: int) -> str:
    """A common table expression `numbers` of 1 to `last`."""
    if store.engine.dialect.name == "postgresql":
        return f"WITH numbers AS (SELECT generate_series(1, {last}) AS number)"
    return (
        "WITH RECURSIVE numbers(number) AS "
        f"(SELECT 1 WHERE {last} > 0 UNION ALL SELECT number + 1 FROM numbers WHERE number < {last})"
    )


def _padded(number: str, digits: int) -> str:
    return f"substr(CAST(1{'0' * digits} + {number} AS TEXT), 2)"


def _in_transaction(store: Store, *statements: str) -> None:
    def run(session: Session) -> None:
        connection: Connection = session.connection()
        store.database.disable_time_limit(connection)
        for statement in statements:
            connection.execute(text(statement))

    store.write(run)
