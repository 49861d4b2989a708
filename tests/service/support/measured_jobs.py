"""Jobs whose steps have been measured, without any that ran."""

from __future__ import annotations

from typing import Any

from manta.service.planner.drift import GROUPS, MEASURED_STEPS, SETTLING_STEPS
from manta.service.planner.hardware import Cluster
from manta.service.planner.job_plan import planned
from manta.service.planner.machines import type_of
from manta.service.store import Store, generations, jobs, metrics, plans
from manta.workers.config import JobSpec

ENOUGH = SETTLING_STEPS + MEASURED_STEPS


def begin(store: Store, job_id: str) -> int:
    """A new generation of a job."""
    return store.write(lambda session: generations.begin(session, job_id, "submitted", False))


def train_on(store: Store, job_id: str, spec: JobSpec, cluster: Cluster, slower: float = 2.0) -> None:
    """As `train`, in a generation that begins now and is planned as `spec` on `cluster`."""
    number = begin(store, job_id)
    plan = {"parallel": {}, "planned": {**planned(spec, cluster), "machine": type_of(cluster.machine)}, "problem": None}
    store.write(lambda session: plans.store(session, job_id, number, plan))
    train(store, job_id, slower)


def train(store: Store, job_id: str, slower: float = 2.0, end: bool = True) -> None:
    """The newest generation of a job, of which a plan is kept, takes as many steps as are measured, in which everything
    is slower than planned by as much; then it ends, or is left as it is."""
    kept = store.write(lambda session: plans.newest(session, job_id))
    assert kept is not None and kept.plan["planned"] is not None
    row = _row(kept.plan["planned"], slower)
    tokens = store.write(lambda session: plans.full_tokens(jobs.get(session, job_id).spec))
    rate = {"tokens_per_second": tokens / row["step_seconds"]}
    rows = [{"step": step, **row, **rate} for step in range(1, ENOUGH + 1)]
    store.write(lambda session: metrics.record(session, job_id, kept.generation, 0, 1, rows))
    assert store.write(lambda session: plans.settle(session, job_id, kept.generation, ENOUGH))
    if end:
        store.write(lambda session: generations.end(session, job_id, kept.generation))


def _row(planned: dict[str, Any], slower: float) -> dict[str, float]:
    seconds = {part["name"]: part["seconds"] for part in planned["parts"]}
    row = {f"{name}_seconds": 0.0 for _, theirs in GROUPS.values() for name in theirs}
    for ours, theirs in GROUPS.values():
        row[f"{theirs[0]}_seconds"] = slower * sum(seconds.get(name, 0.0) for name in ours)
    return {**row, "step_seconds": sum(row.values())}
