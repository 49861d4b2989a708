"""What plans and jobs are checked with: the service's own cluster, as the planner sees it, and the shape of weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from manta.api import schemas
from manta.api.threads import FileReads
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.control_plane import ControlPlane
from manta.service.job.planning import JobMeasurements
from manta.service.planner.answer import note_on, to_json
from manta.service.planner.hardware import Cluster, CpuNode
from manta.service.planner.job_plan import NotPlanned, refuse_unplannable
from manta.service.planner.machines import InvalidCalibration, measured_machines, this_node
from manta.service.planner.memory import fits
from manta.service.planner.request import (
    CurrentCluster,
    Machines,
    PlanRequest,
    cluster_of_nodes,
    for_job,
    read_cluster,
)
from manta.service.planner.search import Answer, placement_problem, plan_of
from manta.workers.config import JobSpec
from manta.workers.paths import Paths
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.submitted import names_weights, with_shape_of_weights


async def with_shape(document: Any, control: ControlPlane, files: FileReads) -> Any:
    """`document`, a JobSpec or the request for a plan, with the shape of the weights that its model begins with, if it
    names any. Raises SpecError, FilesTimeout."""
    if not names_weights(document):
        return document
    return await files.run(partial(with_shape_of_weights, document, control.data_roots))


def plan_of_layout(spec: JobSpec, current: CurrentCluster) -> tuple[schemas.Plan | None, str | None, bool]:
    """The plan for the layout of `spec` on the cluster that `current` returns, with a note on it, or None, and why
    there is none; and whether the layout needs more slots than there are."""
    try:
        cluster = for_job(spec, current)(None)
        refuse_unplannable(spec)
    except SpecError as error:
        return None, f"nothing is planned: {'; '.join(problem.rule for problem in error.problems)}", False
    except (NotPlanned, ClusterUnavailable) as error:
        return None, f"nothing is planned: {error}", False
    if (problem := placement_problem(spec, cluster)) is not None:
        return None, problem, True
    document = to_json(PlanRequest(spec, cluster), Answer((plan_of(spec, cluster),), ()))
    fit = fits(spec, cluster)
    notes = [note_on(cluster), None if fit.fits else f"memory is scarce: {fit}"]
    return schemas.Plan.model_validate(document["plans"][0]), "; ".join(filter(None, notes)) or None, False


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
    return lambda accelerator: _cluster_of(control.cluster()["nodes"], accelerator, control)


def _cluster_of(nodes: Sequence[dict[str, Any]], accelerator: str | None, control: ControlPlane) -> Cluster:
    return refined_cluster(control, cluster_of_nodes(nodes, accelerator, cpu_node(control), gpus(control)))


def cluster_for(document: dict[str, Any], control: ControlPlane) -> CurrentCluster:
    """A function that returns the cluster that a dry run is for: the one that its `document` describes, or the current
    one. It raises ClusterUnavailable, SpecError."""
    if "cluster" not in document:
        return current_cluster(control)
    described = read_cluster(document["cluster"], current_cluster(control), cpu_node(control), gpus(control))
    return lambda _accelerator: refined_cluster(control, described)


def clusters_for(spec: JobSpec, document: dict[str, Any], control: ControlPlane) -> tuple[Cluster, Cluster | None]:
    """The cluster to decide for what the `document` of a job leaves out, and the part of it that is not in use, None if
    that is unknown or nothing. A cluster that does not answer is taken to be as it was last seen. Raises SpecError,
    ClusterUnavailable."""
    if "cluster" in document:
        return for_job(spec, cluster_for(document, control))(None), None
    nodes = control.last_seen_cluster()["nodes"]
    cluster = for_job(spec, lambda accelerator: _cluster_of(nodes, accelerator, control))(None)
    free = [{**node, "total": node["free"], "slots_total": node["slots_free"]} for node in nodes]
    try:
        return cluster, for_job(spec, lambda accelerator: _cluster_of(free, accelerator, control))(None)
    except SpecError:
        return cluster, None


def refined_cluster(control: ControlPlane, cluster: Cluster) -> Cluster:
    """The cluster with assumed constants refined by jobs."""
    return job_measurements(control).cluster(cluster)


def job_measurements(control: ControlPlane) -> JobMeasurements:
    """Observations from measured jobs."""
    return control.store.query(JobMeasurements.read, Paths.of(control.home).machines)
