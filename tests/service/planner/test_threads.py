"""Ranks that compute with several threads: as many as the job will really have, and what they gain."""

import pytest

from manta.service.planner.hardware import ASSUMED_CORE, Cluster, CpuNode, with_threads
from manta.service.planner.search import search
from manta.service.planner.software import engine_on
from manta.service.planner.step_time import StepModel, threads_in
from manta.workers.config import ElasticConfig, ResourcesConfig
from tests.service.support.planned import a100s, job


def cores(count, slots=8):
    return Cluster(CpuNode(count, 2.0**36).machine(slots), 1, slots)


def seconds(spec, cluster):
    return StepModel(spec, cluster, engine_on(cluster.machine)).time().seconds


def small(threads="auto", elastic=None, **layout):
    spec = job(2, 256, 4, model={"sequence_length": 128}, train={"global_batch_size": 8, "precision": "fp32"}, **layout)
    more = {"resources": ResourcesConfig(threads=threads), "elastic": ElasticConfig(**(elastic or {}))}
    return spec.model_copy(update=more)


def test_planned_threads_per_rank_share_the_cores():
    assert [threads_in(small(data=data), cores(8)) for data in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert threads_in(small(data=2, elastic={"max_data": 4}), cores(8)) == 2
    assert threads_in(small(threads=3), cores(8)) == 3
    assert threads_in(small(), a100s()) == 1
    assert threads_in(small(data=8), cores(8, slots=4)) == 2


def test_threads_make_a_step_faster_and_never_by_more_than_their_number():
    one, two, eight = (seconds(small(threads=count), cores(8)) for count in (1, 2, 8))
    assert one / 2 < two < one
    assert one / 8 < eight < two


def test_planned_step_on_tiny_tensors_is_slower_with_8_threads_than_with_one():
    tiny = job(1, 32, 2, model={"sequence_length": 8, "vocabulary_size": 64}, train={"global_batch_size": 1})
    one, eight = (
        seconds(tiny.model_copy(update={"resources": ResourcesConfig(threads=count)}), cores(8)) for count in (1, 8)
    )
    assert eight > one


def test_threads_beyond_the_cores_do_not_speed_up_a_step():
    assert seconds(small(threads=4), cores(2)) > 0.99 * seconds(small(threads=2), cores(2))


def test_search_times_each_layout_with_its_own_number_of_threads():
    spec = small().model_copy(update={"parallel": "auto"})
    for plan in search(spec, cores(4), engine_on(cores(4).machine), limit=3).plans:
        assert plan.time.seconds == pytest.approx(seconds(plan.spec, cores(4)))


def test_planned_threads_leave_gpu_clusters_unchanged():
    assert with_threads(a100s(), 4) == a100s()
    cluster = cores(4)
    assert with_threads(cluster, 1) == cluster
    assert with_threads(cluster, 2).machine.core == ASSUMED_CORE
