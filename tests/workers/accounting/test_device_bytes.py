"""What a rank is told to take on its device is what a step takes, by torch's MemTracker, on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_specs import spec
from fake_rank import (
    CPU,
    BalancedNumbers,
    FakeRank,
    balanced_experts,
    host_memory_apart,
    pretended_gpu,
    tracker_of_bytes,
)
from one_layer import OneLayer
from rank_programs import micro_batches

from manta.workers.accounting import state_costs, step_peak
from manta.workers.accounting.activation_bytes import ExpertRows, host_bytes_of_rank, rows_of_share
from manta.workers.accounting.device_bytes import (
    arriving_bytes,
    bytes_of_stage,
    device_bytes,
    halves_bytes,
    worst_bytes,
)
from manta.workers.accounting.layer_passes import LayerPasses
from manta.workers.accounting.state_costs import SLICE_ELEMENTS, host_state_bytes, slice_buffer_bytes
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.accounting.unit_bytes import units_of
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.parallel.data import offloaded
from manta.workers.parallel.data.elastic_sums import LeafSum
from manta.workers.parallel.data.flat import Slot, Unit
from manta.workers.parallel.tensor.cross_entropy import BLOCK_ELEMENTS, BLOCK_ROWS

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama", "kv_heads": 4, "ffn_hidden_size": 5504},
    "qwen": {"family": "qwen", "kv_heads": 4, "head_dim": 128, "ffn_hidden_size": 6144},
    "latent": {
        "family": "deepseek",
        "latent_attention": (
            LATENT := {
                "q_rank": 768,
                "kv_rank": 512,
                "rope_size": 64,
                "nope_size": 128,
                "value_size": 128,
            }
        ),
    },
    "latent, wide values": {"family": "deepseek", "latent_attention": LATENT | {"q_rank": None, "value_size": 256}},
    "experts": {
        "family": "llama",
        "kv_heads": 4,
        "moe": (EXPERTS := {"experts": 8, "per_token": 2, "ffn_hidden_size": 1408}),
    },
    "experts, shared": {
        "family": "qwen",
        "kv_heads": 4,
        "ffn_hidden_size": 5504,
        "moe": EXPERTS | {"first_dense": 1, "shared": 2, "shared_gate": True, "score": "sigmoid"},
    },
}
LAYOUT = {"tensor": 2, "pipeline": 2, "data": 2}
SHARDED = {"tensor": 2, "pipeline": 1, "data": 2}
LONG = {"tensor": 1, "pipeline": 1, "data": 2, "context": 2}
ALONE = {"parallel": {"tensor": 1, "pipeline": 1, "data": 1}}
ALL_MODULES = ("norm", "mlp_activation", "core_attention")


def job(
    family: str = "llama",
    micro_batches: int = 8,
    parallel: dict[str, Any] | None = None,
    vocabulary: int = 32000,
    **train: Any,
) -> JobSpec:
    """A model of 0.5e9 parameters, in bf16."""
    layout = LAYOUT | (parallel or {})
    model = {"layers": 8, "hidden_size": 2048, "heads": 16, "sequence_length": 2048, "vocabulary_size": vocabulary}
    numbers = {"precision": "bf16", "global_batch_size": micro_batches * layout["data"], "micro_batch_size": 1}
    return spec(model=model | FAMILIES[family], train=numbers | train, parallel=layout)


JOBS = {
    "1f1b": job(),
    "zb-h1": job(parallel={"schedule": "zb-h1"}),
    "full": job("gpt", parallel={"recompute": "full", "pipeline": 4}),
    "elastic sums": job(deterministic="elastic"),
    "frozen": job(frozen=["embedding", "layers.0-3"]),
    "uneven, zb-v": job(parallel={"schedule": "zb-v", "virtual_stages": 2, "stage_layers": [1, 3, 2, 2]}),
    "tensorwise": job(fp8="tensorwise"),
    "rowwise": job("gpt", fp8="rowwise"),
    "8 bits, zb-h1": job(fp8="rowwise", parallel={"schedule": "zb-h1"}),
    "8 bits, one rank": job(fp8="tensorwise", parallel={"tensor": 1, "pipeline": 1, "data": 1}),
    "8 bits, whole layers": job(fp8="tensorwise", parallel={"recompute": "full"}, micro_batch_size=2, micro_batches=16),
    "a few logits, zb-h1": job(vocabulary=128256, parallel={"schedule": "zb-h1"}, head_tokens=512),
    "offload": job(parallel={"offload_layers": 3}),
    "offload of all": job("gpt", parallel={"offload_layers": 9, "schedule": "zb-v", "virtual_stages": 2}),
    "offload, frozen": job(
        "gpt", 12, {"offload_layers": 9, "recompute": "full", "schedule": "gpipe"}, frozen=["embedding"]
    ),
    "adapters": job(lora={}),
    "adapters, zb-h1": job("gpt", parallel={"schedule": "zb-h1"}, lora={"dropout": 0.1}),
    "some adapters, zb-v": job(
        "qwen", parallel={"schedule": "zb-v", "virtual_stages": 2}, lora={"targets": ["down", "o"]}
    ),
    "adapters, full, one rank": job("gpt", **ALONE, lora={"dropout": 0.1}, micro_batch_size=2),
    "some adapters, 8 bits": job("qwen", fp8="tensorwise", lora={"targets": ["q", "v"], "rank": 64}),
    "zero 2": job(parallel=SHARDED | {"zero": 2}, micro_batches=2),
    "zero 3": job("gpt", parallel=SHARDED | {"zero": 3}, micro_batches=2),
    "zero 3, four": job(parallel=SHARDED | {"zero": 3, "data": 4, "tensor": 1}, micro_batches=2),
    "zero 2, four": job(parallel=SHARDED | {"zero": 2, "data": 4, "tensor": 1}, micro_batches=1),
    "zero 3, full": job(parallel=SHARDED | {"zero": 3, "data": 4, "recompute": "full"}, micro_batches=2),
    "zero 2, full": job(parallel=SHARDED | {"zero": 2, "recompute": "full"}, micro_batches=2),
    "zero 3, frozen": job(parallel=SHARDED | {"zero": 3}, frozen=["embedding", "layers.*.mlp", "layers.0-3"]),
    "zero 3, elastic": job(parallel=SHARDED | {"zero": 3}, deterministic="elastic", micro_batches=4),
    "zero 3, 8 bits": job(parallel=SHARDED | {"zero": 3}, fp8="rowwise", micro_batches=2),
    "zero 3, fp32": job("gpt", parallel=SHARDED | {"zero": 3}, precision="fp32", micro_batches=2),
    "zero 3, state on the host": job(parallel=SHARDED | {"zero": 3}, optimizer={"offload": True}, micro_batches=2),
    "zero 3, offload": job(parallel=SHARDED | {"zero": 3, "offload_layers": 3}, micro_batches=2),
    "state on the host, one rank": job(**ALONE, optimizer={"offload": True}, micro_batches=2),
    "zero 3, gather": job(parallel=LONG | {"zero": 3}, micro_batches=2),
    "zero 3, ring": job(parallel=LONG | {"zero": 3, "context_method": "ring"}, micro_batches=2),
    "zero 3, all to all": job("gpt", parallel=LONG | {"zero": 3, "context_method": "all_to_all"}, micro_batches=2),
    "zero 3, gather, full": job(parallel=LONG | {"zero": 3, "recompute": "full"}, micro_batches=2),
    "zero 3, ring, fp32, full": job(
        "qwen", 2, LONG | {"zero": 3, "recompute": "full", "context_method": "ring"}, precision="fp32"
    ),
    "zero 2, gather, tensor": job(parallel=LONG | {"zero": 2, "tensor": 2, "data": 1}, micro_batches=2),
    "adapters, zero 3": job(parallel=SHARDED | {"zero": 3}, micro_batches=2, lora={}),
    "adapters, zero 3, full": job("gpt", 2, SHARDED | {"zero": 3, "recompute": "full"}, lora={"dropout": 0.1}),
    "adapters, zero 3, offload": job(
        parallel=SHARDED | {"zero": 3, "offload_layers": 3}, micro_batches=2, lora={}, optimizer={"offload": True}
    ),
    "adapters, zero 3, 8 bits": job(parallel=SHARDED | {"zero": 3}, micro_batches=2, lora={}, fp8="rowwise"),
    "adapters, zero 3, copied keys": job(
        parallel=SHARDED | {"zero": 3, "tensor": 8}, micro_batches=2, precision="fp32", lora={}
    ),
    "adapters, zero 3, elastic, fp32": job(
        parallel=SHARDED | {"zero": 3}, micro_batches=4, precision="fp32", deterministic="elastic", lora={"rank": 64}
    ),
    "some adapters, zero 2": job(
        "qwen", 2, SHARDED | {"zero": 2, "tensor": 1, "data": 4}, lora={"targets": ["q", "v", "down"], "rank": 64}
    ),
    "adapters, gather": job(parallel=LONG, micro_batches=2, lora={}),
    "adapters, ring, full": job(
        "qwen", 2, LONG | {"context_method": "ring", "recompute": "full"}, lora={"dropout": 0.1}
    ),
    "adapters, all to all, fp32": job(
        parallel=LONG | {"context_method": "all_to_all"}, micro_batches=2, precision="fp32", lora={}
    ),
    "adapters, gather, zb-h1": job("gpt", 4, LONG | {"pipeline": 2, "schedule": "zb-h1"}, lora={}),
    "adapters, zero 3, gather": job(parallel=LONG | {"zero": 3}, micro_batches=2, lora={}),
    "adapters, zero 3, gather, fp32": job("gpt", 2, LONG | {"zero": 3}, precision="fp32", lora={}),
    "adapters, zero 3, ring, full": job(
        "llama", 2, LONG | {"zero": 3, "context_method": "ring", "recompute": "full"}, lora={"dropout": 0.1}
    ),
    "adapters, zero 3, all to all, tensor": job(
        "qwen", 2, LONG | {"zero": 3, "context_method": "all_to_all", "tensor": 2, "data": 1}, lora={}
    ),
    "latent": job("latent"),
    "latent, one rank": job("latent", **ALONE),
    "latent, wide values, one rank": job("latent, wide values", **ALONE),
    "latent, wide values, zb-h1": job("latent, wide values", parallel={"schedule": "zb-h1"}),
    "latent, zb-h1, selective": job(
        "latent", parallel={"schedule": "zb-h1", "recompute": "selective", "recompute_modules": ALL_MODULES}
    ),
    "latent, full": job("latent", parallel={"recompute": "full", "sequence_parallel": False}),
    "latent, 8 bits": job("latent", fp8="rowwise"),
    "latent, ring": job("latent", parallel=LONG | {"context_method": "ring"}),
    "latent, all to all": job("latent", parallel=LONG | {"context_method": "all_to_all"}),
    "latent, gather, fp32": job("latent, wide values", parallel=LONG, precision="fp32"),
    "latent, adapters": job("latent", parallel=SHARDED | {"zero": 3}, lora={}),
    "experts": job("experts"),
    "experts, zb-h1": job("experts, shared", parallel={"schedule": "zb-h1"}),
    "experts, full, one rank": job("experts, shared", **ALONE | {"micro_batches": 2}),
    "experts, selective, fp32": job(
        "experts, shared", 2, SHARDED | {"recompute": "selective", "recompute_modules": ALL_MODULES}, precision="fp32"
    ),
    "experts, zero 3": job("experts", parallel=SHARDED | {"zero": 3}, micro_batches=2),
    "experts, 8 bits": job("experts", fp8="tensorwise"),
    "experts, offload": job("experts", parallel={"offload_layers": 3}),
    "experts, adapters": job("experts", lora={"targets": ["q", "v"]}),
    "experts, frozen": job("experts, shared", frozen=["embedding", "layers.0-3"]),
    "experts, gather": job("experts", parallel=LONG, micro_batches=2),
    "adapters, zero 3, context 4, elastic": job(
        "llama", 4, LONG | {"zero": 3, "context": 4}, deterministic="elastic", lora={"rank": 64}
    ),
}


def assert_as_accounted(job_spec: JobSpec, stage: int) -> None:
    """What rests is told to 0.1%, the peak to 3%."""
    accounted = device_bytes(job_spec)[stage]
    with pretended_gpu(), host_memory_apart(), balanced_experts(job_spec):
        rank = FakeRank(job_spec, stage * job_spec.layout.tensor)
        resting = rank.tracker.get_tracker_snapshot("current")[CPU]["Total"]
        peak = rank.step()["Total"]
        if job_spec.train.deterministic == "elastic":  # whose buffers are made in the first step, and stay
            peak = max(peak, rank.step()["Total"])
        elif job_spec.train.fp8 != "off":  # weights in 8 bits are made in the first step, and stay
            resting = rank.tracker.get_tracker_snapshot("current")[CPU]["Total"]
            assert accounted.parameters + accounted.gradients + accounted.optimizer == pytest.approx(resting, rel=0.005)
            peak = max(peak, rank.step()["Total"])
        else:
            assert accounted.parameters + accounted.gradients + accounted.optimizer == pytest.approx(resting, rel=0.005)
    assert accounted.total == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize(("family", "tensor"), [("latent", 1), ("experts, shared", 1), ("experts, shared", 2)])
def test_units_have_the_elements_that_the_engine_gives_them(family, tensor):
    sharded = job(family, 2, SHARDED | {"zero": 3, "tensor": tensor}, frozen=["layers.0-3"])
    with pretended_gpu():
        flat = FakeRank(sharded, 0).engine.flat

    def elements(slots: list[Slot], unit: Unit) -> int:
        return sum(slot.end - slot.start for slot in slots if flat.unit_of(slot.entry.parameter) is unit)

    found = [(elements(flat.slots, unit), elements(flat.frozen, unit)) for unit in flat.units]
    assert found == [(unit.trained, unit.frozen) for unit in units_of(sharded)]


@pytest.mark.parametrize(
    "recorded",
    [
        job(**ALONE, cuda_graphs=True),
        pytest.param(job("gpt", **ALONE, cuda_graphs=True, precision="fp32"), marks=pytest.mark.soak),
        pytest.param(
            job("gpt", parallel=LAYOUT | {"tensor": 1, "pipeline": 1, "recompute": "full"}, cuda_graphs=True),
            marks=pytest.mark.soak,
        ),
        pytest.param(job(**ALONE, cuda_graphs=True, head_tokens=256), marks=pytest.mark.soak),
    ],
    ids=["llama", "fp32", "full", "a few logits"],
)
def test_recorded_micro_batches_take_the_accounted_memory(recorded):
    """Besides the memory of those that are computed."""
    with pretended_gpu():
        rank = FakeRank(recorded, 0)
        rank.step()
        peak = rank.step()["Total"]
        assert rank.engine.not_recorded is None
    told = device_bytes(recorded)[0].total
    assert told == pytest.approx(peak, rel=0.03)
    computed = recorded.model_copy(update={"train": recorded.train.model_copy(update={"cuda_graphs": False})})
    assert device_bytes(computed)[0].total < 0.97 * peak


CHUNKED = {
    "full": job("gpt", 1, parallel={"recompute": "full", "forward_chunks": 4, "pipeline": 1}),
    "1f1b": job(parallel={"forward_chunks": 3}),
    "gpt": job("gpt", parallel={"forward_chunks": 4, "sequence_parallel": False}),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", CHUNKED)
def test_chunked_steps_take_the_accounted_memory(name):
    assert_as_accounted(CHUNKED[name], 0)


def forward_peak(job_spec: JobSpec) -> int:
    """Bytes that a layer's forward takes at its peak, with its weights."""
    with pretended_gpu():
        layer, tracker = OneLayer(job_spec), tracker_of_bytes()
        x = layer.input().requires_grad_()
        layer.forward(x)  # makes the tables that all layers share
        with tracker:
            layer.forward(x)
        return tracker.get_tracker_snapshot("peak")[CPU]["Total"]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_chunked_forward_holds_two_chunks_at_once(family):
    def accounted_and_taken(chunks: int) -> tuple[int, int]:
        layer = job(family, parallel={"tensor": 4, "pipeline": 1, "forward_chunks": chunks}, micro_batch_size=2)
        return LayerPasses(layer, 0).forward().peak, forward_peak(layer)

    accounted, taken = accounted_and_taken(1)
    assert accounted_and_taken(2) == (accounted, taken)
    for chunks in (3, 8):
        less_accounted, less_taken = accounted_and_taken(chunks)
        assert accounted - less_accounted == pytest.approx(taken - less_taken, rel=0.02)
        assert accounted - less_accounted > 0.05 * accounted


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("1f1b", 0),
        ("zb-h1", 0),
        ("full", 3),
        ("offload, frozen", 0),
        ("zero 2, full", 0),
        ("zero 3, frozen", 0),
        ("adapters, zb-h1", 0),
        ("experts, zb-h1", 0),
        ("adapters, zero 3, ring, full", 0),
    ],
)
def test_peak_memory_of_a_step_matches_the_accounting(name, stage):
    """Of half as many micro-batches as in the soak, which are enough to fill the pipeline."""
    train = JOBS[name].train
    fewer = train.model_copy(update={"global_batch_size": train.global_batch_size // 2})
    assert_as_accounted(JOBS[name].model_copy(update={"train": fewer}), stage)


def counted_rows(spec: JobSpec, tokens: Sequence[Sequence[int]]) -> tuple[ExpertRows, ...]:
    """For each layer, rows of the rank with most, if a full micro-batch is spread over experts like `tokens`, [layers
    with experts, experts]: those of a step, for example."""
    rows, size = [ExpertRows(0, 0, 0)] * spec.model.layers, spec.layout.expert_size
    for layer, counts in zip(spec.model.expert_layers, tokens, strict=True):
        each, total = len(counts) // size, max(1, sum(counts))
        ranks = [counts[first : first + each] for first in range(0, len(counts), each)]
        busiest = max(ranks, key=sum)
        rows[layer] = rows_of_share(spec, sum(busiest) * size / total, max(busiest) * len(counts) / total)
    return tuple(rows)


@pytest.mark.parametrize(
    ("dispatch", "recompute", "tensor", "whole"),
    [
        ("all_gather", "full", 1, False),
        pytest.param("all_gather", "none", 2, False, marks=pytest.mark.soak),
        pytest.param("all_to_all", "full", 1, False, marks=pytest.mark.soak),
        pytest.param("all_to_all", "none", 2, False, marks=pytest.mark.soak),
        pytest.param("all_gather", "none", 2, True, marks=pytest.mark.soak),
        ("all_to_all", "full", 2, True),
    ],
)
def test_peak_memory_for_counted_tokens_of_spread_experts_matches_the_accounting(dispatch, recompute, tensor, whole):
    """Of two ranks one has experts that get three quarters of all choices, of whole experts of four ranks half; plans
    expect less, and the worst is more."""
    layout = SHARDED | {"expert": 2, "expert_dispatch": dispatch, "recompute": recompute, "tensor": tensor}
    layout |= {"expert": 4, "expert_tensor": 1} if whole else {}
    own, reached = (range(2), (0, 1, 4, 5)) if whole else (range(4), range(8))
    spread = job("experts", 8, layout, vocabulary=512, micro_batch_size=(size := 4))
    choices = 2 * size * 2048 * 2
    shares = [3, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]
    tokens = [[int(choices * share) // 8 for share in shares]] * 8
    numbers = BalancedNumbers(spread)
    rows = counted_rows(spread, tokens)
    if dispatch == "all_gather":
        mine = [tokens[0][expert] for expert in own]
        numbers.know({len(own) + 1: [*mine, choices - sum(mine)]})
    else:  # every token goes to both ranks
        rows = [each._replace(came=2 * size * 2048) for each in rows]
        one = [*(tokens[0][expert] // 2 for expert in reached), size * 2048, size * 2048]
        numbers.know({2 * len(one): one * 2})
    (told,) = device_bytes(spread, rows=rows)
    with pretended_gpu(), numbers.instead():
        peak = FakeRank(spread, 0).step()["Total"]
    assert told.total == pytest.approx(peak, rel=0.03)
    assert device_bytes(spread)[0].total < told.total < worst_bytes(spread)


def test_worst_memory_is_that_of_the_plan_where_experts_are_not_spread():
    assert worst_bytes(job("experts")) is None
    even = counted_rows(job("experts"), [[1] * 8] * 8)
    assert {(each.all, each.came) for each in even} == {(2 * 2048, 0)}


@pytest.mark.soak
@pytest.mark.parametrize("name", JOBS)
def test_peak_memory_of_all_large_jobs_matches_the_accounting(name):
    for stage in sorted({0, JOBS[name].layout.pipeline - 1}):
        assert_as_accounted(JOBS[name], stage)


def test_masters_and_moments_are_shared_by_replicas():
    """6 + 12/d bytes a parameter in bf16: parameter, gradient, and of a part the master weight and two moments."""
    for replicas in (2, 8):
        accounted = device_bytes(job(parallel={"data": replicas}))[0]
        parameters = accounted.parameters / 2
        resting = accounted.parameters + accounted.gradients + accounted.optimizer
        assert resting == pytest.approx((6 + 12 / replicas) * parameters, rel=1e-6)


@pytest.mark.soak
def test_offloaded_activations_are_accounted_on_the_host_and_not_on_the_device():
    """As the job's others do, and in host memory what is told."""
    stays, leaves = device_bytes(job())[0], device_bytes(JOBS["offload"])[0]
    assert leaves.total < stays.total - 0.5 * (stays.activations - leaves.activations)
    with pretended_gpu(), host_memory_apart() as host:
        FakeRank(JOBS["offload"], 0).step()
    assert 0.95 < host.taken / host_bytes_of_rank(JOBS["offload"], 0, 8) <= 1


STATE_APART = {"optimizer": {"offload": True}, "micro_batches": 2}


@pytest.mark.parametrize("data", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_offloaded_state_leaves_six_bytes_a_parameter_on_the_device(data):
    """Parameter and gradient, and slices for the update alone, which are less than what passes take."""
    there = job("llama", parallel={"tensor": 2, "pipeline": 2, "data": data}, **STATE_APART)
    accounted = device_bytes(there)[0]
    assert accounted.optimizer == 0
    assert accounted.parameters + accounted.gradients == 6 * accounted.parameters / 2
    with pretended_gpu(), host_memory_apart() as host:
        rank = FakeRank(there, 0)
        assert accounted.parameters + accounted.gradients == pytest.approx(
            rank.tracker.get_tracker_snapshot("current")[CPU]["Total"], rel=0.005
        )
        assert accounted.total == pytest.approx(rank.step()["Total"], rel=0.03)
    assert host.taken == pytest.approx(host_state_bytes(there, 0), rel=1e-3)


def test_update_slices_are_accounted_if_nothing_else_takes_more():
    """Of a model with hardly any activations."""
    shape = {"layers": 2, "hidden_size": 4096, "heads": 32, "sequence_length": 8, "vocabulary_size": 256}
    numbers = {"precision": "bf16", "global_batch_size": 1, "optimizer": {"offload": True}}
    small = spec(model=shape, train=numbers)
    accounted = device_bytes(small)[0]
    assert accounted.activations + accounted.workspace == slice_buffer_bytes(small, 10**9) == 3 * 12 * SLICE_ELEMENTS
    with pretended_gpu(), host_memory_apart():
        assert FakeRank(small, 0).step()["Total"] == pytest.approx(accounted.total, rel=0.03)


def test_exchanged_parts_of_replicas_are_accounted_if_nothing_else_takes_more():
    """Of a model with hardly any activations: a copy of the updated part, and on CPUs what others send of gradients."""
    shape = {"layers": 2, "hidden_size": 1024, "heads": 8, "sequence_length": 8, "vocabulary_size": 256}
    numbers = {"precision": "bf16", "global_batch_size": 4}
    shared = spec(model=shape, train=numbers, parallel={"data": 4})
    accounted = device_bytes(shared)[0]
    assert accounted.activations + accounted.workspace == accounted.parameters // 4
    on_cpus = bytes_of_stage(StepPeak(shared, gpu=False), 0, 1)
    assert on_cpus.activations + on_cpus.workspace == accounted.gradients // 4 * 3


def test_memory_on_the_host_comes_in_powers_of_two():
    """Of one layer five tensors of 3 MiB, two of 12 in the MLP, and queries, keys and values of 9."""
    shape = {"layers": 3, "hidden_size": 1536, "heads": 12, "sequence_length": 1024, "vocabulary_size": 256}
    waiting = spec(model=shape, train={"precision": "bf16"}, parallel={"offload_layers": 1})
    assert host_bytes_of_rank(waiting, 0, 1) == (5 * 4 + 2 * 16 + 16) * 2**20


def test_window_tables_are_accounted_only_for_fused_attention():
    def tables(**train):
        return StepPeak(spec(model={"sequence_length": 64, "sliding_window": 4}, train=train)).tables

    assert (tables(attention="sdpa"), tables(attention="explicit")) == (4 * 64**2, 0)


def test_accounted_update_slices_have_the_size_of_the_engines():
    assert (state_costs.SLICE_ELEMENTS, state_costs.SLICE_BUFFERS) == (
        offloaded.SLICE_ELEMENTS,
        offloaded.SLICE_BUFFERS,
    )
    assert [slice_buffer_bytes(spec(), kept) for kept in (7, SLICE_ELEMENTS + 1)] == [12 * 7, 2 * 12 * SLICE_ELEMENTS]


def test_logits_are_gone_when_layers_are_computed_again():
    """Counted together with such a layer they would make a fifth more."""
    shape = {"layers": 2, "hidden_size": 1024, "heads": 8, "sequence_length": 1024, "vocabulary_size": 8000}
    numbers = {"precision": "fp32", "global_batch_size": 8, "micro_batch_size": 4}
    job_spec = spec(model=shape | FAMILIES["gpt"], train=numbers, parallel={"recompute": "full"})
    with pretended_gpu():
        peak = FakeRank(job_spec, 0).step()["Total"]
    assert 0.97 * peak < device_bytes(job_spec)[0].total < 1.08 * peak


def test_accounted_loss_blocks_have_the_size_of_the_engines():
    assert (step_peak.LOSS_ROWS, step_peak.LOSS_ELEMENTS) == (BLOCK_ROWS, BLOCK_ELEMENTS)


CASES = {
    "a table on both ends": ({}, {"pipeline": 2, "data": 2}, 8, 1),
    "replicas with one node each": ({}, {"data": 4}, 16, 3),
    "shares that are not aligned": ({}, {"data": 3}, 16, 4),
    "copies of keys and values": ({"kv_heads": 1, "family": "llama"}, {"tensor": 4, "data": 2}, 8, 1),
    "small buckets": ({}, {"data": 2, "bucket_megabytes": 0.2}, 8, 1),
    "adapters": ({"kv_heads": 1}, {"tensor": 4, "data": 2, "bucket_megabytes": 0.2}, 8, 1),
}


def elastic_job(model, parallel, batch, **train):
    shape = {"hidden_size": 128, "vocabulary_size": 4096, "sequence_length": 64} | model
    return spec(model=shape, parallel=parallel, train={"global_batch_size": batch, "micro_batch_size": 2, **train})


@pytest.mark.parametrize("name", CASES)
def test_elastic_receive_buffer_has_the_size_of_the_largest_bucket(name):
    model, parallel, batch, nodes = CASES[name]
    lora = {"lora": {"rank": 32}} if name == "adapters" else {}
    elastic = elastic_job(model, parallel, batch, deterministic="elastic", **lora)
    grid = RankGrid(elastic.layout)
    for stage in range(elastic.layout.pipeline):
        engine = Engine(elastic, Comm(grid, stage * elastic.layout.tensor, torch.device("cpu")))
        part = max((end - start) // elastic.layout.data for start, end in engine.flat.buckets)
        assert arriving_bytes(elastic, stage, gpu=False) == pytest.approx(4 * part * nodes, rel=0.03)
        predicted = bytes_of_stage(StepPeak(elastic), stage, elastic.micro_batches)
        assert predicted.activations + predicted.workspace >= arriving_bytes(elastic, stage, gpu=True)


def test_elastic_receive_buffer_is_absent_without_elastic_sums_or_other_replicas():
    assert arriving_bytes(elastic_job({}, {"data": 2}, 8), 0, gpu=True) == 0
    assert arriving_bytes(elastic_job({}, {}, 8, deterministic="elastic"), 0, gpu=True) == 0


HALVES = {
    "zb-v": ({"schedule": "zb-v", "virtual_stages": 2}, {}),
    "two chunks": ({"schedule": "interleaved", "virtual_stages": 2}, {}),
    "gpipe": ({"schedule": "gpipe"}, {}),
    "zb-h1": ({"schedule": "zb-h1"}, {}),
    "zb-h1, a few logits": ({"schedule": "zb-h1"}, {"head_tokens": 16}),
    "frozen": ({"schedule": "zb-v", "virtual_stages": 2}, {"frozen": ["embedding"]}),
}


@pytest.mark.parametrize("name", HALVES)
def test_accounted_gradient_halves_of_tied_embeddings_match_the_engine(monkeypatch, name):
    parallel, train = HALVES[name]
    elastic = elastic_job({}, parallel, 10, deterministic="elastic", **train)
    engine = Engine(elastic, Comm(RankGrid(elastic.layout), 0, torch.device("cpu")))
    most, second_use = 0, LeafSum._second_use

    def counted(self, micro_batch):
        nonlocal most
        result = second_use(self, micro_batch)
        most = max(most, sum(part.nbytes for parts in self._halves.values() for part in parts))
        return result

    monkeypatch.setattr(LeafSum, "_second_use", counted)
    batch = micro_batches(elastic, 0, torch.randint(256, (10, 65)))
    engine.reduction.begin(len(batch), 10)
    engine.pipeline.train(batch, 1.0)
    assert halves_bytes(elastic, 0, len(batch)) == most
    assert (most > 0) == (name in ("zb-v", "two chunks", "zb-h1, a few logits"))


def test_ranks_with_one_end_of_the_model_make_no_halves():
    elastic = elastic_job({}, {"pipeline": 2}, 8, deterministic="elastic")
    assert halves_bytes(elastic, 0, 4) == halves_bytes(elastic, 1, 4) == 0
