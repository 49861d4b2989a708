"""The model starts equal under every layout, and computes what an independent GPT-2 does."""

from __future__ import annotations

import math

import pytest
import torch
from engine_specs import axes, document, layout_of, spec
from plain_gpt import PlainGPT, random_weights
from rank_programs import assemble, initial_parameters, run_steps

from manta.workers.config import ParallelConfig
from manta.workers.model.shared import residual_std
from manta.workers.spec.reading import parse_job_spec


def initial(ranks, layout: tuple[int, int, int], **model) -> dict[str, torch.Tensor]:
    """Layout-free initial parameters; where ranks hold the same one they hold the same bits."""
    job = document(model=model, parallel=axes(layout))
    by_rank = ranks.run(ParallelConfig(**axes(layout)), initial_parameters, job)
    like = dict(PlainGPT(parse_job_spec(job)).named_parameters())
    return assemble(like, [placed for rank in by_rank for placed in rank])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)], ids=str)
def test_every_layout_starts_from_the_same_bits(ranks, layout, tied):
    model = {"tie_embeddings": tied, "vocabulary_size": 257}
    one, other = initial(ranks, (1, 1, 1), **model), initial(ranks, layout, **model)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_initialisation_is_scaled_towards_the_residual_stream(ranks):
    parameters = initial(ranks, (1, 1, 1), tie_embeddings=False, hidden_size=64)
    scaled = 0.02 / math.sqrt(2 * 4)
    assert residual_std(spec().model) == pytest.approx(scaled)
    for name, values in parameters.items():
        if "norm.weight" in name:
            assert (values == 1).all()
        elif name.endswith("bias"):
            assert (values == 0).all()
        else:
            std = scaled if name.endswith(("attention.output.weight", "mlp.down.weight")) else 0.02
            assert values.std().item() == pytest.approx(std, rel=0.15), name
            assert abs(values.mean().item()) < std / 5, name


def test_seeds_and_parameters_differ(ranks):
    first = initial(ranks, (1, 1, 1))
    weights = [first[f"layers.{n}.mlp.up.weight"] for n in range(4)]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])


def gpt2_with(weights: dict[str, torch.Tensor], job) -> torch.nn.Module:
    """Hugging Face's GPT-2 in fp64 with the given weights."""
    transformers = pytest.importorskip("transformers")
    model, heads, size = job.model, job.model.heads, job.model.head_size
    config = transformers.GPT2Config(
        vocab_size=job.vocabulary_size, n_positions=model.sequence_length, n_embd=model.hidden_size,
        n_layer=model.layers, n_head=heads, activation_function={"gelu_tanh": "gelu_new"}.get(model.activation, "gelu"),
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    gpt2 = transformers.GPT2LMHeadModel(config).double().eval()

    def by_kind(rows: torch.Tensor) -> torch.Tensor:
        """Rows (head, q/k/v, d) as GPT-2 has them: (q/k/v, head, d)."""
        return rows.view(heads, 3, size, -1).transpose(0, 1).reshape(rows.shape)

    mapped = {
        "transformer.wte.weight": weights["embedding.token.weight"],
        "transformer.wpe.weight": weights["embedding.position.weight"],
        "transformer.ln_f.weight": weights["final_norm.weight"],
        "transformer.ln_f.bias": weights["final_norm.bias"],
        "lm_head.weight": weights["embedding.token.weight"],
    }
    for n in range(model.layers):
        ours, theirs = f"layers.{n}.", f"transformer.h.{n}."
        for kind in ("weight", "bias"):
            mapped[theirs + "ln_1." + kind] = weights[ours + "attention_norm." + kind]
            mapped[theirs + "ln_2." + kind] = weights[ours + "mlp_norm." + kind]
            mapped[theirs + "attn.c_attn." + kind] = by_kind(weights[ours + "attention.qkv." + kind]).t()
            mapped[theirs + "attn.c_proj." + kind] = weights[ours + "attention.output." + kind].t()
            mapped[theirs + "mlp.c_fc." + kind] = weights[ours + "mlp.up." + kind].t()
            mapped[theirs + "mlp.c_proj." + kind] = weights[ours + "mlp.down." + kind].t()
    missing = gpt2.load_state_dict(mapped, strict=False)
    assert not missing.unexpected_keys
    assert not missing.missing_keys
    return gpt2


@pytest.mark.parametrize(
    ("layout", "model", "recompute"),
    [
        ((1, 1, 1), {}, {}),
        ((2, 2, 1), {}, {}),
        ((2, 2, 1), {"activation": "gelu_tanh"}, {}),
        ((2, 1, 1), {"activation": "gelu_tanh"}, {"recompute": "selective", "recompute_modules": ["mlp_activation"]}),
    ],
    ids=str,
)
def test_loss_and_gradient_norm_are_those_of_hugging_faces_gpt2(ranks, layout, model, recompute):
    job = document(model=model, train={"steps": 1}, parallel=axes(layout) | recompute)
    parsed = parse_job_spec(job)
    weights = random_weights(parsed)
    gpt2 = gpt2_with(weights, parsed)
    windows = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(5))
    logits = gpt2(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in gpt2.parameters()]).norm().item()
    trained = ranks.run(layout_of(*layout), run_steps, [job], [weights], [[windows]], torch.float64)
    assert trained[0][0].losses == pytest.approx([loss.item()], rel=1e-10)
    assert trained[0][0].grad_norms == pytest.approx([norm], rel=1e-10)
