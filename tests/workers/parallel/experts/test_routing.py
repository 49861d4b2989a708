"""Which experts a token goes to, against sorting in plain Python; gradients of its weights, against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from engine_specs import spec
from plain_llama import PlainExperts

from manta.workers.config import MoeConfig
from manta.workers.parallel.experts.routing import (
    chosen_experts,
    logits_gradient,
    scores_gradient,
    scores_of,
    weights_of,
)

CONFIGS = [
    {"experts": 6, "per_token": 2},
    {"experts": 5, "per_token": 1, "normalise": False, "scale": 2.5},
    {"experts": 8, "per_token": 3, "score": "sigmoid", "groups": 4, "groups_per_token": 2},
    {"experts": 4, "per_token": 4, "score": "sigmoid", "scale": 0.5},
    {"experts": 6, "per_token": 2, "groups": 6, "groups_per_token": 3},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_tokens_choose_the_highest_scores_and_of_equal_ones_the_first(config, biased):
    job = spec(model={"family": "llama", "moe": {"ffn_hidden_size": 1, **config}})
    plain, moe, generator = PlainExperts(job), job.model.moe, torch.Generator().manual_seed(1)
    scores = torch.randint(4, (200, moe.experts), generator=generator) / 4.0  # many are equal
    bias = torch.randint(-2, 3, (moe.experts,), generator=generator) / 4.0 if biased else None
    plain.bias = plain.bias if bias is None else bias.tolist()
    chosen = chosen_experts(scores, bias, moe)
    expected = [torch.tensor(plain.choice(token)).nonzero().flatten().tolist() for token in scores.tolist()]
    assert chosen.dtype == torch.int32 and chosen.tolist() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_still_choose_different_experts(value):
    moe = MoeConfig(experts=4, per_token=2, ffn_hidden_size=1)
    chosen = chosen_experts(torch.full((3, 4), value), None, moe)
    assert chosen.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gradient_of_the_weights_is_that_of_autograd(config):
    moe = MoeConfig(ffn_hidden_size=1, **config)
    logits = torch.randn(9, moe.experts, dtype=torch.float64, requires_grad=True)
    scores = scores_of(logits, moe)
    chosen = chosen_experts(scores.detach(), None, moe)
    weights = weights_of(scores, chosen, moe)
    grads = torch.randn_like(weights)
    (expected,) = torch.autograd.grad(weights, logits, grads)
    with torch.no_grad():
        computed = logits_gradient(scores_gradient(grads, scores, chosen, moe), scores, moe)
    assert torch.allclose(computed, expected, rtol=1e-12, atol=1e-12)
