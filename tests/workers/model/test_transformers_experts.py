"""Mixtral, Qwen 3 with experts and DeepSeek V3 compute what `transformers` does: logits, loss and every gradient, in
fp64, without a loss of balance. Compared with transformers 5.23, whose experts are a loop over them ("eager")."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_specs import axes, document, layout_of
from plain_gpt import random_weights
from plain_llama import plain_model
from rank_programs import assert_like, gradients_of, run_steps
from their_models import in_fp64

from manta.workers.spec.reading import parse_job_spec
from manta.workers.weights.config import huggingface_config
from manta.workers.weights.mapping import huggingface_tensors

BALANCE = {"balance": {"loss": "none"}}
LATENT = {"kv_rank": 12, "rope_size": 6, "nope_size": 4, "value_size": 7}
OF_DEEPSEEK = {
    "experts": 8, "per_token": 3, "ffn_hidden_size": 12, "first_dense": 1, "shared": 2, "score": "sigmoid",
    "scale": 2.5, "groups": 4, "groups_per_token": 2, **BALANCE,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 4.0, "original_length": 256, "attention_factor": 1.1, "mscale_all_dim": 0.7,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "family": "llama", "kv_heads": 2, "moe": {"experts": 5, "per_token": 2, "ffn_hidden_size": 24, **BALANCE},
    },
    "qwen": {
        "family": "qwen", "kv_heads": 2, "head_dim": 6,
        "moe": {
            "experts": 6, "per_token": 3, "ffn_hidden_size": 20, "first_dense": 1, "every": 2, "normalise": False,
            **BALANCE,
        },
    },
    "deepseek": {"family": "deepseek", "latent_attention": LATENT, "moe": OF_DEEPSEEK},
    "deepseek, scaled": {
        "family": "deepseek", "latent_attention": LATENT | {"q_rank": 10, "value_size": 14}, "moe": OF_DEEPSEEK,
        "rope": {"theta": 500.0, "scaling": YARN},
    },
}  # fmt: skip


class _Wide:
    """torch, whose fp32 is fp64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextlib.contextmanager
def without_fp32(made: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, what their code casts to fp32 stays in fp64."""
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[type(made).__module__], "torch", _Wide())
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def theirs(job: Any) -> torch.nn.Module:
    """The model of transformers in fp64."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        **huggingface_config(job, "float64"), attn_implementation="sdpa", experts_implementation="eager"
    )
    return in_fp64(transformers.AutoModelForCausalLM.from_config(config), job)


def in_their_files(ours: dict[str, torch.Tensor], job: Any) -> dict[str, torch.Tensor]:
    """Ours, rows moved, under the names of their files."""
    moved = {}
    for tensor in huggingface_tensors(job):
        rows = torch.full(tensor.rows_first, float("nan"), dtype=torch.float64)
        for piece in tensor.pieces:
            if piece.ours in ours:
                for row, at, count in piece.runs(0, len(ours[piece.ours])):
                    rows[at : at + count] = ours[piece.ours][row : row + count]
                moved[tensor.name] = rows
    return moved


def in_their_memory(files: dict[str, torch.Tensor], job: Any) -> dict[str, torch.Tensor]:
    """Tensors of their files as transformers 5 has them: the experts of a layer are one tensor."""
    moe = job.model.moe
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    known = {
        ".".join(names.get(part, part) for part in name.replace("block_sparse_moe", "mlp").split(".")): tensor
        for name, tensor in files.items()
    }
    for layer in job.model.expert_layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [
            [known.pop(f"{prefix}.{number}.{name}_proj.weight") for name in ("gate", "up", "down")]
            for number in range(moe.experts)
        ]
        known[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        known[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in each])
    return known


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_with_experts_are_those_of_transformers(ranks, monkeypatch, name, layout):
    job = document(
        model=MODELS[name],
        train={"steps": 1, "optimizer": {"beta1": 0.0, "clip_norm": 0.0}},
        parallel=axes(layout),
    )
    parsed = parse_job_spec(job)
    weights = random_weights(parsed, model=plain_model(parsed))
    model = theirs(parsed)
    missing = model.load_state_dict(in_their_memory(in_their_files(weights, parsed), parsed), strict=False)
    assert not missing.unexpected_keys
    assert all(key.endswith("e_score_correction_bias") for key in missing.missing_keys), "which is zero"
    windows = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(5))
    with without_fp32(model, monkeypatch):
        logits = model(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
    assert logits.dtype == torch.float64
    if parsed.model.rope is None:
        ours = plain_model(parsed).double().load(weights)(windows[:, :-1])
        torch.testing.assert_close(ours, logits, rtol=1e-8, atol=1e-10)
    trained = [
        rank[0] for rank in ranks.run(layout_of(*layout), run_steps, [job], [weights], [[windows]], torch.float64)
    ]
    gradients = in_their_memory(in_their_files(gradients_of(trained, weights), parsed), parsed)
    assert_like(model, loss, trained, gradients)
