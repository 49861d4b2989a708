"""Plans a job's step as soon as its nodes and layout are known: concurrently with training, and without any effect on
it; on machines with constants refined by the steps of jobs.

Refined machines are derived from the plans and measurements in the database each time, so that all control planes
refine alike and nothing has to be kept up to date; without a service, `manta plan` uses calibrations only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from manta.service.job.context import JobContext
from manta.service.planner.hardware import Cluster, Machine
from manta.service.planner.job_plan import NotPlanned, RankNode, cluster_of, planned
from manta.service.planner.machines import (
    InvalidCalibration,
    jobs_since,
    machine_of_type,
    measured_machines,
    this_node,
    type_of,
)
from manta.service.planner.refinement import Observation, refined
from manta.service.store import plans
from manta.workers.config import JobSpec
from manta.workers.protocol.messages import AgentDescription
from manta.workers.spec.problems import SpecError
from manta.workers.system.threads import threads_of, with_threads

log = logging.getLogger(__name__)


async def plan_generation(job: JobContext, generation: int, where: Mapping[int, AgentDescription]) -> None:
    """Store a plan of `generation`, whose ranks are at `where`: that of an earlier one with the same layout on such
    nodes, if there is one. Never raises."""
    try:
        if await job.record.read(lambda session: plans.is_stored(session, job.id, generation)):
            return
        parallel = job.gang.layout.model_dump(mode="json")
        rank_nodes = await _nodes_of_ranks(job, where)
        on = sorted(
            [rank_node.ranks, rank_node.cores, str(rank_node.gpu_type), str(rank_node.gpu_memory_bytes)]
            for rank_node in rank_nodes
        )
        known = await job.record.read(lambda session: plans.of_layout(session, job.id, parallel, on))
        plan = known or {"parallel": parallel, "on": on, **await _plan(job, rank_nodes)}
        await job.record.write(lambda session: plans.store(session, job.id, generation, plan))
    except Exception:
        log.exception("the plan of %s could not be stored", job.id)


async def _plan(job: JobContext, rank_nodes: list[RankNode]) -> dict[str, Any]:
    """`planned`, or `problem`: why there is no plan."""
    try:
        spec = with_threads(job.gang.spec, job.gang.threads or threads_of(job.gang.spec))
        seen = await job.record.read(lambda session: JobMeasurements.read(session, job.cluster.paths.machines))
        return {"planned": await asyncio.to_thread(_planned, spec, job, rank_nodes, seen), "problem": None}
    except (NotPlanned, SpecError, InvalidCalibration) as error:
        return {"planned": None, "problem": f"this job could not be planned: {error}"}
    except Exception as error:
        log.exception("%s could not be planned", job.id)
        return {"planned": None, "problem": f"this job could not be planned ({type(error).__name__}: {error})"}


def _planned(spec: JobSpec, job: JobContext, rank_nodes: list[RankNode], seen: JobMeasurements) -> dict[str, Any]:
    folder = job.cluster.paths.machines
    cluster = cluster_of(rank_nodes, this_node(folder), measured_machines(folder))
    return {**planned(spec, seen.cluster(cluster)), "machine": type_of(cluster.machine)}


async def _nodes_of_ranks(job: JobContext, where: Mapping[int, AgentDescription]) -> list[RankNode]:
    """The nodes on which the ranks are."""
    ranks = Counter(about.node or about.host for about in where.values())
    some = {about.node or about.host: about for about in where.values()}
    if not any(about.devices for about in some.values()):
        return [RankNode(count, some[name].cores, has_gpus=False) for name, count in ranks.items()]
    types = {node.id: node.gpu_type for node in await job.cluster.nodes.known()}
    said = job.cluster.nodes.gpus
    memory = {name: said[name].min_gpu_memory for name in ranks if name in said}
    return [RankNode(count, some[name].cores, True, types.get(name), memory.get(name)) for name, count in ranks.items()]


@dataclass(frozen=True)
class JobMeasurements:
    """What jobs say about machines."""

    by_type: dict[str, list[Observation]]
    """Newest first, by `manta.service.planner.machines.type_of`."""

    @classmethod
    def read(cls, session: Session, folder: Path) -> JobMeasurements:
        """From the jobs in the database. `folder`: of the calibrations, which also records since when jobs count."""
        return cls(plans.observed(session, jobs_since(folder)))

    def machine(self, machine: Machine) -> Machine:
        """`machine` as refined by jobs."""
        return refined(machine, self.by_type.get(type_of(machine), ()))

    def of_type(self, name: str, folder: Path) -> Machine | None:
        """A machine of that type if jobs have refined it, otherwise None; `folder`: of the calibrations."""
        try:
            machine = machine_of_type(folder, name)
        except InvalidCalibration:
            return None
        refined = machine and self.machine(machine)
        return refined if refined and refined.refined else None

    def newest(self, name: str) -> float:
        """When the newest job on such a machine began, Unix seconds."""
        return max(each.at for each in self.by_type[name])

    def cluster(self, cluster: Cluster) -> Cluster:
        """`cluster` with refined machines of all kinds."""
        others = tuple(self.cluster(other) for other in cluster.others)
        return replace(cluster, machine=self.machine(cluster.machine), others=others)
