"""Training with 8-bit products: the curve of bf16 up to their rounding, the same under every layout up to that of
bf16."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from engine_specs import axes, document
from plain_gpt import random_weights
from plain_llama import plain_model
from rank_programs import Precise, run_precise

from manta.workers.spec.reading import parse_job_spec

KINDS = ("tensorwise", "rowwise")
STEPS = 60
LAYOUTS: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((2, 1, 1), {}),
    ((1, 2, 1), {"schedule": "zb-h1"}),
    ((2, 1, 1), {"sequence_parallel": False, "recompute": "full"}),
    (
        (1, 1, 2),
        {"gather": "beside_forward", "recompute": "selective", "recompute_modules": ["norm", "mlp_activation"]},
    ),
    ((2, 1, 2), {"zero": 3, "recompute": "full"}),
    ((2, 2, 2), {}),
)


def job(
    fp8: str,
    layout: tuple[int, int, int] = (1, 1, 1),
    train: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **parallel: Any,
):
    """A small job that learns something in 60 steps."""
    numbers = {"steps": STEPS, "precision": "bf16", "fp8": fp8, "micro_batch_size": 2}
    return document(
        model={"layers": 2, "hidden_size": 64, "heads": 4, "sequence_length": 16} | (model or {}),
        train=numbers | {"optimizer": {"learning_rate": 3e-3, "warmup_steps": 5}} | (train or {}),
        parallel={**axes(layout), **parallel},
    )


@functools.cache
def batches() -> list[torch.Tensor]:
    """A global batch for each step: sequences that count up in ones, twos or threes."""
    generator = torch.Generator().manual_seed(2)
    starts = torch.randint(64, (STEPS, 8, 1), generator=generator)
    strides = torch.randint(1, 4, (STEPS, 8, 1), generator=generator)
    return list((starts + strides * torch.arange(17)) % 64)


def run(ranks: Any, jobs: list[dict[str, Any]], steps: int) -> list[list[Precise]]:
    """Results by job, then by rank."""
    weights = random_weights(parse_job_spec(jobs[0]), spread=0.03)
    by_rank = ranks.run(parse_job_spec(jobs[0]).layout, run_precise, jobs, weights, batches()[:steps])
    return [[rank[number] for rank in by_rank] for number in range(len(jobs))]


@pytest.fixture(scope="module")
def curves(ranks) -> dict[str, list[float]]:
    """Losses of one rank."""
    kinds = ("off", *KINDS)
    ran = run(ranks, [job(kind) for kind in kinds], STEPS)
    return {kind: rank.losses for kind, (rank,) in zip(kinds, ran, strict=True)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_follows_that_of_16_bits(curves, kind):
    expected, losses = curves["off"], curves[kind]
    assert expected[-1] < expected[0] / 2, "the job learns"
    assert losses != expected
    assert losses[:10] == pytest.approx(expected[:10], rel=2e-3)
    assert losses == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        *(("tensorwise", LAYOUTS[::2]), ("rowwise", LAYOUTS[1::2])),
        *(pytest.param(kind, LAYOUTS, marks=pytest.mark.soak) for kind in KINDS),
    ],
    ids=["tensorwise, some", "rowwise, some", "tensorwise, all", "rowwise, all"],
)
def test_layouts_follow_one_curve(ranks, curves, kind, layouts):
    for layout, parallel in layouts:
        (by_rank,) = run(ranks, [job(kind, layout, **parallel)], 10)
        for rank in by_rank:
            assert rank.losses == by_rank[0].losses, "all ranks say the same"
            assert rank.losses == pytest.approx(curves[kind][:10], rel=2e-3), (layout, parallel)


def test_latent_attention_in_8_bits_follows_the_curve_of_16_on_two_ranks(ranks):
    latent = {"q_rank": 32, "kv_rank": 16, "rope_size": 16, "nope_size": 16, "value_size": 16}
    model = {"family": "deepseek", "latent_attention": latent, "sequence_length": 32}
    curves = {}
    for kind, layout in itertools.product(("off", "rowwise"), ((1, 1, 1), (2, 1, 1))):
        made = parse_job_spec(job(kind, layout, model=model))
        weights = random_weights(made, spread=0.03, model=plain_model(made))
        windows = [torch.cat([batch, batch[:, 1:]], 1)[:, :33] for batch in batches()[:10]]
        ran = ranks.run(made.layout, run_precise, [job(kind, layout, model=model)], weights, windows)
        curves[kind, layout] = ran[0][0].losses
    expected = curves["off", (1, 1, 1)]
    for losses in curves.values():
        assert losses == pytest.approx(expected, rel=2e-3)
    assert len({tuple(losses) for losses in curves.values()}) > 2, "8 bits are others"


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_elastic_training_has_the_same_bits_with_any_number_of_replicas(ranks, kind):
    """With ZeRO 3 layers use the same memory in turns, and so do their weights in 8 bits."""
    elastic, model = {"deterministic": "elastic"}, {"layers": 5}
    layouts = ((1, 1), (2, 1), (2, 3))
    one, two, sharded = (
        run(ranks, [job(kind, (1, 1, data), elastic, model, zero=zero)], 5)[0][0].losses for data, zero in layouts
    )
    assert one == two == sharded
