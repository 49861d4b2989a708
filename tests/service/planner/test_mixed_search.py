"""A pipeline over nodes of several kinds: layers go by how fast each stage is and what it holds, and no other layout
that could be placed there is faster."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from manta.service.planner import mixed_search
from manta.service.planner.beside_steps import beside_steps
from manta.service.planner.candidates import rank_totals, schedules
from manta.service.planner.explain import what_ifs
from manta.service.planner.hardware import Cluster, Gpu, UnknownMachine, machine_of, measured, parts_of
from manta.service.planner.memory import fits, memory_of, tightest, usable_bytes
from manta.service.planner.mixed_search import best_layouts
from manta.service.planner.request import together
from manta.service.planner.search import evaluate, plan_of, search
from manta.service.planner.sizes import elastic_sizes
from manta.service.planner.software import MANTA
from manta.service.planner.step_time import MixedStepModel, StepModel, step_model
from manta.workers.accounting.flops import rank_parameters
from manta.workers.config import ElasticConfig, JobSpec
from manta.workers.spec.divisors import divisors
from manta.workers.spec.rules import find_problems
from tests.service.support.planned import job

WITHIN = 1.02
GPU = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)


def nodes(name: str, count: int, gpus: int, memory: float | None = None) -> Cluster:
    machine = machine_of(name)
    if memory is not None:
        machine = replace(machine, accelerator=replace(machine.accelerator, memory_bytes=memory))
    return Cluster(machine, count, gpus)


def placed(spec: JobSpec, **layout: object) -> JobSpec:
    return spec.model_copy(update={"parallel": spec.layout.model_copy(update=layout)})


def lone_nodes(name: str) -> Cluster:
    return nodes(name, 1, 8)


MIXED = together([nodes("v100-32gb", 1, 4), nodes("a100-80gb", 1, 4)])
BASE = job(12, 4096, 32, train={"global_batch_size": 32, "validate_every": 5})
OVER_BOTH = placed(
    BASE, pipeline=4, tensor=2, data=1, stage_accelerators=("A100", "A100", "V100", "V100"), stage_layers=(4, 4, 2, 2)
)


def test_mixed_search_over_one_kind_equals_the_plain_search():
    alone = nodes("a100-80gb", 2, 4)
    assert together([alone]) is alone
    assert best_layouts(BASE, alone) == search(BASE, alone)


@pytest.mark.parametrize(
    ("stages", "frozen", "layers"),
    [
        (4, (), None),
        (2, (), None),
        (4, ("embedding",), (5, 3, 2, 2)),
        (4, ("embedding", "layers.0-4"), (5, 3, 2, 2)),
        (4, ("embedding", "layers.0-4"), (2, 2, 3, 5)),
    ],
)
@pytest.mark.parametrize("was_measured", [False, True])
def test_step_over_two_groups_of_equal_nodes_equals_one_cluster_of_them(stages, frozen, layers, was_measured):
    machine = measured(machine_of("h100-80gb"), GPU) if was_measured else machine_of("h100-80gb")
    twins = together([Cluster(machine, stages // 2, 2, name) for name in ("one", "two")])
    base = BASE.model_copy(update={"train": BASE.train.model_copy(update={"frozen": frozen})})
    one = placed(base, pipeline=stages, tensor=2, data=1, stage_layers=layers)
    same = step_model(one, Cluster(machine, stages, 2))
    over = step_model(placed(one, stage_accelerators=("one",) * (stages // 2) + ("two",) * (stages // 2)), twins)
    assert isinstance(over, MixedStepModel)
    assert over.time() == same.time()
    assert beside_steps(over, over.time()) == beside_steps(same, same.time())


def test_every_stage_takes_the_time_of_its_own_nodes():
    model = step_model(OVER_BOTH, MIXED)
    times = model.pipeline().times
    alone = {
        name: step_model(placed(BASE, pipeline=4, tensor=2, data=1, stage_layers=(4, 4, 2, 2)), nodes(name, 2, 4))
        for name in ("a100-80gb", "v100-32gb")
    }
    assert times[:2] == alone["a100-80gb"].pipeline().times[:2]
    assert times[2:] == alone["v100-32gb"].pipeline().times[2:]
    assert times[2].forward > 1.5 * times[1].forward * 2 / 4
    messages = model.pipeline().messages
    assert messages[0] < messages[1] and messages[2] < messages[1], "between the kinds there is a network"
    assert (
        messages[1] == alone["v100-32gb"].message_to(same_node=False) > alone["a100-80gb"].message_to(same_node=False)
    )
    other_way_round = placed(OVER_BOTH, stage_accelerators=("V100", "V100", "A100", "A100"))
    assert model.tied_seconds() == step_model(other_way_round, MIXED).tied_seconds() > 0.0, (
        "it waits for the slower end"
    )


def test_end_of_a_step_over_mixed_nodes_takes_as_long_as_its_slowest_kind():
    """Of each kind the rank that has most parameters, and replicas where its stages alone would have them."""
    spec = placed(OVER_BOTH, tensor=1, data=2, stage_layers=(2, 6, 1, 3), gather="after_step")
    model, most = step_model(spec, MIXED), rank_parameters(spec)
    kinds = [(0, MIXED, max(most[:2])), (3, MIXED.others[0], max(most[2:]))]
    alone = [StepModel(placed(spec, pipeline=2, stage_layers=None), replace(part, others=()), MANTA, None, (count, 0))
             for _, part, count in kinds]  # fmt: skip
    for (index, _, count), own in zip(kinds, alone, strict=True):
        assert model.part_of(index).parameters == count and model.part_of(index).groups == own.groups
    assert model.optimizer_seconds() == max(each.optimizer_seconds() for each in alone)
    assert model.gradient_seconds(0.0) == max(each.gradient_seconds(0.0) for each in alone)
    assert model.optimizer_seconds() > min(each.optimizer_seconds() for each in alone)
    assert model.gradient_seconds(0.0) > min(each.gradient_seconds(0.0) for each in alone)
    assert model.cluster.type == "V100", "which casts last"


def test_message_to_a_non_adjacent_stage_of_the_same_kind_crosses_nodes():
    chunks = {"pipeline": 3, "tensor": 1, "virtual_stages": 2, "schedule": "interleaved", "stage_layers": (2,) * 6}
    model = step_model(placed(OVER_BOTH, **chunks, stage_accelerators=("A100", "V100", "A100")), MIXED)
    assert model.message(2) == model.part_of(0).message_to(same_node=False)
    back = {"pipeline": 4, "schedule": "zb-v", "virtual_stages": 2, "stage_layers": (2, 2, 2, 2, 1, 1, 1, 1)}
    assert step_model(placed(OVER_BOTH, **back), MIXED).tied_seconds() == 0.0, "both ends are on one rank"


def test_mixed_search_tries_all_sizes_on_small_clusters_and_few_on_large_ones():
    """Small clusters: all; large ones: all replicas that divide the batch, and all or half of a kind's nodes."""
    assert mixed_search._stage_counts(5, True) == [1, 2, 3, 4, 5] and mixed_search._stage_counts(5, False) == [2, 5]
    assert mixed_search._stage_counts(1, False) == [1]
    assert mixed_search._data_sizes(1, 5, 12, True) == mixed_search._data_sizes(1, 5, 12, False) == [1, 2, 3, 4, 5]
    assert mixed_search._data_sizes(2, 7, 12, False) == [2, 3, 4, 6, 7]
    assert mixed_search._data_sizes(6, 5, 12, False) == mixed_search._data_sizes(6, 5, 12, True) == []
    parts = [nodes("v100-32gb", 1, 2), nodes("a100-80gb", 1, 2), nodes("h100-80gb", 1, 2)]
    frames = {(each.order, each.stages, each.tensor, each.data) for each in mixed_search._frames(job(3), parts)}
    assert ((2, 0, 1), (1, 1, 1), 1, 1) in frames and ((2, 0, 1), (2, 1, 1), 1, 1) not in frames, "three layers"
    assert {((0, 1), (1, 1), 1, 2), ((1, 0), (1, 1), 2, 1)} <= frames
    for order, stages, tensor, data in frames:
        assert all(count * data * tensor <= parts[part].gpus for part, count in zip(order, stages, strict=True))


