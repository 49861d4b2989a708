"""The cluster that this service runs on, as the planner sees it."""

from __future__ import annotations

from api.control import ControlPlane
from service.machines import BadCalibration, this_node
from service.planner.hardware import Cluster, CpuNode
from service.planner.request import CurrentCluster, cluster_of_nodes
from workers.paths import Paths
from workers.spec.problems import Problem, SpecError


def cpu_node(control: ControlPlane) -> CpuNode:
    """A node of it without GPUs: like the one that the service runs on. Raises SpecError."""
    try:
        return this_node(Paths.of(control.home).machines)
    except BadCalibration as error:
        raise SpecError([Problem("cluster", str(error))]) from error


def current_cluster(control: ControlPlane) -> CurrentCluster:
    """What gives it. Raises ClusterUnavailable, SpecError."""

    def cluster(accelerator: str | None) -> Cluster:
        return cluster_of_nodes(control.cluster()["nodes"], accelerator, cpu_node(control))

    return cluster
