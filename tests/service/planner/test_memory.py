"""Memory by part follows the engine's buffers; what does not fit says by how much, and what helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.service.planner import memory
from manta.service.planner.hardware import MACHINES, Gpu, cpu_machine, measured
from manta.service.planner.memory import RESERVE, fits, host_bytes, memory_of, usable_bytes, worst_rank
from manta.workers.accounting.activation_bytes import bytes_of_rank, host_bytes_of_rank
from manta.workers.accounting.flops import rank_parameters
from manta.workers.accounting.state_costs import snapshot_bytes
from manta.workers.config import JobSpec
from tests.service.support.planned import a100s, job


def test_planned_state_bytes_match_those_of_the_engine():
    """bf16: 2 bytes of parameters, 4 of gradients, 12 of masters and moments; the last split over the replicas."""
    alone, count = memory_of(job(), 0), rank_parameters(job())[0]
    assert (alone.parameters, alone.gradients, alone.optimizer) == (2 * count, 4 * count, 12 * count)
    split = memory_of(job(data=4), 0)
    assert (split.parameters, split.gradients, split.optimizer) == (2 * count, 4 * count, 3 * count)
    whole = memory_of(job(data=4, zero=0), 0)
    assert whole.optimizer == 12 * count
    wide = memory_of(job(train={"precision": "fp32"}), 0)
    assert (wide.parameters, wide.optimizer) == (4 * count, 8 * count)


def test_frozen_parameters_have_neither_gradients_nor_moments():
    frozen = memory_of(job(train={"frozen": ("layers.0-6", "embedding.position")}), 0)
    assert frozen.parameters == memory_of(job(), 0).parameters
    assert frozen.gradients < 0.6 * memory_of(job(), 0).gradients
    assert frozen.optimizer == 3 * frozen.gradients


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(12, 30),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([(), ("embedding", "layers.0-7"), ("embedding", "layers.0-2", "layers.6-9.mlp"), ("layers.8-11",)]),
)
def test_worst_rank_is_found_without_examining_all(kind, stages, rounds, layers, recompute, frozen):
    virtual_stages = {"interleaved": 2, "zb-v": 2}.get(kind, 1)
    layout = {"pipeline": stages, "schedule": kind, "virtual_stages": virtual_stages, "recompute": recompute}
    spec = job(layers, train={"global_batch_size": stages * rounds, "frozen": frozen}, **layout)
    ranks = [memory_of(spec, rank) for rank in range(stages)]
    assert worst_rank(spec).total == pytest.approx(max(each.total for each in ranks))
    held = [bytes_of_rank(spec, rank, spec.micro_batches) for rank in range(stages)]
    assert [each.activations for each in ranks] == held


def test_worst_rank_under_zb_v_may_be_the_last_of_equal_ranks():
    """Of those with three layers, as first chunks wait for a shorter time than second ones."""
    layout = {"pipeline": 10, "schedule": "zb-v", "virtual_stages": 2, "recompute": "selective"}
    spec = job(24, model={"dropout": 0.1, "sequence_length": 2048}, train={"global_batch_size": 16}, **layout)
    assert worst_rank(spec).total == max(memory_of(spec, rank).total for rank in range(10))


def test_memory_check_of_a_job_that_fits_looks_at_few_ranks(monkeypatch):
    spec = job(96, 12288, 96, tensor=8, pipeline=16, data=8, model={"sequence_length": 2048}, train={
        "global_batch_size": 1536})  # fmt: skip
    cluster = a100s(128)
    of_rank, looked_at = memory._memory, []
    monkeypatch.setattr(memory, "_memory", lambda passes, rank: looked_at.append(rank) or of_rank(passes, rank))
    assert fits(spec, cluster).fits
    assert looked_at == [0, 15, 1]  # none in between has more than the second one


def test_memory_shortage_names_missing_bytes_largest_part_and_a_change():
    answer = fits(job(96, 12288, 96, tensor=8), a100s())
    assert not answer.fits and answer.missing > 0
    assert answer.change == "parallel.pipeline: 8, on 64 GPUs"
    assert "GiB more than the 76.0 GiB that a rank may use; the largest part is optimizer" in str(answer)


@pytest.mark.parametrize(
    ("sections", "change"),
    [
        ({"data": 8, "zero": 0, "layers": 24, "hidden": 4096, "heads": 32}, "parallel.zero: 1"),
        (
            {"train": {"micro_batch_size": 64}, "model": {"sequence_length": 2048}, "layers": 16, "hidden": 2048},
            "train.micro_batch_size: 16",
        ),
        ({"model": {"sequence_length": 65536}, "layers": 32}, "train.head_tokens: 1024"),
        ({"model": {"sequence_length": 131072}, "layers": 32}, "parallel.recompute: full"),
    ],
)
def test_smallest_sufficient_memory_change_is_advised(sections, change):
    spec, cluster = job(**sections), a100s()
    answer = fits(spec, cluster)
    assert answer.change == change
    path, _, value = change.partition(": ")
    section, key = path.split(".")
    part = getattr(spec, section).model_copy(update={key: int(value) if value.isdigit() else value})
    assert fits(spec.model_copy(update={section: part}), cluster).fits


@pytest.mark.parametrize(
    ("model", "per_node", "change"),
    [
        ({}, 8, "parallel.tensor: 8"),
        ({}, 4, "parallel.tensor: 4"),
        ({"family": "llama", "kv_heads": 6}, 8, "parallel.tensor: 2"),
    ],
)
def test_tensor_size_is_advised_only_if_rules_and_nodes_allow_it(model, per_node, change):
    """With pipelines out of the question."""
    spec = job(2, 1536, 24, model={"sequence_length": 128, **model}, recompute="full", offload_layers=2, train={
        "optimizer": {"offload": True}, "micro_batch_size": 1, "head_tokens": 64})  # fmt: skip
    cluster = a100s(8, per_node)
    tensor = int(change.split()[-1])
    needed = worst_rank(spec.model_copy(update={"parallel": spec.layout.model_copy(update={"tensor": tensor})})).total
    device = replace(cluster.machine.accelerator, memory_bytes=1.001 * needed / (1 - RESERVE))
    cluster = replace(cluster, machine=replace(cluster.machine, accelerator=device))
    assert fits(spec, cluster).change == change
    less = replace(device, memory_bytes=0.9 * device.memory_bytes)
    change = fits(spec, replace(cluster, machine=replace(cluster.machine, accelerator=less))).change
    assert change is None or not change.startswith("parallel.tensor"), change


def test_planned_memory_keeps_a_reserve_of_the_device_free():
    assert usable_bytes(a100s()) == pytest.approx(0.96 * 79.2 * 2**30)


def test_snapshots_take_host_memory_for_two_slots():
    spec = job(tensor=2, data=4)
    assert host_bytes(spec, 8) == pytest.approx(2 * 12 * rank_parameters(spec)[0] / 4 * 8)
    assert host_bytes(spec, 16) == host_bytes(spec, 8), "the job has eight ranks"
    waiting = spec.model_copy(update={"parallel": spec.layout.model_copy(update={"offload_layers": 9})})
    activations = host_bytes(waiting, 8) - host_bytes(spec, 8)
    assert activations == pytest.approx(8 * host_bytes_of_rank(waiting, 0, waiting.micro_batches)) and activations > 0
    assert memory_of(waiting, 0).total < memory_of(spec, 0).total
    without = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"snapshots": "off"})})
    assert host_bytes(without, 8) == pytest.approx(12 * rank_parameters(spec)[0] / 4 * 8), "a copy to save from"
    frozen = job(tensor=2, data=4, train={"frozen": ("layers.0-6",)})
    assert host_bytes(frozen, 8) == snapshot_bytes(frozen), "without moments of what is frozen"


def test_copies_to_roll_back_to_take_as_much_as_snapshots_do():
    spec = job(tensor=2, data=4)
    rolls = spec.model_copy(update={"recovery": spec.recovery.model_copy(update={"nonfinite": "roll_back"})})
    assert host_bytes(rolls, 8) == pytest.approx(2 * host_bytes(spec, 8))


def with_offload(spec: JobSpec) -> JobSpec:
    """The job with its optimizer's state in host memory."""
    there = spec.train.optimizer.model_copy(update={"offload": True})
    return spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": there})})