@pytest.mark.parametrize(
    ("train", "elastic", "sizes"),
    [
        ({}, {"min_data": 3, "max_data": 3}, {3}),
        ({"batch_ramp": {"start": 3, "increment": 1, "samples": 100}}, {}, {1, 2, 3}),
        ({"deterministic": "elastic", "micro_batch_size": 13}, {}, {1, 2, 4, 5}),
        ({"cuda_graphs": True}, {}, set()),
    ],
)
def test_mixed_search_on_large_clusters_tries_only_allowed_replica_counts(train, elastic, sizes):
    spec = job(70, train={"global_batch_size": 64, **train}).model_copy(update={"elastic": ElasticConfig(**elastic)})
    parts = [nodes("h100-80gb", 2, 8), nodes("a100-80gb", 2, 8)]
    assert not mixed_search._is_complete(spec, parts)
    assert {each.data for each in mixed_search._frames(spec, parts) if each.tensor == 1} == sizes


def test_memory_is_held_against_each_stages_own_device():
    memory, usable = tightest(OVER_BOTH, MIXED)
    assert memory == memory_of(OVER_BOTH, 3, machine_of("v100-32gb")) and usable == usable_bytes(MIXED.others[0])
    small = together([nodes("v100-32gb", 1, 4, 2e9), nodes("a100-80gb", 1, 4)])
    assert not fits(OVER_BOTH, small).fits
    (rejected,) = evaluate(OVER_BOTH, small).rejected
    assert rejected.reason.startswith("does not fit: ") and "than the 1.8 GiB" in rejected.reason


