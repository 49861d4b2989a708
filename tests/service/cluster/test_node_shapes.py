"""Nodes that can be added, and what is asked for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.cluster.node_shapes import (
    Demand,
    InvalidNodeShapes,
    NodeShape,
    capacity_after_placing,
    grown,
    shapes_in,
)
from manta.service.cluster.placement import Capacity, missing
from manta.workers.config import ParallelConfig

SLOTS = "manta_slot"


def capacity(*nodes):
    """Of nodes with (total, free) slots."""
    named = {f"n{number}": node for number, node in enumerate(nodes)}
    return Capacity(SLOTS, sum(total for total, _ in nodes), sum(free for _, free in nodes), named)


def layout(tensor=1, pipeline=1, data=1):
    return ParallelConfig(tensor=tensor, pipeline=pipeline, data=data)


def test_node_shapes_of_slots_and_gpus_are_parsed():
    assert shapes_in("workers=4x8 slots, gpu-group = 2 x 8 GPUs") == (
        NodeShape("workers", 4, "manta_slot", 8),
        NodeShape("gpu-group", 2, "GPU", 8),
    )


@pytest.mark.parametrize(
    "text", ["", "workers", "workers=4", "workers=4x8", "w=4x0 slots", "w=4x8 cpus", "w=1x1 slot,"]
)
def test_invalid_node_shapes_are_refused_with_an_example(text):
    with pytest.raises(InvalidNodeShapes, match="such as workers=4x8 slots"):
        shapes_in(text)


def test_node_shapes_refuse_a_type_declared_twice():
    with pytest.raises(InvalidNodeShapes, match="w twice"):
        shapes_in("w=1x1 slots, w=2x2 slots")


def test_grown_capacity_adds_the_nodes_that_can_still_come():
    shapes = shapes_in("small=3x2 slots, fast=9x8 gpus")
    most = grown(capacity((2, 0), (16, 4)), shapes, ["small", ""])
    assert (most.total, most.free) == (2 + 16 + 2 * 2, 0 + 4 + 2 * 2)


def test_node_shapes_with_more_nodes_than_declared_add_no_capacity():
    assert grown(capacity((2, 2)), shapes_in("small=1x2 slots"), ["small"] * 3) == capacity((2, 2))


def test_simulated_placement_keeps_each_tensor_group_on_one_node():
    assert capacity_after_placing(capacity((4, 3), (4, 3)), layout(tensor=2, data=3)) is None
    left = capacity_after_placing(capacity((4, 3), (4, 4)), layout(tensor=2, data=3))
    assert left is not None and left.free == 1


layouts = st.builds(layout, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 3))
clusters = st.lists(st.integers(0, 8).map(lambda free: (8, free)), max_size=5).map(lambda nodes: capacity(*nodes))


@given(clusters, layouts)
def test_simulated_placement_succeeds_exactly_if_nothing_is_missing(cluster, job):
    left = capacity_after_placing(cluster, job)
    assert (left is not None) == (missing(job, cluster) is None)
    if left is not None:
        assert left.free == cluster.free - job.world_size
        assert all(free >= 0 for _, free in left.nodes.values())


@given(clusters, st.lists(layouts, max_size=5))
def test_node_demand_is_a_prefix_of_the_queue_that_fits_together(cluster, queue):
    demand = Demand({SLOTS: cluster})
    asked = [demand.add(job, SLOTS) for job in queue]
    assert asked == sorted(asked, reverse=True), "none overtakes one that does not fit"
    units = sum(job.world_size for job, is_asked in zip(queue, asked, strict=True) if is_asked)
    assert sum(bundle[SLOTS] for bundle in demand.bundles) == units <= cluster.free
    assert demand.is_over == (False in asked)


def test_stages_are_counted_on_nodes_of_their_type():
    cluster = replace(capacity((4, 4), (4, 4), (4, 3)), types={"n0": "A100", "n1": "V100", "n2": "V100"})
    typed = ParallelConfig(tensor=2, pipeline=2, data=2, stage_accelerators=("A100", "V100"))
    left = capacity_after_placing(cluster, typed)
    assert left is not None and left.nodes == {"n0": (4, 0), "n1": (4, 2), "n2": (4, 1)} and left.types == cluster.types
    assert capacity_after_placing(cluster, typed.model_copy(update={"data": 3})) is None, (
        "two groups on A100, and no third"
    )
    demand = Demand({SLOTS: cluster})
    assert demand.add(typed, SLOTS)
    assert demand.bundles == [{SLOTS: 2.0, f"accelerator_type:{type}": 0.001} for type in ("A100",) * 2 + ("V100",) * 2]
