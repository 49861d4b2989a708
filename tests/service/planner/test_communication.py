"""Where ranks are decides how fast they exchange tensors."""

from __future__ import annotations

import dataclasses

import pytest

from manta.service.planner.communication import (
    Group,
    bus_bandwidth,
    gather_seconds,
    groups_of,
    message_seconds,
    reduce_seconds,
)
from manta.service.planner.hardware import ASSUMED_CORE, Cluster, cpu_machine
from manta.service.planner.software import MANTA, MEGATRON_2021
from manta.workers.config import ParallelConfig
from tests.service.support.planned import a100s

GB = 1e9


def layout(tensor: int = 1, pipeline: int = 1, data: int = 1) -> ParallelConfig:
    return ParallelConfig(tensor=tensor, pipeline=pipeline, data=data)


@pytest.mark.parametrize(
    ("sizes", "software", "tensor", "data"),
    [
        ((8, 2, 4), MEGATRON_2021, (1, 8), (4, 1)),
        ((2, 2, 8), MEGATRON_2021, (1, 2), (2, 4)),
        ((2, 2, 8), MANTA, (1, 2), (4, 2)),  # whole replicas follow one another: two on a node
        ((16, 1, 4), MEGATRON_2021, (2, 8), (4, 1)),
        ((1, 2, 32), MEGATRON_2021, (1, 1), (4, 8)),
    ],
)
def test_communication_groups_span_the_nodes_their_rank_order_gives(sizes, software, tensor, data):
    groups = groups_of(layout(*sizes), a100s(8), software)
    assert (groups.tensor.nodes, groups.tensor.per_node) == tensor
    assert (groups.holders.nodes, groups.holders.per_node) == data


def test_neighbouring_pipeline_stages_share_a_node_if_they_fit():
    groups = groups_of(layout(4, 4, 1), a100s(2), MEGATRON_2021)
    assert [groups.stages_share_node(stage, stage + 1) for stage in range(3)] == [True, False, True]
    groups = groups_of(layout(4, 4, 2), a100s(4), MEGATRON_2021)
    assert not any(groups.stages_share_node(stage, stage + 1) for stage in range(3))
    groups = groups_of(layout(16, 2), a100s(4), MEGATRON_2021)
    assert not groups.stages_share_node(0, 1)


def test_stages_share_a_node_only_if_whole_tensor_groups_fit():
    groups = groups_of(layout(4, 3), Cluster(a100s().machine, 3, 6), MANTA)
    assert not groups.stages_share_node(0, 1) and not groups.stages_share_node(1, 2)
    groups = groups_of(layout(2, 4), Cluster(a100s().machine, 2, 5), MANTA)
    assert [groups.stages_share_node(stage, stage + 1) for stage in range(3)] == [True, False, True]


def test_rings_across_nodes_share_the_adapters():
    cluster = a100s(8)
    constants = cluster.machine.constants
    assert bus_bandwidth(Group(8, 8), cluster) == pytest.approx(300 * GB * constants.inside)
    assert bus_bandwidth(Group(8, 1), cluster) == pytest.approx(25 * GB * constants.collective)
    assert bus_bandwidth(Group(16, 4), cluster) == pytest.approx(100 * GB * constants.collective)
    assert bus_bandwidth(Group(16, 8), cluster) == pytest.approx(200 * GB * constants.message)


@pytest.mark.parametrize(
    ("sizes", "software", "nodes", "gigabytes"),
    [
        ((2, 1, 32), MEGATRON_2021, 8, 4 * 16 / 2),  # a ring for each member; two groups share a NUMA node's way out
        ((4, 1, 16), MEGATRON_2021, 8, 2 * 16 / 2),
        ((4, 2, 4), MEGATRON_2021, 4, 2 * 16 / 2),
        ((8, 1, 8), MEGATRON_2021, 8, None),  # alone on its node, beside an adapter
        ((1, 1, 16), MEGATRON_2021, 2, None),  # pairs, both beside their adapters
        ((4, 1, 2), MEGATRON_2021, 1, None),  # on one node
        ((2, 1, 32), MANTA, 8, None),  # goes over the node's links to whoever is beside the adapter
    ],
)
def test_data_rings_without_a_gpu_pair_per_adapter_go_through_the_hosts(sizes, software, nodes, gigabytes):
    cluster = a100s(nodes)
    data = groups_of(layout(*sizes), cluster, software).holders
    assert data.through_hosts == (gigabytes is not None)
    if gigabytes is not None:
        assert bus_bandwidth(data, cluster) == pytest.approx(gigabytes * GB)
        elsewhere = dataclasses.replace(cluster.machine, numa_nodes=0)
        other = dataclasses.replace(cluster, machine=elsewhere)
        assert not groups_of(layout(*sizes), other, software).holders.through_hosts


def test_a_reduction_moves_its_tensor_twice_and_a_lone_rank_nothing():
    cluster, size = a100s(), 1e9
    once = 7 / 8 * size / bus_bandwidth(Group(8, 8), cluster)
    assert gather_seconds(Group(8, 8), cluster, size) == pytest.approx(once, rel=0.01)
    assert reduce_seconds(Group(8, 8), cluster, size) == pytest.approx(2 * once, rel=0.01)
    assert reduce_seconds(Group(1, 1), cluster, size) == gather_seconds(Group(1, 1), cluster, size) == 0


def test_two_devices_on_one_adapter_get_half_its_bandwidth():
    cluster = a100s(2)
    halved = dataclasses.replace(cluster, machine=dataclasses.replace(cluster.machine, adapters=4))
    assert message_seconds(halved, 1e9, False) == pytest.approx(2 * message_seconds(cluster, 1e9, False), rel=0.01)
    assert message_seconds(cluster, 1e9, True) < message_seconds(cluster, 1e9, False) / 10


def test_communication_between_cpu_ranks_goes_directly_between_pairs():
    """Each rank sends its part to all others and receives theirs; two that sum up exchange all they have."""
    core = dataclasses.replace(ASSUMED_CORE, message_seconds=1.0, link=100.0)
    cluster = Cluster(cpu_machine(4, 4, 1e9, core), 1, 4)
    assert message_seconds(cluster, 100.0, True) == pytest.approx(2.0)
    assert gather_seconds(Group(4, 4), cluster, 400.0) == pytest.approx(2 * 3 * 2.0)
    assert reduce_seconds(Group(4, 4), cluster, 400.0) == pytest.approx(2 * 2 * 3 * 2.0)
    assert reduce_seconds(Group(2, 2), cluster, 400.0) == pytest.approx(2 * 5.0)
    assert gather_seconds(Group(1, 1), cluster, 400.0) == 0.0
