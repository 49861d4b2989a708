"""Whole steps over torch.distributed's own process groups at any size, one rank of each role, on tensors without memory
that say that they lie on a GPU: nothing breaks, the host waits for the device nowhere but where it is meant to, and the
peak of memory is what is told before."""

from __future__ import annotations

import itertools
import time
from typing import Any
from unittest import mock

import pytest
from engine_specs import spec
from fake_rank import BalancedNumbers, FakeRank, balanced_experts, pretended_gpu
from papers import MODELS_WITH_EXPERTS

from manta.workers.accounting.device_bytes import bytes_of_stage
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.comm.grid import Coordinates, RankGrid
from manta.workers.config import JobSpec
from manta.workers.liveness.device_trail import DeviceTrail
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path
from manta.workers.parallel.experts.layer import ExpertMLP

MEANT = {
    "workers/parallel/data/zero.py _read": "the step's numbers, once, when all of it is queued",
    "workers/parallel/data/loss_scaling.py value": "the scale lies in host memory",
    "workers/parallel/data/loss_scaling.py after_finite": "so do the good steps since",
    "workers/parallel/data/loss_scaling.py after_overflow": "as above",
}
"""Where the host may wait in a step, and why."""
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def roles(job: JobSpec) -> list[int]:
    """A rank for each role: first, middle and last stage; first and another rank of tensor and data group."""
    layout = job.layout
    stages = sorted({0, layout.pipeline // 2, layout.pipeline - 1})
    places = itertools.product(range(min(2, layout.data)), stages, range(min(2, layout.tensor)))
    grid = RankGrid(layout)  # the first context rank has the end of the sequence
    return [grid.rank(Coordinates(tensor, stage, data, 0)) for data, stage, tensor in places]


def step_of(job: JobSpec, rank: int) -> int:
    """A step of one rank; bytes at its peak."""
    with pretended_gpu() as syncs, balanced_experts(job) as chosen:
        fake = FakeRank(job, rank)
        peak = fake.step()["Total"]
    assert set(syncs.by_function) <= set(MEANT)
    if chosen is not None:  # once for each layer with experts and forward pass, and not for recomputation
        layers = sum(isinstance(module, ExpertMLP) for module in fake.engine.model.modules())
        assert chosen.read_times == layers * job.micro_batches
    return peak


FAMILIES = ("gpt", "llama", "qwen")


@pytest.mark.parametrize(
    ("schedule", "family"),
    [
        # Each schedule once, in which each meets what differs in turn; in the soak the others.
        pytest.param(schedule, family, marks=[] if (row + column) % 3 == 0 else [pytest.mark.soak])
        for row, schedule in enumerate(SCHEDULES)
        for column, family in enumerate(FAMILIES)
    ],
)
def test_fake_process_groups_run_a_step_of_every_schedule_and_family(schedule, family):
    """Families and schedules with what differs between them in turn; each time another rank of eight."""
    number = list(SCHEDULES).index(schedule) + len(family)
    layout = {"tensor": 2, "pipeline": 2, "data": 2, "schedule": schedule, "virtual_stages": SCHEDULES[schedule]}
    layout |= {"recompute": ("none", "selective", "full")[number % 3], "zero": number % 2}
    layout |= {"sequence_parallel": number % 4 > 0}
    train = {"precision": ("bf16", "fp16")[number % 2], "deterministic": ("layout", "elastic")[number % 3 == 0]}
    numbers = {"global_batch_size": 8, "micro_batch_size": 1, "z_loss": (0.0, 1e-4)[number % 2]}
    job = spec(model={"family": family, "layers": 4}, train=train | numbers, parallel=layout)
    ranks = roles(job)
    step_of(job, ranks[number % len(ranks)])


LLAMA_70B: dict[str, Any] = {
    "family": "llama",
    "layers": 80,
    "hidden_size": 8192,
    "heads": 64,
    "kv_heads": 8,
    "ffn_hidden_size": 28672,
    "sequence_length": 4096,
    "vocabulary_size": 32000,
}
LONG = LLAMA_70B | {"sequence_length": 131_072}
MIXTRAL, QWEN_235B, DEEPSEEK_V3 = (
    MODELS_WITH_EXPERTS[name] for name in ("Mixtral 8x7B", "Qwen3 235B A22B", "DeepSeek V3")
)
LARGE: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "Llama 70B on 512 ranks": (LLAMA_70B, {"tensor": 8, "pipeline": 8, "data": 8}, 16),
    "Llama 70B, ZeRO 3 on 64 ranks": (LLAMA_70B, {"data": 64, "zero": 3, "recompute": "full"}, 2),
    "Llama 70B, ZeRO 3 on 512 ranks": (LLAMA_70B, {"tensor": 2, "data": 256, "zero": 3, "recompute": "full"}, 1),
    "Llama 70B, 131,072 tokens, context 8": (LONG, {"tensor": 8, "pipeline": 2, "context": 8}, 2),
    "Llama 70B, 131,072 tokens, context 16 in a ring": (
        LONG,
        {"tensor": 4, "context": 16, "context_method": "ring", "zero": 3},
        1,
    ),
    "Llama 70B, adapters, ZeRO 3 on 8 ranks": (LLAMA_70B, {"data": 8, "zero": 3, "recompute": "full"}, 2),
    "Llama 70B, adapters, ZeRO 3, 131,072 tokens": (LONG, {"tensor": 2, "context": 8, "zero": 3}, 1),
    "Mixtral 8x7B on 64 ranks": (MIXTRAL, {"tensor": 2, "pipeline": 4, "data": 8, "expert": 8}, 8),
    "Mixtral 8x7B on 64 ranks, gathered": (
        MIXTRAL,
        {"tensor": 2, "data": 32, "expert": 2, "recompute": "full", "sequence_parallel": True},
        2,
    ),
    "Qwen3 235B on 256 ranks": (QWEN_235B, {"tensor": 4, "pipeline": 8, "data": 8, "expert": 8}, 8),
    "Qwen3 235B on 256 ranks, whole experts": (
        QWEN_235B,
        {"tensor": 4, "pipeline": 8, "data": 8, "expert": 32, "expert_tensor": 1},
        8,
    ),
    "DeepSeek V3 on 2,048 ranks": (
        DEEPSEEK_V3,
        {
            "pipeline": 16,
            "data": 128,
            "expert": 64,
            "schedule": "zb-v",
            "virtual_stages": 2,
            "recompute": "selective",
            "recompute_modules": ["core_attention", "norm", "mlp_activation"],
        },
        32,
    ),
    "GPT 530B on 2,240 ranks": (
        {
            "family": "gpt",
            "layers": 105,
            "hidden_size": 20480,
            "heads": 128,
            "sequence_length": 2048,
            "vocabulary_size": 51200,
        },
        {"tensor": 8, "pipeline": 35, "data": 8, "recompute": "full"},
        40,
    ),
}
"""Model, layout, micro-batches."""


def large(name: str) -> JobSpec:
    """A job of LARGE."""
    model, layout, micro_batches = LARGE[name]
    train = {"precision": "bf16", "global_batch_size": micro_batches * layout.get("data", 1), "micro_batch_size": 1}
    train["lora"] = {} if "adapters" in name else None
    return spec(model=model, train=train, parallel=layout)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "role"), [(name, role) for name in LARGE for role in range(len(roles(large(name))))])
