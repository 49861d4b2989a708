"""What plans and jobs are checked with: the service's own cluster, as the planner sees it, and the shape of weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from manta.api import schemas
from manta.api.threads import FileReads
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.control_plane import ControlPlane
from manta.service.job.planning import JobMeasurements
from manta.service.planner.answer import to_json
from manta.service.planner.hardware import Cluster, CpuNode
from manta.service.planner.job_plan import NotPlanned, refuse_unplannable
from manta.service.planner.machines import InvalidCalibration, measured_machines, this_node
from manta.service.planner.request import CurrentCluster, Machines, PlanRequest, cluster_of_nodes, for_job
from manta.service.planner.search import placement_problem
from manta.workers.config import JobSpec
from manta.workers.paths import Paths
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.submitted import with_shape_of_weights


async def with_shape(document: Any, control: ControlPlane, files: FileReads) -> Any:
    """`document`, a JobSpec or the request for a plan, with the shape of the weights that its model begins with, if it
    names any. Raises SpecError, FilesTimeout."""
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict) or "from" not in model:
        return document
    return await files.run(partial(with_shape_of_weights, document, control.data_roots))


def plan_of_layout(
    spec: JobSpec, current: CurrentCluster
) -> tuple[schemas.Plan | None, str | None, schemas.Misfit | None]:
    """The plan for the layout of `spec` on the cluster that `current` returns, with a note on it; or None, why there is
    no plan, and what the layout needs more of, if that is the reason."""
    try:
        cluster = for_job(spec, current)(None)
        refuse_unplannable(spec)
    except SpecError as error:
        return None, f"nothing is planned: {'; '.join(problem.rule for problem in error.problems)}", None
    except (NotPlanned, ClusterUnavailable) as error:
        return None, f"nothing is planned: {error}", None
    request = PlanRequest(spec, cluster)
    document = to_json(request, request.answer())
    if document["plans"]:
        return schemas.Plan.model_validate(document["plans"][0]), document["note"], None
    return None, document["rejected"][0]["reason"], "slots" if placement_problem(spec, cluster) else "memory"


def cpu_node(control: ControlPlane) -> CpuNode:
    """A node of the cluster without GPUs: like the one that the service runs on. Raises SpecError."""
    try:
        return this_node(Paths.of(control.home).machines)
    except InvalidCalibration as error:
        raise SpecError([Problem("cluster", str(error))]) from error


def gpus(control: ControlPlane) -> Machines:
    """Machines whose GPUs were measured. Raises SpecError."""
    try:
        return measured_machines(Paths.of(control.home).machines)
    except InvalidCalibration as error:
        raise SpecError([Problem("cluster", str(error))]) from error


def current_cluster(control: ControlPlane) -> CurrentCluster:
    """A function that returns the current cluster. Raises ClusterUnavailable, SpecError."""

    def cluster(accelerator: str | None) -> Cluster:
        as_measured = cluster_of_nodes(control.cluster()["nodes"], accelerator, cpu_node(control), gpus(control))
        return refined_cluster(control, as_measured)

    return cluster


def refined_cluster(control: ControlPlane, cluster: Cluster) -> Cluster:
    """The cluster with assumed constants refined by jobs."""
    return job_measurements(control).cluster(cluster)


def job_measurements(control: ControlPlane) -> JobMeasurements:
    """Observations from measured jobs."""
    return control.store.query(JobMeasurements.read, Paths.of(control.home).machines)
