"""What is best with fewer GPUs is what a search for them finds; what an elastic job goes on in is what it may."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manta.service.planner.hardware import Cluster, machine_of
from manta.service.planner.mixed_search import best_layouts
from manta.service.planner.request import together
from manta.service.planner.search import search
from manta.service.planner.sizes import best_by_nodes, best_by_size, elastic_sizes
from manta.service.planner.software import MANTA
from manta.workers.config import ElasticConfig, JobSpec
from tests.service.support.planned import a100s, job


def small_memory(cluster: Cluster, gibibytes: float) -> Cluster:
    device = replace(cluster.machine.accelerator, memory_bytes=gibibytes * 2**30)
    return replace(cluster, machine=replace(cluster.machine, accelerator=device))


def shape(spec: JobSpec) -> tuple[int, int, int]:
    return spec.layout.tensor, spec.layout.pipeline, spec.layout.data


@pytest.mark.parametrize(("gibibytes", "batch"), [(80, 12), (1.2, 12), (80, 3)])
def test_plan_sizes_give_the_best_layout_for_every_number_of_gpus(gibibytes, batch):
    """A batch of 3 takes longer on 8 GPUs than on 6."""
    spec, cluster = job(4, 1024, 8, train={"global_batch_size": batch}), small_memory(a100s(), gibibytes)
    sizes = best_by_size(spec, cluster, MANTA)
    assert sizes[0].up_to == 8
    for gpus in range(1, 9):
        alone = [search(spec, cluster, limit=1, ranks=ranks).plans for ranks in range(1, gpus + 1)]
        best = min((plans[0].time.seconds for plans in alone if plans), default=None)
        chosen = [each for each in sizes if each.gpus <= gpus <= each.up_to]
        assert [each.plan.time.seconds for each in chosen] == ([] if best is None else [pytest.approx(best)])
        assert all(each.plan.spec.layout.world_size == each.gpus for each in chosen)
    if gibibytes < 2:
        assert sizes[-1].gpus > 1


def test_large_cluster_plan_sizes_lose_whole_nodes():
    spec, cluster = job(64, 8192, 64, train={"global_batch_size": 256}), a100s(16)
    sizes = best_by_size(spec, cluster, MANTA)
    assert [each.up_to for each in sizes[:4]] == [128, 120, 112, 96]
    assert sizes[1].plan.time.seconds == search(spec, replace(cluster, nodes=15), limit=1).plans[0].time.seconds
    assert [each.plan.time.seconds for each in sizes] == sorted(each.plan.time.seconds for each in sizes)


def test_plan_sizes_over_unequal_nodes_lose_nodes_of_each_kind_separately():
    parts = [Cluster(machine_of("a100-80gb"), 2, 4), Cluster(machine_of("v100-32gb"), 4, 2)]
    cluster, spec = together(parts), job(6, 4096, 32, train={"global_batch_size": 16})
    sizes = best_by_nodes(spec, cluster)
    assert [(each.nodes, each.up_to) for each in sizes] == [
        ({"A100": 2, "V100": 4}, 16),
        ({"A100": 1, "V100": 4}, 12),
        ({"V100": 4}, 8),
        ({"A100": 2, "V100": 3}, 14),
        ({"A100": 2, "V100": 2}, 12),
        ({"A100": 2}, 8),
    ]
    for each in sizes:
        best = best_layouts(spec, each.cluster, limit=1).plans[0]
        assert each.plan.time.seconds == pytest.approx(best.time.seconds, rel=1e-3)
        assert each.to_json()["fits"] and each.gpus <= each.up_to


def test_elastic_plan_sizes_shrink_replicas_first_and_then_shapes():
    elastic = {"min_data": 2, "max_data": 3, "reshape": True}
    spec = job(4, tensor=2, pipeline=2, data=2, train={"global_batch_size": 12})
    spec = spec.model_copy(update={"elastic": ElasticConfig(**elastic)})
    sizes = elastic_sizes(spec, a100s(2))
    assert [(each.gpus, each.up_to, shape(each.plan.spec)) for each in sizes] == [
        (12, 12, (2, 2, 3)),
        (8, 11, (2, 2, 2)),
        (6, 7, (2, 1, 3)),
        (4, 5, (2, 1, 2)),
        (3, 3, (1, 1, 3)),
        (2, 2, (1, 1, 2)),
    ]


def test_fixed_size_job_has_a_single_plan_size():
    spec = job(4, tensor=2, data=2)
    (only,) = elastic_sizes(spec, a100s())
    assert (only.gpus, only.up_to) == (4, 4)
    (none,) = elastic_sizes(spec, small_memory(a100s(), 1e-9))
    assert (only.to_json()["fits"], none.to_json()["fits"]) == (True, False)
