"""A step's time moves with what a layout, a batch and an engine change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from manta.service.planner.budget import step_shares
from manta.service.planner.explain import explain
from manta.service.planner.hardware import (
    ASSUMED_CORE,
    HOST_COPY,
    MACHINES,
    Cluster,
    Core,
    CpuNode,
    Gpu,
    Machine,
    cpu_machine,
    machine_of,
    measured,
    with_threads,
)
from manta.service.planner.layer_time import LayerTime
from manta.service.planner.search import search
from manta.service.planner.software import (
    MANTA,
    MANTA_ON_CPU,
    MEGATRON_2021,
    MEGATRON_2021_SCATTER,
    MEGATRON_2022,
    Software,
    engine_on,
)
from manta.service.planner.step_time import StepModel, StepTime, threads_in
from manta.workers.accounting.flops import core_attention_forward, rank_parameters, step_flops
from manta.workers.config import ElasticConfig, JobSpec, ResourcesConfig
from manta.workers.spec.parameters import first_trained_layer
from tests.service.planner.test_engine_passes import GPU
from tests.service.support.planned import a100s, job


def step(spec: JobSpec, nodes: int = 1, software: Software = MANTA) -> StepTime:
    return StepModel(spec, a100s(nodes), software).time()


def layer(spec: JobSpec, software: Software = MANTA) -> LayerTime:
    return StepModel(spec, a100s(), software).layer


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"tensor": 8},
        {"pipeline": 4, "data": 2},
        {"pipeline": 4, "virtual_stages": 2, "schedule": "interleaved"},
        {"pipeline": 4, "virtual_stages": 2, "schedule": "zb-v"},
        {"tensor": 2, "pipeline": 2, "data": 2, "schedule": "zb-h1", "recompute": "selective"},
    ],
)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_planned_step_parts_sum_to_the_whole_and_never_beat_the_peak(parallel, family):
    spec = job(model={"family": family, "kv_heads": 8 if family == "llama" else None}, **parallel)
    planned = step(spec)
    parts = planned.pipeline + planned.gradients + planned.tied + planned.optimizer + planned.waiting
    assert planned.seconds == pytest.approx(parts)
    assert planned.seconds > step_flops(spec).hardware_causal / spec.layout.world_size / 312e12
    assert 0 <= planned.bubble_ratio < 1


def test_planned_step_with_twice_the_batch_takes_twice_as_long():
    small, large = (step(job(train={"global_batch_size": size})).pipeline for size in (64, 128))
    assert large == pytest.approx(2 * small)


def test_full_recomputation_adds_exactly_one_forward():
    plain, full = layer(job()), layer(job(recompute="full"))
    again = full.backward_input().seconds - plain.backward_input().seconds
    assert again == pytest.approx(plain.forward().seconds)


@pytest.mark.parametrize(("layout", "part"), [({"recompute_every": 2}, 1 / 2), ({"recompute_keep": 1}, 0.0)])
def test_layers_and_micro_batches_that_keep_everything_compute_nothing_again(layout, part):
    """On one stage no more than one micro-batch is in flight."""
    plain, some, full = (
        step(job(**each)).seconds for each in ({}, {"recompute": "full"} | layout, {"recompute": "full"})
    )
    assert some - plain == pytest.approx(part * (full - plain))


def test_planned_gather_beside_the_forward_is_waited_for_less():
    """As far as one micro-batch's forward is long; in fp32, where they are the state itself, they come first."""
    layout = {"data": 16, "train": {"global_batch_size": 64, "micro_batch_size": 1}}
    first, beside = (step(job(24, 2048, **layout, gather=when), 2) for when in ("after_update", "beside_forward"))
    forward = StepModel(job(24, 2048, **layout), a100s(2)).pipeline().times[0].forward
    assert 0 < first.optimizer - beside.optimizer <= forward
    wide = layout | {"train": layout["train"] | {"precision": "fp32"}}
    assert step(job(24, 2048, **wide, gather="beside_forward"), 2) == step(job(24, 2048, **wide), 2)