def test_mixed_search_names_node_types_that_do_not_exist():
    (rejected,) = evaluate(placed(OVER_BOTH, stage_accelerators=("A100", "A100", "H100", "H100")), MIXED).rejected
    assert rejected.reason == ("parallel.stage_accelerators: no node has GPUs of type H100; there are A100, V100")
    with pytest.raises(UnknownMachine):
        parts_of(placed(OVER_BOTH, stage_accelerators=("A100", "A100", "H100", "H100")), MIXED)
    (rejected,) = evaluate(placed(OVER_BOTH, stage_accelerators=("A100", "V100", "V100", "V100")), MIXED).rejected
    assert rejected.reason == (
        "needs 6 GPUs in groups of 2 on one node; 1 node with V100 of 4 has room for 2 such groups, not 3"
    )


def test_faster_nodes_get_more_layers_and_the_whole_is_faster_than_either_kind_alone():
    base = job(12, 4096, 32, train={"global_batch_size": 64, "micro_batch_size": 8})
    cluster = together([nodes("v100-32gb", 1, 8), nodes("a100-40gb", 1, 4)])
    best = best_layouts(base, cluster).plans[0]
    layout = best.spec.layout
    assert set(layout.stage_accelerators) == {"A100", "V100"} and not find_problems(best.spec)
    layers = {type: [] for type in ("A100", "V100")}
    totals = rank_totals(layout.stage_layers, layout.pipeline, layout.schedule)
    for type, count in zip(layout.stage_accelerators, totals, strict=True):
        layers[type].append(count)
    assert min(layers["A100"]) > max(layers["V100"])
    for part in cluster.parts:
        assert best.time.seconds < 0.9 * search(base, part).plans[0].time.seconds


def test_mixed_search_leaves_out_nodes_that_bring_no_gain():
    """One weak node more is not worth a stage there; the plan says where it is, so that it is placed there."""
    cluster = together([nodes("h100-80gb", 1, 8), nodes("v100-16gb", 1, 1)])
    best = best_layouts(job(8, 1024, 16, train={"global_batch_size": 64}), cluster).plans[0]
    assert set(best.spec.layout.stage_accelerators) == {"H100"}
    assert evaluate(best.spec, cluster).plans[0].time == best.time


