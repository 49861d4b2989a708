"""Jobs that are told to fit do, and those that are refused would not, by what the engine itself makes: whole steps of
ranks on tensors without memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_rank import FakeRank, host_memory_apart, pretended_gpu

from manta.service.planner.hardware import Cluster
from manta.service.planner.memory import fits, memory_of, worst_rank
from manta.workers.config import JobSpec
from manta.workers.spec.rules import find_problems
from tests.service.support.planned import a100s, job

FAMILIES = ({"family": "gpt"}, {"family": "llama", "kv_heads": 4}, {"family": "qwen", "kv_heads": 4, "head_dim": 64})
CHUNKS = {"interleaved": 2, "zb-v": 2}
MODULES = ("norm", "mlp_activation", "core_attention")


def drawn(seed: int) -> tuple[JobSpec, Cluster]:
    """A job, and a cluster whose devices have about as much memory as it is told to take."""
    draw = random.Random(seed)
    while find_problems(spec := _job(draw)):
        pass
    cluster = a100s(-(-spec.layout.world_size // 8))
    memory = worst_rank(spec).total * draw.uniform(0.85, 1.25)
    device = replace(cluster.machine.accelerator, memory_bytes=memory)
    return spec, replace(cluster, machine=replace(cluster.machine, accelerator=device))


def saving(seed: int) -> JobSpec:
    """A job that makes few logits at once, or has activations or the optimizer's state in host memory."""
    spec, draw = drawn(seed)[0], random.Random(seed)
    few: dict[str, Any] = {"head_tokens": draw.choice((0, 100, 512))}
    layers = draw.choice((0, 1, 2, 9)) if few["head_tokens"] else draw.choice((1, 2, 9))
    few["optimizer"] = spec.train.optimizer.model_copy(update={"offload": draw.random() < 0.4})
    return spec.model_copy(
        update={
            "train": spec.train.model_copy(update=few),
            "parallel": spec.layout.model_copy(update={"offload_layers": layers}),
        }
    )


def _job(draw: random.Random) -> JobSpec:
    pipeline = draw.choice((1, 2, 3, 4))
    schedule = draw.choice(("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")) if pipeline > 1 else "1f1b"
    data, size, heads = draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice((8, 16))
    chunks = CHUNKS.get(schedule, 1)
    micro_batches = pipeline * draw.choice((1, 2)) if schedule == "interleaved" else draw.choice((1, 2, 4, 6))
    train: dict[str, Any] = {"precision": draw.choice(("bf16", "fp32")), "micro_batch_size": size}
    train["global_batch_size"] = size * micro_batches * data
    if draw.random() < 0.2:
        train["attention"] = "explicit"
    if draw.random() < 0.1:
        train["frozen"] = ["embedding"]
    layout: dict[str, Any] = {"tensor": draw.choice((1, 2, 4)), "pipeline": pipeline, "data": data}
    layout |= {"schedule": schedule, "virtual_stages": chunks, "zero": draw.choice((0, 1))}
    layout["recompute"] = draw.choice(("none", "selective", "full"))
    if layout["recompute"] == "selective":
        layout["recompute_modules"] = tuple(draw.sample(MODULES, draw.choice((1, 2, 3))))
    if layout["tensor"] > 1 and draw.random() < 0.25:
        layout["sequence_parallel"] = False
    hidden, layers = heads * draw.choice((64, 128)), pipeline * chunks * draw.choice((1, 2))
    if draw.random() < 0.3:
        layout["stage_layers"] = tuple(draw.choice((1, 2, 3)) for _ in range(pipeline * chunks))
        layers = sum(layout["stage_layers"])
    return job(layers, hidden, heads, model=_model(draw), train=train, **layout)


def _model(draw: random.Random) -> dict[str, Any]:
    model: dict[str, Any] = dict(draw.choice(FAMILIES))
    model |= {"sequence_length": draw.choice((256, 1024, 2048)), "vocabulary_size": draw.choice((1000, 32000, 50257))}
    if draw.random() < 0.15:
        model["dropout"] = 0.1
    if model["family"] == "llama" and draw.random() < 0.25:
        model["sliding_window"] = 128
    return model


def made_bytes(spec: JobSpec, stage: int) -> int:
    """The peak of a rank of this stage in a step of the engine."""
    with pretended_gpu(), host_memory_apart():
        return FakeRank(spec, stage * spec.layout.tensor).step()["Total"]


@dataclass(frozen=True)
class Verdict:
    """Of one draw."""

    planned: float
    made: int
    fits: bool
    memory: float
    """Of a device."""

    @property
    def breaks(self) -> bool:
        """It was planned to fit and does not."""
        return self.fits and self.made > self.memory

    @property
    def is_wrong(self) -> bool:
        """It was refused and would fit, with 5% to spare."""
        return not self.fits and self.made <= 0.95 * self.memory


def verdict(seed: int, all_stages: bool) -> Verdict:
    """Of one draw, by the stage that is planned to take most, or the most of that one, both ends and the one behind the
    first."""
    spec, cluster = drawn(seed)
    fit, last = fits(spec, cluster), spec.layout.pipeline - 1
    stages = {fit.memory.rank} | ({0, min(1, last), last} if all_stages else set())
    made = max(made_bytes(spec, stage) for stage in stages)
    return Verdict(fit.memory.total, made, fit.fits, cluster.machine.accelerator.memory_bytes)


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 7])  # all families and schedules
def test_planned_memory_of_drawn_jobs_matches_the_engine(seed):
    answer = verdict(seed, all_stages=False)
    assert answer.planned == pytest.approx(answer.made, rel=0.02)
    assert not answer.breaks and not answer.is_wrong


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 100), marks=pytest.mark.soak)], ids=str)
def test_planned_memory_of_memory_saving_jobs_matches_the_engine(seeds):
    for seed in seeds:
        spec = saving(seed)
        stage = worst_rank(spec).rank
        assert memory_of(spec, stage).total == pytest.approx(made_bytes(spec, stage), rel=0.03), seed


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_planned_memory_of_500_jobs_matches_the_engine(first):
    answers = [verdict(seed, all_stages=True) for seed in range(first, first + 50)]
    assert [seed for seed, each in enumerate(answers, first) if each.breaks] == []
    refused = [each for each in answers if not each.fits]
    assert sum(each.is_wrong for each in refused) <= 0.02 * len(refused)
    ratios = [each.planned / each.made for each in answers]
    assert [each for each in ratios if not 0.96 < each < 1.04] == []
    print(f"{first}: planned {min(ratios):.3f} to {max(ratios):.3f} of made, {len(refused)} of {len(answers)} refused")
