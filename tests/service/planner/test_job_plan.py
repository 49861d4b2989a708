"""What is planned of a job where it runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from manta.service.planner.hardware import ASSUMED_CORE, MACHINES, Cluster, CpuNode, Gpu, Links, Refined, measured
from manta.service.planner.job_plan import NotPlanned, RankNode, cluster_from_json, cluster_of, cluster_to_json, planned
from manta.service.planner.refinement import movable, with_constants
from manta.workers.spec.problems import SpecError
from tests.service.support.planned import a100s, job

NODE = CpuNode(8, 2.0**34)


def test_the_parts_of_a_planned_step_are_the_step():
    spec = job(tensor=2, pipeline=2, data=2)
    plan = planned(spec, a100s())
    assert sum(part["seconds"] for part in plan["parts"]) == pytest.approx(plan["step_seconds"])
    assert sum(part["fraction"] for part in plan["parts"]) == pytest.approx(1)
    assert plan["memory_bytes"]["total"] > plan["memory_bytes"]["parameters"] > 0
    assert (plan["assumed"], plan["has_gpus"]) == (False, True)
    assert json.loads(json.dumps(plan)) == plan


def test_planned_cpu_ranks_share_the_cores_of_their_nodes():
    two = cluster_of([RankNode(4, 2, has_gpus=False), RankNode(3, 4, has_gpus=False)], NODE)
    assert (two.nodes, two.gpus_per_node, two.machine.cores, two.machine.has_gpus) == (2, 4, 2, False)
    assert cluster_of([RankNode(1, 0, has_gpus=False)], NODE).machine.cores == 8
    assert cluster_of([RankNode(3, 4, has_gpus=False), RankNode(4, 2, has_gpus=False)], NODE).gpus_per_node == 4
    plan = planned(job(tensor=2, data=4), two)
    assert (plan["assumed"], plan["has_gpus"]) == (True, False)


def test_job_plan_uses_the_gpu_type_that_ray_knows():
    cluster = cluster_of([RankNode(8, 0, True, "A100", 80 * 2**30)] * 2, NODE)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.machine.accelerator.name) == (2, 8, "a100-80gb")
    with pytest.raises(SpecError, match="Ray does not know"):
        cluster_of([RankNode(8, 0, True)], NODE)


def test_job_plan_of_a_pipeline_over_unequal_nodes_uses_its_stage_types():
    cluster = cluster_of([RankNode(4, 0, True, "A100", 80 * 2**30), RankNode(4, 0, True, "V100", 32 * 2**30)], NODE)
    layout = {"tensor": 2, "pipeline": 2, "data": 2}
    apart = planned(job(8, 4096, 32, **layout, stage_layers=(6, 2), stage_accelerators=("A100", "V100")), cluster)
    even = planned(job(8, 4096, 32, **layout, stage_layers=(4, 4), stage_accelerators=("A100", "V100")), cluster)
    assert apart["step_seconds"] < even["step_seconds"]
    assert [part["type"] for part in (apart["cluster"], *apart["cluster"]["others"])] == ["A100", "V100"]
    with pytest.raises(NotPlanned, match="no node has GPUs of type H100; there are A100, V100"):
        planned(job(8, 4096, 32, **layout, stage_accelerators=("A100", "H100")), cluster)


def test_job_on_gpus_of_an_unknown_type_is_not_planned():
    with pytest.raises(SpecError, match="some of its ranks are on GPUs of type T4, for which no plans can be made"):
        cluster_of([RankNode(4, 0, True, "A100", 80 * 2**30), RankNode(4, 0, True, "T4", 16 * 2**30)], NODE)


def test_job_plan_uses_calibrated_gpus():
    gpu = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
    known = {"h100-80gb": measured(MACHINES["h100-80gb"], gpu, Links(3.6e11, 3e-6))}
    calibrated = cluster_of([RankNode(1, 0, True, "H100", 80 * 2**30)], NODE, known)
    assert calibrated.machine is known["h100-80gb"] and not planned(job(), calibrated)["assumed"]
    other = cluster_of([RankNode(1, 0, True, "A100", 80 * 2**30)], NODE, known)
    assert other.machine.gpu is None


def test_job_with_a_custom_model_is_not_planned():
    spec = job()
    own = spec.model.model_copy(update={"family": "custom"})
    with pytest.raises(NotPlanned, match="custom model"):
        planned(spec.model_copy(update={"model": own}), a100s())


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