def everything(spec: JobSpec, cluster: Cluster) -> Iterator[JobSpec]:
    """All layouts over both kinds that fit, with every way to share out the layers."""
    batch, layers = spec.train.global_batch_size, spec.model.layers
    for first, second in (cluster.parts, cluster.parts[::-1]):
        for tensor in divisors(spec.model.heads):
            groups = [part.nodes * (part.gpus_per_node // tensor) for part in (first, second)]
            for data in range(1, min(*groups, batch) + 1):
                for ahead, behind in product(*(range(1, count // data + 1) for count in groups)):
                    types = (first.type,) * ahead + (second.type,) * behind
                    stages = ahead + behind
                    shape = {"tensor": tensor, "pipeline": stages, "data": data, "stage_accelerators": types}
                    for micro_batch, (schedule, chunks) in product(
                        divisors(-(-batch // data)), schedules(layers, stages, True, True)
                    ):
                        train = spec.train.model_copy(update={"micro_batch_size": micro_batch})
                        small = spec.model_copy(update={"train": train})
                        shape |= {"schedule": schedule, "virtual_stages": chunks}
                        for counts in _shares(layers, stages * chunks):
                            layout = placed(small, **shape, stage_layers=counts)
                            if not find_problems(layout) and fits(layout, cluster).fits:
                                yield layout


def _shares(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers - stages + 2):
        yield from ((first, *rest) for rest in _shares(layers - first, stages - 1))


def drawn(seed: int) -> tuple[JobSpec, Cluster]:
    draw = random.Random(seed)
    heads = draw.choice([4, 8])
    spec = job(
        draw.randint(3, 6),
        heads * draw.choice([64, 128, 256]),
        heads,
        model={"vocabulary_size": draw.choice([1000, 32000, 100000])},
        train={"global_batch_size": draw.choice([4, 8])},
    )
    kinds = draw.sample(["v100-32gb", "a100-80gb", "h100-80gb", "l40s-48gb"], 2)
    memory = draw.choice([None, 2e9, 4e9])
    return spec, together([nodes(name, 1, draw.choice([1, 2]), memory) for name in kinds])


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 40))])
def test_mixed_search_finds_layouts_close_to_the_best_of_all(seed):
    spec, cluster = drawn(seed)
    everywhere = [plan_of(each, cluster).time.seconds for each in everything(spec, cluster)]
    plans = best_layouts(spec, cluster).plans
    for plan in plans:
        (again,) = evaluate(plan.spec, cluster).plans
        assert again.time == plan.time, "it finds room, and takes what it is told to"
    assert list(plans) == sorted(plans, key=lambda each: each.time.seconds)
    if everywhere:
        assert plans[0].time.seconds <= WITHIN * min(everywhere)


@pytest.mark.parametrize(
    ("seed", "frozen"), [*((seed, ()) for seed in range(4)), (1, ("embedding", "layers.0-1", "layers.2.mlp"))], ids=str
)
def test_mixed_search_lower_bounds_never_exceed_the_simulated_step(seed, frozen):
    """By which layouts are left out that are never simulated."""
    spec, cluster = drawn(seed)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"frozen": frozen})})
    (other,) = cluster.others
    constants = replace(other.machine.constants, spread=0.05)
    cluster = replace(cluster, others=(replace(other, machine=replace(other.machine, constants=constants)),))
    rates = mixed_search._Rates(spec, cluster.parts)
    for frame in mixed_search._frames(spec, cluster.parts):
        for mixed in mixed_search._layouts(spec, frame, True):
            stages = mixed_search._Stages(spec, mixed, rates)
            step = stages.step(cluster) if stages.counts else None
            if step is not None:
                bounds = rates.min_seconds_of_frame(frame), rates.balanced_seconds(mixed), stages.min_seconds
                assert max(*bounds, step.min_seconds) <= step.model.time().seconds * (1 + 1e-9)


@pytest.mark.soak
def test_mixed_search_on_large_clusters_uses_both_kinds_if_that_is_faster():
    cluster = together([nodes("h100-80gb", 8, 8), nodes("a100-80gb", 8, 8)])
    base = job(80, 8192, 64, train={"global_batch_size": 512})
    best = best_layouts(base, cluster).plans[0]
    assert set(best.spec.layout.stage_accelerators) == {"H100", "A100"}
    assert best.time.seconds < 0.85 * search(base, cluster).plans[0].time.seconds