@pytest.mark.parametrize("pipeline", [1, 4])
def test_weights_are_cast_once_a_step(pipeline):
    """Read twice, for the scale and to be cast, and written both ways: 6 bytes an element, on one stage after the
    other."""
    h100s = Cluster(machine_of("h100-80gb"), 1, 8)
    shares, steps = {}, {}
    for batch in (16, 32):
        train = {"fp8": "tensorwise", "global_batch_size": batch, "micro_batch_size": 4}
        model = StepModel(job(24, 2048, pipeline=pipeline, train=train), h100s)
        steps[batch] = model.time()
        shares[batch] = {each.name: each.seconds for each in step_shares(model, steps[batch], 989e12)}
        assert sum(shares[batch].values()) == pytest.approx(steps[batch].seconds)
    casts = 6 * 24 * 12 * 2048**2 / (0.8 * 3.35e12)
    assert model.cast_seconds() == pytest.approx(casts)
    if pipeline == 1:
        assert 2 * steps[16].pipeline - steps[32].pipeline == pytest.approx(casts)
    own = 2 * shares[16]["elementwise"] - shares[32]["elementwise"]
    assert own == pytest.approx(casts / pipeline)


CORE, A100 = cpu_machine(1, 1, 1e12), machine_of("a100")
CALIBRATED = measured(machine_of("h100"), Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 0.0, 0.0, 5e10))


@pytest.mark.parametrize(
    ("machine", "tokens", "causal"),
    [(CORE, 512, 1.0), (CORE, 1024, 0.75), (CORE, 2048, 0.625), (A100, 8192, 0.5), (CALIBRATED, 8192, 0.5)],
    ids=["core-512", "core-1024", "core-2048", "a100", "calibrated-h100"],
)
def test_planned_attention_with_a_window_computes_all_scores(machine: Machine, tokens: int, causal: float):
    """As its mask is no causal one; on cores blocks of 512 keys are gone through as a whole. Layers with and without
    windows take their mean."""

    def attention(**model: int) -> float:
        spec = job(4, 1024, 8, model={"family": "llama", "sequence_length": tokens} | model)
        times = StepModel(spec, Cluster(machine, 1, 1), engine_on(machine)).layer
        return sum(each.attention for each in (times.forward(), times.backward_input()))

    whole, every_second = attention(sliding_window=128), attention(sliding_window=128, full_attention_every=2)
    assert attention() == pytest.approx(causal * whole, rel=0.03) == attention(sliding_window=tokens)
    assert every_second == pytest.approx((whole + attention()) / 2)


def test_planned_fused_attention_is_limited_by_arithmetic():
    """arXiv:2307.08691: about half the rate of large products, over half of the scores."""
    shape = {"sequence_length": 8192, "vocabulary_size": 32000}
    for name in ("a100-80gb", "h100-80gb"):
        cluster = Cluster(machine_of(name), 1, 8)
        attention = StepModel(job(8, 1024, 16, model=shape), cluster).layer.forward().attention
        device = cluster.machine.accelerator
        rate = 4 * 8192**2 * 1024 / 2 / (device.peak_16bit * cluster.machine.constants.product)
        assert rate < attention / 2 < 1.1 * rate


def test_planned_activation_offload_is_waited_for_if_layers_are_faster():
    """What recomputation leaves of a layer is copied beside it."""
    shape = {"model": {"sequence_length": 2048}}
    plain, half, most = (step(job(**shape, offload_layers=layers)).seconds for layers in (0, 4, 8))
    assert plain < half < most
    full, offloaded = (step(job(**shape, recompute="full", offload_layers=layers)).seconds for layers in (0, 8))
    assert offloaded == full
    model = StepModel(job(**shape, offload_layers=8), a100s(), MANTA)
    shares = {each.name: each.seconds for each in step_shares(model, model.time(), 312e12)}
    assert shares["copies"] == pytest.approx(most - plain, rel=0.05)
    assert sum(shares.values()) == pytest.approx(most)


def test_planned_update_of_an_offloaded_state_takes_the_host_copy_time():
    """Both ways at once, and the last slice once more; with more replicas each has less of it."""

    def update(offload: bool, **layout: int) -> float:
        return step(job(24, 2048, train={"optimizer": {"offload": offload}}, **layout)).optimizer

    count = max(rank_parameters(job(24, 2048)))
    assert update(True) == pytest.approx(12 * (count + 2**22) / HOST_COPY, rel=1e-6)
    assert update(False) < 0.2 * update(True)
    more = update(True, data=8) - update(False, data=8)
    assert 0.7 < more / (12 * count / 8 / HOST_COPY) < 1.1
    model = StepModel(job(24, 2048, train={"optimizer": {"offload": True}}), a100s())
    shares = {each.name: each for each in step_shares(model, model.time(), 312e12)}
    assert "train.optimizer.offload: false" in shares["optimizer"].help


