"""Llama, Mistral and Qwen 3 compute what `transformers` does: logits, loss and every gradient, in fp64."""

from __future__ import annotations

import pytest
import torch
from engine_specs import axes, document, layout_of
from plain_gpt import random_weights
from plain_llama import plain_model
from rank_programs import assert_like, gradients_of, run_steps
from their_models import in_fp64

from manta.workers.model.rotary import Rotary, frequencies_of
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.spec.reading import parse_job_spec

LLAMA3 = {"type": "llama3", "factor": 8.0, "original_length": 32, "low_frequency_factor": 1.0}
YARN = {"type": "yarn", "factor": 4.0, "original_length": 256, "beta_fast": 24.0}
SCALINGS = {
    "none": None,
    "linear": {"type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with a factor of its own": {**YARN, "attention_factor": 1.5},
}
THEIR_NAMES = {
    "original_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "type": "rope_type",
}
MODELS = {
    "llama": {"family": "llama", "kv_heads": 2},
    "llama, scaled": {"family": "llama", "kv_heads": 4, "rope": {"theta": 500.0, "scaling": LLAMA3}},
    "mistral": {"family": "llama", "kv_heads": 1, "sliding_window": 3},
    "qwen": {"family": "qwen", "kv_heads": 2, "head_dim": 6, "tie_embeddings": True, "norm_epsilon": 1e-6},
}


def their_scaling(scaling: dict, theta: float) -> dict:
    ours = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, **scaling}
    return {"rope_theta": theta, **{THEIR_NAMES.get(name, name): value for name, value in ours.items()}}


def theirs(job) -> torch.nn.Module:
    """The model of `transformers` in fp64."""
    transformers = pytest.importorskip("transformers")
    model, rope = job.model, job.model.rope_or_default
    kind = "Qwen3" if model.family == "qwen" else "Mistral" if model.sliding_window else "Llama"
    scaling = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling is not None:
        scaling = their_scaling(rope.scaling.model_dump(exclude_none=True), rope.theta)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=job.vocabulary_size, hidden_size=model.hidden_size, intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.key_value_heads,
        head_dim=model.head_size, max_position_embeddings=model.sequence_length, rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=model.tie_embeddings, sliding_window=model.sliding_window, rope_parameters=scaling,
        attn_implementation="sdpa", pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return in_fp64(getattr(transformers, f"{kind}ForCausalLM")(config), job)


def their_weights(weights: dict[str, torch.Tensor], job) -> dict[str, torch.Tensor]:
    """Ours under their names; of our projections the rows of heads and of keys and values are apart."""
    model, size = job.model, job.model.head_size
    mapped = {
        "model.embed_tokens.weight": weights["embedding.token.weight"],
        "model.norm.weight": weights["final_norm.weight"],
    }
    if not model.tie_embeddings:
        mapped["lm_head.weight"] = weights["output.weight"]
    for n in range(model.layers):
        ours, them = f"layers.{n}.", f"model.layers.{n}."
        if model.key_value_heads == model.heads:
            rows = weights[ours + "attention.qkv.weight"].view(model.heads, 3, size, -1).unbind(1)
        else:
            pairs = weights[ours + "attention.kv.weight"].view(model.key_value_heads, 2, size, -1)
            rows = (weights[ours + "attention.q.weight"], *pairs.unbind(1))
        for kind, part in zip("qkv", rows, strict=True):
            mapped[f"{them}self_attn.{kind}_proj.weight"] = part.reshape(-1, model.hidden_size)
        names = {
            "self_attn.o_proj": "attention.output", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
            "mlp.down_proj": "mlp.down", "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
        }  # fmt: skip
        if model.family == "qwen":
            names |= {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
        mapped |= {f"{them}{a}.weight": weights[f"{ours}{b}.weight"] for a, b in names.items()}
    return mapped


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_those_of_transformers(ranks, name, layout):
    job = document(
        model=MODELS[name],
        train={"steps": 1, "optimizer": {"beta1": 0.0, "clip_norm": 0.0}},
        parallel=axes(layout),
    )
    parsed = parse_job_spec(job)
    weights = random_weights(parsed, model=plain_model(parsed))
    model = theirs(parsed)
    missing = model.load_state_dict(their_weights(weights, parsed), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not (
        missing.missing_keys and not parsed.model.tie_embeddings
    )
    windows = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(5))
    logits = model(windows[:, :-1]).logits
    if parsed.model.rope_or_default.scaling is None:
        torch.testing.assert_close(plain_model(parsed).double().load(weights)(windows[:, :-1]), logits)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    trained = [
        rank[0] for rank in ranks.run(layout_of(*layout), run_steps, [job], [weights], [[windows]], torch.float64)
    ]
    assert_like(model, loss, trained, their_weights(gradients_of(trained, weights), parsed))


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    scaling = SCALINGS[name]
    model = {"family": "llama", "heads": 2, "hidden_size": 128, "rope": {"theta": 5000.0, "scaling": scaling}}
    job = parse_job_spec(document(model=model))
    frequencies, scale = frequencies_of(job.model.rope_or_default, 64)
    if scaling is None:
        expected, their_scale = 5000.0 ** -(torch.arange(0, 64, 2) / 64), 1.0
    else:
        config = transformers.LlamaConfig(
            hidden_size=128, num_attention_heads=2, max_position_embeddings=2048,
            rope_parameters=their_scaling(scaling, 5000.0),
        )  # fmt: skip
        expected, their_scale = rope_utils.ROPE_INIT_FUNCTIONS[scaling["type"]](config, torch.device("cpu"))
    torch.testing.assert_close(frequencies.float(), expected, rtol=2e-6, atol=0.0)
    assert scale == pytest.approx(their_scale)


def test_a_query_times_a_key_depends_on_their_distance_alone():
    job = parse_job_spec(document(model={"family": "llama"}))
    rotary = Rotary(job.model.rope_or_default, 8, 64)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    everywhere = [rotary(x.expand(64, 1, 8).clone(), 8, 1, 1, ForwardPass(Positions.of(64))) for x in (q, k)]
    products = torch.einsum("sbd,tbd->st", *everywhere)
    for distance in range(-63, 64):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