def test_offloaded_optimizer_state_moves_from_device_to_host_memory():
    here = job(tensor=2, data=4)
    there, kept = with_offload(here), rank_parameters(here)[0] / 4
    assert memory_of(here, 0).optimizer == pytest.approx(12 * kept)
    assert memory_of(there, 0).optimizer == 0
    assert host_bytes(there, 8) - host_bytes(here, 8) == pytest.approx(8 * 12 * kept, rel=1e-6)
    core = cpu_machine(4, 4, 64 << 30)
    on_cores = memory_of(with_offload(job(train={"precision": "fp32"})), 0, core)
    assert on_cores.optimizer == 12 * rank_parameters(job())[0], "a copy of the weights more"


def test_optimizer_offload_is_advised_if_nothing_smaller_helps():
    large = job(24, 4096, 32)
    answer = fits(large, a100s())
    assert answer.change == "train.optimizer.offload: true"
    assert fits(with_offload(large), a100s()).fits


def test_sums_apart_take_the_largest_product_once_more():
    gpu = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)
    apart, within = (measured(MACHINES["h100-80gb"], replace(gpu, adds_wider=each)) for each in (False, True))
    spec = job(train={"micro_batch_size": 16}, model={"vocabulary_size": 100_000})
    more = memory_of(spec, 0, apart).total - memory_of(spec, 0, within).total
    assert 0 < more <= 4 * 100_000 * 1024
    assert memory_of(spec, 0, within) == memory_of(spec, 0)
    assert worst_rank(spec, apart).total == memory_of(spec, 0, apart).total
    one = job(train={"micro_batch_size": 64}, model={"vocabulary_size": 100_000})
    assert memory_of(one, 0, apart) == memory_of(one, 0), "a step's first product goes where the sum is"
    parts = job(train={"micro_batch_size": 64, "head_tokens": 1024}, model={"vocabulary_size": 100_000})
    assert memory_of(parts, 0, apart).total >= memory_of(parts, 0).total