def test_smaller_head_chunks_make_the_planned_step_slower():
    size = {"model": {"sequence_length": 4096}}
    whole, large, small = (step(job(**size, train={"head_tokens": tokens})).seconds for tokens in (0, 2048, 256))
    assert whole < large < 1.05 * whole and large < small


def test_tensor_groups_across_nodes_make_the_planned_step_slower():
    inside, outside = step(job(tensor=8, data=2), 2), step(job(tensor=16), 2)
    assert outside.pipeline / 64 > inside.pipeline / 32 / 2


def test_scatter_gather_shortens_messages_between_nodes_only():
    spec = job(tensor=8, pipeline=2, sequence_parallel=False, model={"sequence_length": 2048})
    plain, scattered = (StepModel(spec, a100s(2), each) for each in (MEGATRON_2021, MEGATRON_2021_SCATTER))
    assert scattered.message(0) < plain.message(0)


def test_planned_message_crosses_the_network_if_its_ranks_are_on_two_nodes():
    back = StepModel(job(tensor=2, pipeline=4, schedule="interleaved", virtual_stages=2), a100s(1))
    assert len({back.message(index) for index in range(7)}) == 1, "from the last rank to the first too"
    turned = StepModel(job(tensor=4, pipeline=3, schedule="zb-v", virtual_stages=2), a100s(2))
    there, node, _, again, home = (turned.message(index) for index in range(5))
    assert (there, node) == (home, again) and there < node


def test_an_embedding_whose_uses_are_on_one_rank_is_not_summed_up():
    shape = {"pipeline": 2, "virtual_stages": 2, "model": {"tie_embeddings": True}}
    assert step(job(schedule="interleaved", **shape)).tied > 0
    assert step(job(schedule="zb-v", **shape)).tied == 0


def test_overlapped_tensor_reduction_hides_more_than_half_of_its_time():
    spec = job(tensor=8, hidden=8192, heads=64, sequence_parallel=False)
    apart = replace(MEGATRON_2022, overlaps_tensor=0.0)
    hidden, seen = (layer(spec, each).backward_input().tensor for each in (MEGATRON_2022, apart))
    assert 0 < hidden < 0.5 * seen


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_planned_forward_chunks_help_large_products_and_hurt_small_ones(sequence_parallel):
    def in_chunks(count: int, hidden: int, software: Software = MANTA) -> LayerTime:
        parallel = {"tensor": 8, "sequence_parallel": sequence_parallel, "forward_chunks": count}
        shape = {"model": {"sequence_length": 4096}, "train": {"micro_batch_size": 4}}
        return layer(job(hidden=hidden, heads=64, **shape, **parallel), software)

    whole, cut = in_chunks(1, 8192).forward(), in_chunks(4, 8192).forward()
    assert cut.tensor < 0.7 * whole.tensor
    assert cut.seconds < whole.seconds
    assert cut.products >= whole.products
    assert cut.operations > whole.operations
    # But for one chunk all is hidden where nothing is lost by sharing the device.
    ideal = in_chunks(4, 8192, replace(MANTA, overlaps_tensor=1.0)).forward()
    assert whole.tensor / 4 < ideal.tensor < cut.tensor
    # What nothing hides takes longer, by the latency of more messages.
    apart = in_chunks(4, 8192, replace(MANTA, overlaps_tensor=0.0)).forward()
    assert apart.tensor > whole.tensor
    assert in_chunks(64, 512).forward().seconds > in_chunks(1, 512).forward().seconds


def test_forward_chunks_on_one_tensor_rank_leave_the_planned_time_unchanged():
    assert layer(job(forward_chunks=4)).forward() == layer(job()).forward()


def test_zero_divides_the_update_over_the_replicas():
    whole, split = step(job(data=8, zero=0)), step(job(data=8, zero=1))
    assert split.optimizer < whole.optimizer


def test_planned_small_layer_waits_for_its_host():
    model = StepModel(job(hidden=64, heads=4, model={"sequence_length": 32}), a100s())
    passes = model.pipeline().times
    operations = model.layer.forward().operations * 8
    assert passes[0].forward >= operations * model.cluster.machine.constants.host_seconds


def test_planned_first_and_last_stage_take_longer_than_those_between():
    times = StepModel(job(pipeline=4), a100s()).pipeline().times
    assert times[1] == times[2]
    assert times[0].forward > times[1].forward and times[3].forward > times[1].forward


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


