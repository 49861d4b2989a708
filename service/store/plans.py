"""All queries about plans of a job's generations, and their measured steps. Both are stored in the generation's row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from manta.service.planner.drift import MEASURED_STEPS, SETTLING_STEPS, Drift, Measured, compared, drift_of, measured_of
from manta.service.planner.refinement import Observation, observation
from manta.service.states import JobState
from manta.service.store import events, jobs
from manta.service.store.tables import METRIC_NAMES, Generation, Job, Metric, Rank, RankNumbers

PLAN, MEASURED = "plan", "measured"
DRIFT = "plan_drift"
"""Type of the event."""
SEARCHED_JOBS, GENERATIONS_PER_JOB = 200, 5
"""Number of jobs, and of last generations of each, that are searched for observations of machines."""


@dataclass(frozen=True)
class StoredPlan:
    """The stored plan of the newest generation that has one."""

    generation: int
    plan: dict[str, Any]
    """`parallel`, `on` which nodes, and `planned`, or `problem` if nothing could be planned."""
    measured: Measured | None
    """Measured when the first steps have settled; from fewer steps while there are only few."""
    drift: dict[str, Any] | None
    """`ratio`, `part` and `message`, if the measurement is far from the plan."""


def store(session: Session, job_id: str, generation: int, plan: dict[str, Any]) -> None:
    """Store the plan of a generation."""
    row = session.get(Generation, (job_id, generation))
    if row is not None:
        row.data = {**row.data, PLAN: plan}


def is_stored(session: Session, job_id: str, generation: int) -> bool:
    """Whether there is a stored plan of a generation."""
    row = session.get(Generation, (job_id, generation))
    return row is not None and PLAN in row.data


def of_layout(session: Session, job_id: str, parallel: dict[str, Any], on: list[Any]) -> dict[str, Any] | None:
    """The plan of an earlier generation in the same layout `on` the same kind of nodes; None if there is none."""
    kept = (row.data.get(PLAN) for row in _generations(session, job_id))
    alike = (plan for plan in kept if plan and (plan["parallel"], plan.get("on")) == (parallel, on))
    return next((plan for plan in alike if plan["planned"] is not None), None)


def newest(session: Session, job_id: str) -> StoredPlan | None:
    """The plan of the newest generation that has one, with its measured steps; None if none has. Raises
    JobNotFound."""
    job = jobs.get(session, job_id)
    row = next((generation for generation in _generations(session, job_id) if generation.data.get(PLAN)), None)
    if row is None:
        return None
    kept = row.data.get(MEASURED) or {}
    try:
        return StoredPlan(row.generation, row.data[PLAN], Measured(**kept["steps"]), kept["drift"])
    except (KeyError, TypeError):  # not yet, or another release has written it
        measured = measured_of(_rows(session, row), full_tokens(job.spec))
        return StoredPlan(row.generation, row.data[PLAN], measured, None)


def settle(session: Session, job_id: str, generation: int, step: int) -> bool:
    """When a generation has enough steps, store their measurement, and append an event if it is far from the plan,
    unless there was one about the same layout. Returns False, without any change, if there are too few steps or the
    plan is not ready. `step`: the last committed one."""
    row = session.get(Generation, (job_id, generation))
    if row is None or MEASURED in row.data:
        return True
    if PLAN not in row.data or step < row.resume_step + SETTLING_STEPS + MEASURED_STEPS:
        return False
    rows = _rows(session, row)
    measured = measured_of(rows, full_tokens(jobs.get(session, job_id).spec))
    if len(rows) < SETTLING_STEPS + MEASURED_STEPS or measured is None:
        return False
    plan = row.data[PLAN]
    drift, disturbed = _drift(plan, measured), _disturbed(session, row)
    is_repeated = drift is not None and _is_reported(session, job_id, plan["parallel"])
    kept = {"steps": measured.to_json(), "drift": drift and vars(drift), "disturbed": disturbed}
    row.data = {**row.data, MEASURED: kept}
    if drift is not None and not is_repeated:
        parts = [vars(each) for each in compared(plan["planned"], measured)]
        data = {"ratio": drift.ratio, "part": drift.part, "parts": parts}
        events.append(session, job_id, DRIFT, drift.message, generation=generation, step=measured.last_step, data=data)
    return True


def _drift(plan: dict[str, Any], measured: Measured) -> Drift | None:
    try:
        return drift_of(plan["planned"], measured) if plan["planned"] else None
    except (KeyError, TypeError, ZeroDivisionError):  # another release has written it: the metrics are more important
        return None


def _disturbed(session: Session, generation: Generation) -> str | None:
    """What else has affected the steps of a generation that were just measured; None: nothing known."""
    slow = select(RankNumbers.stragglers).where(RankNumbers.job_id == generation.job_id)
    if any(session.scalars(slow.where(RankNumbers.generation == generation.generation))):
        return "straggler"
    if (generation.data[PLAN]["planned"] or {}).get("has_gpus", False):
        return None
    began = generation.first_step_at or generation.started_at
    neighbours = (
        select(Rank.node)
        .join(Generation, Generation.job_id == Rank.job_id)
        .where(Generation.job_id != generation.job_id)
        .join(Job, Job.id == Generation.job_id)
        # A generation of a job that waits for places again has none, whether or not its end was recorded.
        .where(or_(and_(Generation.ended_at.is_(None), Job.state != JobState.QUEUED), Generation.ended_at > began))
    )
    own = set(session.scalars(select(Rank.node).where(Rank.job_id == generation.job_id)))
    return "shared" if own & set(session.scalars(neighbours.distinct())) else None


def observed(session: Session, since: float = 0.0) -> dict[str, list[Observation]]:
    """Observations of machines from jobs: the newest generation of each that began after `since` (Unix seconds), and
    was measured and not disturbed, newest first. Searches the last GENERATIONS_PER_JOB generations of SEARCHED_JOBS
    jobs."""
    last = func.max(Generation.generation).label("last")
    newest_jobs = select(Generation.job_id, last).group_by(Generation.job_id).order_by(Generation.job_id.desc())
    recent = newest_jobs.limit(SEARCHED_JOBS).subquery()
    newest = (
        select(Generation)
        .join(
            recent,
            and_(Generation.job_id == recent.c.job_id, Generation.generation > recent.c.last - GENERATIONS_PER_JOB),
        )
        .order_by(Generation.job_id.desc(), Generation.generation.desc())
    )
    by_machine: dict[str, list[Observation]] = {}
    known: set[str] = set()
    for row in session.scalars(newest):
        kept, planned = row.data.get(MEASURED), (row.data.get(PLAN) or {}).get("planned")
        if row.job_id in known or row.started_at < since or not kept or not planned or "machine" not in planned:
            continue
        if kept.get("disturbed") is None and (said := _observation(row, planned, kept)) is not None:
            known.add(row.job_id)
            by_machine.setdefault(planned["machine"], []).append(said)
    return by_machine


def _observation(row: Generation, planned: dict[str, Any], kept: dict[str, Any]) -> Observation | None:
    try:
        return observation(row.job_id, row.started_at, planned, Measured(**kept["steps"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # another release has written it
        return None


def full_tokens(spec: dict[str, Any]) -> int:
    """Tokens of a full batch of a job, from its stored spec."""
    return int(spec["train"]["global_batch_size"]) * int(spec["model"]["sequence_length"])


def _is_reported(session: Session, job_id: str, parallel: dict[str, Any]) -> bool:
    """Whether an earlier generation in this layout was far from its plan."""
    return any(
        (row.data.get(MEASURED) or {}).get("drift") and row.data[PLAN]["parallel"] == parallel
        for row in _generations(session, job_id)
        if row.data.get(PLAN)
    )


def _generations(session: Session, job_id: str) -> list[Generation]:
    """The generations of a job, newest first."""
    query = select(Generation).where(Generation.job_id == job_id).order_by(Generation.generation.desc())
    return list(session.scalars(query))


def _rows(session: Session, generation: Generation) -> list[dict[str, Any]]:
    """The first rows of metrics that a generation committed, as many as needed."""
    query = (
        select(Metric)
        .where(Metric.job_id == generation.job_id, Metric.step > generation.resume_step)
        .where(Metric.generation == generation.generation)
        .order_by(Metric.step)
        .limit(SETTLING_STEPS + MEASURED_STEPS)
    )
    return [
        {**row.extra, "step": row.step, **{name: getattr(row, name) for name in METRIC_NAMES}}
        for row in session.scalars(query)
    ]
