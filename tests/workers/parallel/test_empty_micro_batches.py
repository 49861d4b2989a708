"""Micro-batches without samples pass through every schedule, and change nothing: ranks over which experts are spread
compute micro-batches in lockstep, and some have fewer than others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import document
from one_layer import lone_rank
from plain_gpt import random_weights
from plain_lora import adapted_model
from rank_programs import END, light, own_micro_batches, run_steps, run_steps_beside_nothing

from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.spec.reading import parse_job_spec

GROUPED = {"family": "llama", "kv_heads": 2}
LATENT = {
    "family": "deepseek",
    "latent_attention": {"q_rank": 8, "kv_rank": 8, "rope_size": 4, "nope_size": 6, "value_size": 6},
    "moe": {"experts": 4, "per_token": 2, "ffn_hidden_size": 8, "shared": 1, "balance": {"bias_rate": 0.1}},
}
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
    *(
        {
            "parallel": {"data": 2, "zero": 0, "tensor": 2, "forward_chunks": chunks},
            "train": {"lora": {"rank": 2, "dropout": 0.2}},
        }
        for chunks in (1, 2)
    ),
    *(
        {"model": LATENT, "parallel": {"data": 2, "tensor": 2, "expert": expert, "recompute": "selective"}}
        for expert in (1, 2)
    ),
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


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
def test_products_in_8_bits_take_a_micro_batch_without_samples(fp8):
    model = {"hidden_size": 32, "heads": 2, "sequence_length": 16, "vocabulary_size": 256}
    spec = parse_job_spec(document(model=model, train={"fp8": fp8, "precision": "bf16", "micro_batch_size": 4}))
    windows, parameters = torch.randint(1, 256, (8, 17), generator=torch.Generator().manual_seed(3)), []
    for beside in (False, True):
        comm = lone_rank(spec)
        engine = Engine(spec, comm)
        engine.initialise(1)
        batch = own_micro_batches(spec, comm, windows)
        nothing = MicroBatch(range(0), torch.empty(16, 0, dtype=torch.int64), torch.empty(16, 0, dtype=torch.int64))
        engine.step([nothing, *batch, nothing] if beside else batch, 8, 0.1, 0)
        parameters.append(engine.flat.parameters)
    assert torch.equal(*parameters)