def test_fake_process_groups_take_the_planned_memory_at_real_sizes(name, role):
    job = large(name)
    rank = roles(job)[role]
    passes = StepPeak(job, rows=None if job.model.moe is None else BalancedNumbers(job).rows)
    planned = bytes_of_stage(passes, RankGrid(job.layout).coordinates(rank).pipeline, job.micro_batches)
    assert planned.total == pytest.approx(step_of(job, rank), rel=0.03)


@pytest.mark.parametrize("deterministic", ["layout", "elastic"])
def test_weights_that_come_and_go_make_the_host_wait_nowhere_else(deterministic):
    layout = {"tensor": 2, "data": 4, "zero": 3, "recompute": "full"}
    numbers = {"global_batch_size": 11, "micro_batch_size": 1, "precision": "fp16", "deterministic": deterministic}
    step_of(spec(model={"layers": 4}, train=numbers, parallel=layout), 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_host_waits_for_experts_once_for_each_layer_and_forward_pass(dispatch, schedule):
    """Not where the layer is recomputed, nor in backward."""
    moe = {"experts": 8, "per_token": 2, "ffn_hidden_size": 32, "first_dense": 1, "shared": 1}
    layout = {"tensor": 2, "pipeline": 2, "data": 4, "expert": 4, "expert_dispatch": dispatch, "recompute": "full"}
    layout |= {"schedule": schedule, "virtual_stages": SCHEDULES[schedule]}
    train = {"global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16"}
    step_of(spec(model={"family": "llama", "layers": 4, "moe": moe}, train=train, parallel=layout), 3)


class PassedAtOnce:
    """An event of a device that is never behind its host."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: PassedAtOnce) -> float:
        return 1000 * (later.at - self.at)


@pytest.mark.parametrize(
    ("schedule", "train"), [("1f1b", {}), ("zb-v", {"deterministic": "elastic", "precision": "fp16"})]
)
def test_a_device_is_marked_at_all_that_a_step_communicates(tmp_path, schedule, train):
    """Whatever a host enters, its device is ready for in the end, and waits for nothing any more."""
    layout = {"tensor": 2, "pipeline": 2, "data": 2, "schedule": schedule, "virtual_stages": SCHEDULES[schedule]}
    numbers = {"global_batch_size": 4, "micro_batch_size": 1}
    job = spec(model={"family": "gpt", "layers": 4}, train=train | numbers, parallel=layout)
    progress = Progress.shared(tmp_path, 0)
    trail = DeviceTrail(PassedAtOnce, progress)
    with pretended_gpu(), mock.patch("manta.workers.comm.comm.trail_for", lambda *_: trail):
        rank = FakeRank(job, 0)
        rank.comm.progress = rank.comm.step.record = progress
        for step in (1, 2, 3):
            rank.comm.step.begin(step)
            rank.step()
    trail.poll()
    reader = ProgressReader(progress_path(tmp_path, 0))
    record = reader.read()
    reader.close()
    took, own = trail.step_seconds
    trail.forget()
    assert record.device.counts == record.counts
    assert min(record.counts[axis] for axis in ("tensor", "data", "world", "sent", "received")) > 0
    assert (record.device.waits, record.device.pending) == (False, 0)
    assert (record.device.phase, record.device.step) == (record.phase, 3) == ("optimizer", 3)
    assert 0.0 < own < took
