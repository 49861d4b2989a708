"""Experts spread over ranks: loss, norm and every gradient are those of a plain model on one machine, whatever the
layout, the exchange, the schedule and what is recomputed."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from engine_specs import document
from plain_gpt import random_weights
from plain_lora import adapted_model
from rank_programs import assemble, evaluate, light, run_steps

from manta.workers.spec.parameters import frozen_names
from manta.workers.spec.reading import parse_job_spec

MOE = {"experts": 6, "per_token": 2, "ffn_hidden_size": 12, "first_dense": 1, "balance": {"weight": 0.05}}
SHARED = {"shared": 1, "shared_gate": True, "score": "sigmoid", "router_z_loss": 0.01}
RECOMPUTED = {"recompute": "full", "recompute_every": 1}
JOBS: list[dict[str, Any]] = [
    {"data": 2, "expert": 2},
    {"data": 3, "expert": 3, "zero": 0, "sequences": 10, "moe": SHARED},
    {"data": 4, "expert": 2, "zero": 0, "sequences": 9},
    {"data": 4, "expert": 2, "sequences": 13, **RECOMPUTED, "moe": SHARED},
    {"data": 6, "expert": 6, "sequences": 7},
    {"data": 6, "expert": 3, "sequences": 17, "micro_batch_size": 3, "recompute": "selective"},
    {"data": 2, "expert": 2, "tensor": 2, "sequences": 7},
    {"data": 2, "expert": 2, "tensor": 3, "sequences": 5, "sequence_parallel": False, "moe": SHARED},
    {"data": 3, "expert": 3, "tensor": 2, "zero": 0, **RECOMPUTED},
    {"context": 2, "expert": 2, "context_method": "ring"},
    {"data": 2, "context": 2, "expert": 4, "sequences": 5, "moe": {**SHARED, "experts": 8}},
    {"data": 3, "context": 2, "expert": 3, "sequences": 7, "context_method": "all_to_all"},
    {"data": 2, "context": 2, "expert": 2, "tensor": 2, "sequences": 7},
    *(
        {"data": 2, "expert": 2, "pipeline": 2, "schedule": schedule, "virtual_stages": chunks, "sequences": 15, **more}
        for schedule, chunks, more in (
            ("gpipe", 1, {}),
            ("1f1b", 1, RECOMPUTED),
            ("zb-h1", 1, {"moe": SHARED}),
            ("zb-v", 2, {}),
            ("zb-v", 2, RECOMPUTED),
        )
    ),
    {
        "data": 2,
        "expert": 2,
        "pipeline": 2,
        "schedule": "interleaved",
        "virtual_stages": 2,
        "sequences": 16,
        "tensor": 2,
    },
    {"data": 3, "expert": 3, "pipeline": 2, "schedule": "zb-h1", "sequences": 14, "offload_layers": 1},
    {"data": 2, "expert": 2, "sequences": 7, "train": {"frozen": ["layers.1.mlp.experts.0", "layers.2"]}},
    {"data": 2, "expert": 2, "zero": 0, "train": {"lora": {"rank": 2, "targets": ["q", "v"]}}},
    {"data": 2, "expert": 2, "train": {"optimizer": {"offload": True, "beta1": 0.0, "clip_norm": 0.0}}},
]
OUTSIDE = ("sequences", "moe", "micro_batch_size", "train")


def job(given: dict[str, Any], dispatch: str) -> dict[str, Any]:
    """One step of a small model without momentum, so that the first moment is the gradient itself."""
    parallel = {key: value for key, value in given.items() if key not in OUTSIDE}
    tensor = parallel.get("tensor", 1)
    heads = {"heads": tensor, "kv_heads": tensor} if tensor == 3 else {"heads": 4, "kv_heads": 2}
    if parallel.get("context_method") == "all_to_all":
        heads["kv_heads"] = 4
    train = {
        "steps": 1,
        "global_batch_size": given.get("sequences", 8),
        "micro_batch_size": given.get("micro_batch_size", 2),
        "optimizer": {"beta1": 0.0, "clip_norm": 0.0},
    }
    return document(
        model={
            "family": "llama", "layers": 4, "hidden_size": 12, "ffn_hidden_size": 24, "head_dim": 4, **heads,
            "vocabulary_size": 256, "moe": {**MOE, **given.get("moe", {})},
        },
        train=train | given.get("train", {}),
        parallel={"bucket_megabytes": 0.003, **parallel, "expert_dispatch": dispatch},
    )  # fmt: skip


def windows(sequences: int) -> torch.Tensor:
    """A global batch [B, 9]."""
    return torch.randint(1, 256, (sequences, 9), generator=torch.Generator().manual_seed(sequences))


@cache
def reference(number: int):
    """(weights, loss, norm, gradients) of the plain model, in fp64."""
    spec = parse_job_spec(job(JOBS[number], "all_gather"))
    model = adapted_model(spec).double()
    weights = random_weights(spec, spread=0.1, model=model)
    model.load(weights)
    loss = model.loss(windows(spec.train.global_batch_size))
    (loss + model.balance_loss()).backward()
    assert model.margin() > 1e-5, "no token is between two experts"
    trained = ((name, each) for name, each in model.named_parameters() if name not in frozen_names(spec))
    gradients = {name: each.grad for name, each in trained if each.requires_grad}
    norm = math.sqrt(sum(each.square().sum().item() for each in gradients.values()))
    return weights, loss.item(), norm, gradients


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("number", range(len(JOBS)), ids=lambda number: str(JOBS[number]))
def test_gradients_with_spread_experts_equal_those_of_a_plain_model(ranks, number, dispatch):
    weights, loss, norm, gradients = reference(number)
    one = job(JOBS[number], dispatch)
    spec, batch = parse_job_spec(one), windows(one["train"]["global_batch_size"])
    by_rank = ranks.run(spec.layout, run_steps, [one], [light(weights)], [[batch]], torch.float64)
    for (steps,) in by_rank:
        assert steps.losses == [pytest.approx(loss, rel=1e-10)]
        assert steps.grad_norms == [pytest.approx(norm, rel=1e-10)]
    shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    whole = assemble(shapes, [placed for (steps,) in by_rank for placed in steps.gradients])
    for name, expected in gradients.items():
        assert (whole[name] - expected).norm() <= 1e-10 * expected.norm() + 1e-13 * norm, name
    validated = ranks.run(spec.layout, evaluate, one, light(weights), batch)
    assert validated == [pytest.approx(loss, rel=1e-10)] * len(validated)
