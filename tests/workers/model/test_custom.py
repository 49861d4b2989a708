"""A user's model is trained under every layout to the numbers that it has on one machine, or refused in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_specs import axes, document, spec
from plain_gpt import random_weights
from plain_llama import PlainLlama, PlainLlamaLayer, PlainRMSNorm
from rank_programs import assert_like, gradients_of, run_steps
from torch import nn

from manta.workers.errors import ModelError
from manta.workers.model.families import custom_parts
from manta.workers.spec.reading import parse_job_spec

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_model" / "src"
MODEL = {"family": "custom", "entrypoint": "parallel_blocks:build", "kv_heads": 2, "ffn_hidden_size": 40}


class PlainMLP(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)) ** 2)


class PlainParallelLayer(nn.Module):
    def __init__(self, spec, index):
        super().__init__()
        self.norm = PlainRMSNorm(spec.model.hidden_size, spec.model.norm_epsilon)
        self.attention = PlainLlamaLayer(spec, index).attention
        self.mlp = PlainMLP(spec.model.hidden_size, spec.model.ffn_size)

    def forward(self, x, drop=None, index=0):
        return x + self.attention(self.norm(x)) + self.mlp(self.norm(x))


def run_with_example(comm, example, *arguments):
    """The example is not installed where tests run."""
    if example not in sys.path:
        sys.path.append(example)
    return run_steps(comm, *arguments)


LAYOUTS = [
    {"recompute": "selective", "recompute_modules": ["norm", "core_attention"]},
    {**axes((2, 2, 2)), "recompute": "full"},
    {**axes((2, 2, 1)), "schedule": "zb-v", "virtual_stages": 2},
    {**axes((2, 1, 2)), "zero": 3, "recompute": "full"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_and_gradients_are_those_of_the_same_model_on_one_machine(ranks, layout):
    job = document(model=MODEL, train={"steps": 1, "optimizer": {"beta1": 0.0, "clip_norm": 0.0}}, parallel=layout)
    parsed = parse_job_spec(job)
    plain = PlainLlama(parsed)
    plain.layers = nn.ModuleList(PlainParallelLayer(parsed, index) for index in range(4))
    weights = random_weights(parsed, model=plain.double())
    windows = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(5))
    loss = plain.load(weights).loss(windows)
    loss.backward()
    by_rank = ranks.run(parsed.layout, run_with_example, str(EXAMPLE), [job], [weights], [[windows]], torch.float64)
    trained = [rank[0] for rank in by_rank]
    assert_like(plain, loss, trained, gradients_of(trained, weights))


@pytest.fixture
def importable(tmp_path, monkeypatch):
    (tmp_path / "half_a_model.py").write_text(
        "class Half:\n    def norm(self, model): ...\n\ndef build(model):\n    return Half()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"entrypoint": "no_such_package:build"}, "no_such_package:build cannot be imported on this node: No module"),
        ({"entrypoint": "half_a_model:make"}, "model.entrypoint half_a_model:make: half_a_model has no make"),
        ({"entrypoint": "half_a_model:build"}, "what half_a_model:build returns has no embedding, layer: see docs"),
        ({"dropout": 0.1}, "parallel_blocks has no dropout"),
        ({"options": {"depth": 3}}, "parallel_blocks takes no options, not depth"),
    ],
)
def test_a_model_that_cannot_be_used_says_why(importable, model, sentence):
    with pytest.raises(ModelError, match=sentence):
        custom_parts(spec(model={**MODEL, **model}).model)