COUNTER = Core(1.0, 1.0, 0.0, math.inf, 0.0, math.inf, 0.0, 1.0)
"""A core on which a FLOP takes a second, and nothing else takes any time."""
LOWER = ("embedding", "layers.0-4")
PARTS = [LOWER, ("*.mlp",), ("embedding", "layers.0-5", "*.attention"), ("output",), ("layers.0-7", "embedding")]
LLAMA = {"family": "llama", "kv_heads": 4, "tie_embeddings": False}
GPT = {"dropout": 0.0, "tie_embeddings": False}


def frozen(patterns: tuple[str, ...], model: dict | None = None, lora: dict | None = None, **layout) -> JobSpec:
    """A job of eight layers."""
    train = {"frozen": patterns, "global_batch_size": 16, "lora": lora}
    return job(model=GPT | (model or {}), train=train, **layout)


def reached(spec: JobSpec) -> int:
    """Layers that have a backward."""
    return spec.model.layers - max(0, first_trained_layer(spec))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    ("patterns", "lora"), [*((each, None) for each in ((), *PARTS)), ((), {}), ((), {"targets": ["k", "up"]})], ids=str
)
@pytest.mark.parametrize(
    "layout", [{}, {"pipeline": 4}, {"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2}], ids=str
)
def test_planned_products_of_frozen_jobs_match_their_flops(patterns, lora, model, layout):
    """Torch's own count of the engine's steps is what these FLOPs are held against."""
    spec = frozen(patterns, model, lora, **layout)
    model_of_step = StepModel(spec, Cluster(cpu_machine(8, 1, 1e12, COUNTER), 1, 8), MANTA_ON_CPU)
    stages = range(spec.layout.pipeline * spec.layout.virtual_stages)
    passes = [each for index in stages for each in model_of_step.budgets_of(index)]
    batch, core = spec.train.global_batch_size, core_attention_forward(spec.model)
    attention = batch * (spec.model.layers + 2 * reached(spec)) * core
    products = spec.micro_batches * sum(each.products for each in passes)
    assert products == pytest.approx(step_flops(spec).hardware_full - attention, rel=1e-9)
    # A fused backward makes the scores again, which FLOPs leave out.
    kernels = batch * (spec.model.layers + 2.5 * reached(spec)) * core
    assert spec.micro_batches * sum(each.attention for each in passes) == pytest.approx(kernels, rel=1e-9)


@pytest.mark.parametrize(
    "cluster", [a100s(), Cluster(measured(MACHINES["h100-80gb"], GPU), 1, 8)], ids=["a100", "h100"]
)
def test_frozen_parameters_are_neither_reduced_nor_updated(cluster):
    whole, part = (StepModel(frozen(each, data=8), cluster) for each in ((), LOWER))
    slow, quick = whole.time(), part.time()
    assert part.parameters < 0.5 * whole.parameters
    assert quick.optimizer < 0.7 * slow.optimizer
    assert quick.pipeline < 0.8 * slow.pipeline
    assert quick.work > 1.01 * slow.work / 3, "its forwards are all there"


def test_frozen_embedding_has_no_planned_backward():
    """The layers above it have one all the same."""
    trained, part = (StepModel(frozen(each, pipeline=2), a100s()) for each in (("output",), ("output", "embedding")))
    backward, without = (model.budgets_of(0)[1] for model in (trained, part))
    assert without.elementwise > 0.0 and part.passes.parts.first_backward.device_seconds > 0.0
    assert without.plus(part.passes.parts.first_backward).device_seconds == pytest.approx(backward.device_seconds)


def test_frozen_tied_embedding_is_not_summed_over_stages():
    tied = {"tie_embeddings": True}
    whole, part = (StepModel(frozen(each, tied, pipeline=4), a100s()) for each in ((), ("embedding",)))
    assert whole.tied_seconds() > 0.0 == part.tied_seconds()


def test_recompute_every_second_layer_skips_layers_without_a_backward():
    spec = frozen(LOWER, recompute="full", recompute_every=2)
    again = StepModel(spec, a100s()).layer.backward_input().recomputation
    every = StepModel(frozen(LOWER, recompute="full"), a100s()).layer.backward_input().recomputation
    assert again == pytest.approx(every / 3), "layer 6 of 5, 6 and 7"


def test_search_and_explanation_account_for_frozen_layers():
    plan = search(frozen(LOWER), a100s()).plans[0]
    assert plan.spec.layout.recompute == "none", "there is room for all"
    assert plan.time.seconds < 0.8 * search(frozen(()), a100s()).plans[0].time.seconds
    parts = explain(plan, a100s()).shares
    assert sum(each.seconds for each in parts) == pytest.approx(plan.time.seconds)
