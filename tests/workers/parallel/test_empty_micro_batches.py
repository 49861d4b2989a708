"""Micro-batches without samples pass through every schedule, and change nothing: ranks over which experts are spread
compute micro-batches in lockstep, and some have fewer than others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import document
from plain_gpt import random_weights
from plain_lora import adapted_model
from rank_programs import END, light, run_steps, run_steps_beside_nothing

from manta.workers.spec.reading import parse_job_spec

GROUPED = {"family": "llama", "kv_heads": 2}
JOBS: list[dict[str, dict[str, Any]]] = [
    {"model": {"dropout": 0.1}, "train": {"attention": "explicit"}, "parallel": {"recompute": "selective"}},
    {"data": {"documents": "apart", "source": "megatron", "tokenizer": "t.json"}, "train": {"head_tokens": 5}},
    *(
        {"parallel": {"pipeline": 2, "tensor": 2, "schedule": name, "virtual_stages": chunks, "recompute": recompute}}
        for name, chunks, recompute in (
            ("gpipe", 1, "full"),
            ("1f1b", 1, "none"),
            ("interleaved", 2, "selective"),
            ("zb-h1", 1, "none"),
            ("zb-v", 2, "full"),
        )
    ),
    {
        "parallel": {"pipeline": 2, "tensor": 2, "sequence_parallel": False, "offload_layers": 1},
        "train": {"z_loss": 0.01},
    },
    *(
        {
            "model": GROUPED,
            "parallel": {"context": 2, "context_method": method, "data": 2},
            "train": {"attention": attention},
        }
        for method, attention in (
            ("all_gather", "sdpa"),
            ("all_to_all", "explicit"),
            ("ring", "sdpa"),
            ("ring", "explicit"),
        )
    ),
    {"parallel": {"data": 2, "zero": 0, "tensor": 2}, "train": {"lora": {"rank": 2, "dropout": 0.2}}},
]


def job(given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A small job of eight sequences a step."""
    model = {"hidden_size": 16, "vocabulary_size": 256} | given.get("model", {})
    train = {"steps": 2, "micro_batch_size": 2, "optimizer": {"beta1": 0.0}} | given.get("train", {})
    return document(model=model, data=given.get("data", {}), train=train, parallel=given.get("parallel", {}))


@pytest.mark.parametrize("given", JOBS, ids=str)
def test_micro_batches_without_samples_change_no_bit_of_a_step(ranks, given):
    spec = parse_job_spec(job(given))
    windows = torch.randint(4, 256, (8, 9), generator=torch.Generator().manual_seed(3))
    windows[::2, 4] = END
    weights = random_weights(spec, model=adapted_model(spec))
    given = [job(given)], [light(weights)], [[windows, windows.flip(0)]], torch.float32
    expected, found = (ranks.run(spec.layout, program, *given) for program in (run_steps, run_steps_beside_nothing))
    for (one,), (other,) in zip(expected, found, strict=True):
        assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)
        for a, b in zip(one.parameters, other.parameters, strict=True):
            assert a[:2] == b[:2] and torch.equal(a[2], b[2]), a[0]
