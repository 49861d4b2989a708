"""A cluster that was kept with a plan is the same again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from manta.service.planner.hardware import ASSUMED_CORE, MACHINES, Cluster, CpuNode, Gpu, Links, Refined, measured
from manta.service.planner.job_plan import cluster_from_json, cluster_to_json
from manta.service.planner.refinement import movable, with_constants

GPU = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
CORE = replace(ASSUMED_CORE, memory=3e10)


def refined(machine, **values):
    """As jobs have refined it."""
    return replace(with_constants(machine, values), refined=Refined(4, tuple(movable(machine).items())))


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(MACHINES["a100-40gb"], 3, 6),
        Cluster(measured(MACHINES["h100-80gb"], GPU), 2, 8),
        Cluster(measured(MACHINES["h100-80gb"], GPU, Links(3.6e11, 3e-6, 0.1)), 2, 8),
        Cluster(CpuNode(6, 2.0**34, CORE).machine(4), 2, 4),
        Cluster(MACHINES["a100-40gb"], 3, 6, "A100", (Cluster(measured(MACHINES["h100-80gb"], GPU), 2, 8, "H100"),)),
        Cluster(refined(MACHINES["a100-40gb"], product=0.5, inside=0.3), 3, 6),
        Cluster(refined(measured(MACHINES["h100-80gb"], GPU), skew_seconds=3e-4), 2, 8),
        Cluster(refined(CpuNode(6, 2.0**34).machine(4), memory=4e10, link=1e9), 2, 4),
    ],
)
def test_cluster_record_survives_json(cluster):
    assert cluster_from_json(json.loads(json.dumps(cluster_to_json(cluster)))) == cluster


def test_cluster_record_without_measured_links_is_readable():
    cluster = Cluster(measured(MACHINES["h100-80gb"], GPU), 2, 8)
    document = cluster_to_json(cluster)
    del document["links"]
    assert cluster_from_json(document) == cluster


def test_cluster_record_of_another_release_is_refused():
    with pytest.raises(KeyError):
        cluster_from_json({"nodes": 1, "gpus_per_node": 1})
