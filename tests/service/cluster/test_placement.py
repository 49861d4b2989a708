"""Layouts to bundles and ranks to bundles, and what is said about a layout that does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.cluster.placement import (
    Capacity,
    agent_name,
    anywhere_but,
    avoidable,
    job_of,
    missing,
    placement_group_name,
    replica_bundles,
    replica_of,
    seats_of,
    unit_of,
    without,
)
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig


def capacity(*free, total=8):
    nodes = {f"node{index}": (total, units) for index, units in enumerate(free)}
    return Capacity("manta_slot", total * len(free), sum(free), nodes)


def test_placement_has_a_group_per_replica_and_a_bundle_per_tensor_group():
    layout = ParallelConfig(tensor=2, pipeline=3, data=2)
    assert replica_bundles(layout, "GPU") == [[{"GPU": 2.0}] * 3] * 2


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
def test_placement_bundle_holds_exactly_one_tensor_group_of_its_replica(tensor, pipeline, data, context):
    layout = ParallelConfig(tensor=tensor, pipeline=pipeline, data=data, context=context)
    assert missing(layout, capacity(0)).needed == layout.world_size, "a unit for each rank"
    bundles = replica_bundles(layout, "manta_slot")
    held: dict[tuple[int, int], list[int]] = {}
    groups = [str(replica) for replica in range(data)]
    for rank, seat in seats_of(layout, groups).items():
        held.setdefault((int(seat.group), seat.bundle), []).append(rank)
        assert replica_of(layout, rank) == int(seat.group)
    assert sorted(held) == [(replica, index) for replica, group in enumerate(bundles) for index in range(len(group))]
    grid = RankGrid(layout)
    for (replica, index), ranks in held.items():
        assert len(ranks) == bundles[replica][index]["manta_slot"]
        assert ranks == grid.group("tensor", ranks[0])


GPUS = Capacity("GPU", 4, 1, {"node0": (4, 1)})


@pytest.mark.parametrize(("parallel", "units", "shortage", "sentence"), [
    ({"tensor": 2, "data": 4}, capacity(8), None, None),
    ({"tensor": 2, "data": 3}, capacity(3, 5), None, None),
    ({"tensor": 2, "pipeline": 2, "data": 2}, capacity(5), (8, 4, 8),
     "needs 8 slots in groups of 2 on one node; 5 of 8 are free"),
    ({}, capacity(0), (1, 0, 8), "needs 1 slot; 0 of 8 are free"),
    ({"tensor": 2, "data": 2}, capacity(3, 1), (4, 2, 16),
     "needs 4 slots in groups of 2 on one node; 4 of 16 are free, but only 2 in such groups"),
    ({"tensor": 4}, capacity(3, 3, 2, total=3), (4, 0, 0), "needs 4 slots in groups of 4 on one node"),
    ({"data": 2}, GPUS, (2, 1, 4), "needs 2 GPUs; 1 of 4 is free"),  # of groups of one nothing is said
])  # fmt: skip
def test_layout_that_does_not_fit_the_free_units_reports_the_shortage(parallel, units, shortage, sentence):
    lacks = missing(ParallelConfig(**parallel), units)
    assert (lacks and (lacks.needed, lacks.available, lacks.possible)) == shortage
    assert lacks is None or str(lacks).startswith(sentence)


@pytest.mark.parametrize(
    ("accelerator", "gpus", "unit"),
    [("auto", True, "GPU"), ("auto", False, "manta_slot"), ("gpu", False, "GPU"), ("cpu", True, "manta_slot")],
)
def test_placement_unit_follows_the_accelerator_and_whether_there_are_gpus(accelerator, gpus, unit):
    assert unit_of(accelerator, gpus) == unit


def test_names_tell_their_job_and_differ():
    names = {placement_group_name("a", 1, 1), agent_name("a", 1, 1), agent_name("a", 11, 1), agent_name("a-1", 1, 1)}
    assert len(names) == 4
    assert {job_of(name) for name in names} == {"a", "a-1"}
    assert job_of("node-abc") is None
    assert job_of("other/a/1/1") is None, "four parts do not make it one of ours"


def test_placement_avoids_nodes_only_if_the_others_can_hold_the_layout():
    layout = ParallelConfig(tensor=2, data=4)
    assert avoidable(layout, capacity(8, 0), {"node0"}) == {"node0"}, "the other one will be free some day"
    assert avoidable(layout, capacity(8, 8), {"node0", "node1"}) == set()
    assert avoidable(ParallelConfig(tensor=2, data=5), capacity(8, 8), {"node0"}) == set()
    assert avoidable(layout, capacity(8, 8), {"gone"}) == set()


def test_capacity_without_a_node_is_that_of_the_other_nodes():
    rest = without(capacity(3, 5, 1), {"node0"})
    assert rest == Capacity("manta_slot", 16, 6, {"node1": (8, 5), "node2": (8, 1)})


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.sets(st.integers(0, 5)), st.integers(1, 4))
def test_avoided_nodes_never_make_a_placeable_layout_unplaceable(free, avoided, data):
    layout, cluster = ParallelConfig(tensor=2, data=data), capacity(*free)
    kept = without(cluster, avoidable(layout, cluster, {f"node{index}" for index in avoided}))
    before, after = missing(layout, cluster), missing(layout, kept)
    if before is None or before.possible >= before.needed:
        assert after is None or after.possible >= after.needed


def test_node_selector_excludes_nodes_in_rays_label_syntax():
    assert anywhere_but({"b", "a"}) == {"ray.io/node-id": "!in(a,b)"}
    assert anywhere_but(()) == {}


TYPED = ParallelConfig(tensor=2, pipeline=3, data=2, stage_accelerators=("A100", "A100", "V100"))
MIXED = Capacity("GPU", 24, 16, {"a": (8, 8), "b": (8, 4), "c": (4, 2), "d": (4, 2)}, {"a": "A100", "b": "V100"})


def test_stages_take_nodes_of_their_own_type():
    a, v = ({"GPU": 2.0, f"accelerator_type:{name}": 0.001} for name in ("A100", "V100"))
    assert replica_bundles(TYPED, "GPU") == [[a, a, v]] * 2
    assert missing(TYPED, MIXED) is None


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"data": 3}, "needs 12 GPUs on nodes with A100 in groups of 2 on one node; the cluster has 8"),
        ({"stage_accelerators": ("A100", "V100", "V100")}, "needs 8 GPUs on nodes with V100 in groups of 2 on one "
         "node; 4 of 8 are free"),
        ({"stage_accelerators": ("A100", "A100", "H100")}, "needs 4 GPUs on nodes with H100 in groups of 2 on one "
         "node; the cluster has 0"),
    ],
)  # fmt: skip
def test_units_on_nodes_of_another_type_do_not_count_for_typed_stages(changed, sentence):
    assert str(missing(TYPED.model_copy(update=changed), MIXED)) == sentence
    assert missing(TYPED.model_copy(update={"stage_accelerators": None, "data": 2}), MIXED) is None
