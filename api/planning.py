"""The cluster that this service runs on, as the planner sees it."""

from __future__ import annotations

import os

from api.control import ControlPlane
from service.planner.hardware import Cluster
from service.planner.request import CurrentCluster, cluster_of_nodes


def current_cluster(control: ControlPlane) -> CurrentCluster:
    """What gives it. Raises ClusterUnavailable, SpecError."""

    def cluster(accelerator: str | None) -> Cluster:
        cores = os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cluster_of_nodes(control.cluster()["nodes"], accelerator, cores, memory)

    return cluster