def test_fp8_jobs_are_placed_only_on_nodes_with_fp8():
    eight = job(12, 4096, 32, train={"global_batch_size": 32, "fp8": "tensorwise"})
    assert best_layouts(eight, MIXED).plans == ()
    plans = best_layouts(eight, together([nodes("h100-80gb", 1, 2), nodes("v100-32gb", 1, 4)])).plans
    assert plans and all(set(plan.spec.layout.stage_accelerators) == {"H100"} for plan in plans)


def test_layout_without_placement_is_planned_for_the_slowest_and_smallest_kind():
    any_nodes = job(24, 4096, 32, tensor=1, pipeline=1, data=8, train={"global_batch_size": 32})
    assert evaluate(any_nodes, MIXED).rejected[0].reason.startswith("does not fit: "), "into a V100's memory"
    small = job(4, 2048, 16, tensor=2, pipeline=1, data=4, train={"global_batch_size": 32})
    (plan,) = evaluate(small, MIXED).plans
    assert plan.time == step_model(small, nodes("v100-32gb", 2, 4)).time()
    (rejected,) = evaluate(placed(small, data=5), MIXED).rejected
    assert rejected.reason == (
        "needs 10 GPUs in groups of 2 on one node; 1 node with A100 of 4 and 1 node with V100 of 4 have room for 4 "
        "such groups, not 5"
    )


def test_layout_on_any_nodes_takes_the_time_of_the_slowest_kind():
    """Not the one of the lowest peak: an L40S has more 16-bit FLOP/s than an A100, and less than half its memory's
    bandwidth. Sizes of a job are planned likewise, whatever the first kind's engine is."""
    first = nodes("h100-80gb", 1, 8)
    cluster = together(
        [replace(first, machine=measured(first.machine, GPU)), *map(lone_nodes, ("a100-80gb", "l40s-48gb"))]
    )
    spec = job(12, 2048, 16, data=8, train={"global_batch_size": 64})
    seconds = step_model(spec, cluster).time().seconds
    assert (
        seconds
        == step_model(spec, lone_nodes("l40s-48gb")).time().seconds
        > step_model(spec, lone_nodes("a100-80gb")).time().seconds
    )
    (only,) = elastic_sizes(spec, cluster)
    assert only.plan.time.seconds == seconds


def test_advice_for_placed_stages_counts_the_gpus_of_each_kind():
    """More tensor ranks than the narrowest nodes have are none."""
    base = job(8, 8192, 64, model={"sequence_length": 4096}, train={
        "global_batch_size": 8, "head_tokens": 1024, "optimizer": {"offload": True}})  # fmt: skip
    spec = placed(base, pipeline=2, data=2, stage_accelerators=("A100", "V100"), recompute="full", offload_layers=4)
    for width, advised in ((2, "parallel.tensor: 2, on 4 A100 GPUs"), (1, None)):
        cluster = together([nodes("a100-40gb", 2 // width, width), nodes("v100-16gb", 4, 8)])
        assert fits(spec, cluster).change == advised


def test_stages_on_gpus_that_a_cluster_of_one_kind_has_not_are_refused():
    alone = nodes("a100-40gb", 1, 4)
    assert evaluate(placed(BASE, pipeline=2, tensor=2, stage_accelerators=("A100", "A100")), alone).plans
    (rejected,) = evaluate(placed(BASE, pipeline=2, tensor=2, stage_accelerators=("A100", "H100")), alone).rejected
    assert rejected.reason.endswith("no node has GPUs of type H100; there are A100")


def test_suggested_changes_of_a_mixed_plan_fit_on_every_kind():
    cluster = together([nodes("a100-80gb", 1, 4), nodes("v100-32gb", 4, 1)])
    plan = placed(BASE, pipeline=2, data=4, stage_accelerators=("A100", "V100"), stage_layers=(9, 3))
    changes = {each.change for each in what_ifs(plan, cluster)}
    assert "tensor: 2, data: 2" not in changes and "recompute: full" in changes
