"""The z-loss (arXiv:2204.02311, section 5) under every layout: what autograd makes of it in a plain model, in fp64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_specs import axes, document
from plain_gpt import NO_TARGET, PlainGPT, random_weights
from rank_programs import START, assemble, evaluate, light, run_precise, run_steps, train_job

from manta.workers.spec.reading import parse_job_spec

WEIGHT = 0.02
"""Large, so that no part of it hides."""

LAYOUTS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 1), {}),
    ((2, 1, 1), {"sequence_parallel": False}),
    ((2, 2, 2), {"recompute": "full"}),
    ((2, 2, 1), {"schedule": "zb-v", "virtual_stages": 2}),
    ((1, 2, 2), {"schedule": "interleaved", "virtual_stages": 2, "zero": 0}),
    ((4, 1, 1), {"recompute": "selective"}),
    ((1, 1, 3), {}),
]
SHOWN_BY_OTHERS = ((1, 1, 1), (1, 2, 2), (2, 1, 1))


def job(layout: tuple[int, int, int] = (1, 1, 1), parallel: dict[str, Any] | None = None, **train: Any) -> dict:
    """One step without momentum, so that the first moment is the gradient itself; a vocabulary that nothing divides."""
    return document(
        model={"layers": 4, "hidden_size": 16, "vocabulary_size": 257},
        train={"steps": 1, "z_loss": WEIGHT, "optimizer": {"beta1": 0.0, "clip_norm": 0.0}, **train},
        parallel=axes(layout) | (parallel or {}),
    )


def windows() -> torch.Tensor:
    """A global batch [B, 9] with some positions that have no target, most of them in one sequence."""
    tokens = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(4))
    tokens[0, 2:7] = NO_TARGET
    tokens[5, 8] = NO_TARGET
    return tokens


@functools.cache
def reference() -> tuple[float, float, dict[str, torch.Tensor]]:
    """(Cross-entropy, z-loss, gradients of their sum) of the plain model by autograd."""
    spec = parse_job_spec(job())
    model = PlainGPT(spec).double().load(random_weights(spec))
    tokens = windows()
    logits, targets = model(tokens[:, :-1].abs()).flatten(0, 1), tokens[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    z_loss = WEIGHT * logits.logsumexp(1).square()[targets != NO_TARGET].mean()
    (loss + z_loss).backward()
    return loss.item(), z_loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "parallel", "deterministic"),
    [
        pytest.param(
            layout, parallel, deterministic,
            id=f"{layout} {deterministic}",
            marks=[pytest.mark.soak] if layout in SHOWN_BY_OTHERS or deterministic == "elastic" else [],
        )
        for layout, parallel in LAYOUTS
        for deterministic in ("layout", "elastic")
    ],
)  # fmt: skip
def test_every_layout_has_the_gradients_of_a_plain_model(ranks, layout, parallel, deterministic):
    loss, z_loss, gradients = reference()
    weights = random_weights(parse_job_spec(job()))
    jobs = [job(layout, parallel, deterministic=deterministic)]
    by_rank = ranks.run(parse_job_spec(jobs[0]).layout, run_steps, jobs, [light(weights)], [[windows()]], torch.float64)
    whole = assemble(gradients, [placed for rank in by_rank for placed in rank[0].gradients])
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for (steps,) in by_rank:
        assert steps.losses[0] == pytest.approx(loss, rel=1e-12), "the cross-entropy alone"
        assert steps.z_losses[0] == pytest.approx(z_loss, rel=1e-12)
        assert steps.grad_norms[0] == pytest.approx(norm, rel=1e-10)
    for name, expected in gradients.items():
        assert (whole[name] - expected).norm() <= 1e-10 * max(expected.norm(), 5e-4 * norm), name


def test_z_loss_is_not_part_of_the_validation_loss(ranks):
    loss, _, _ = reference()
    weights = light(random_weights(parse_job_spec(job())))
    assert ranks.run(parse_job_spec(job()).layout, evaluate, job(), weights, windows())[0] == pytest.approx(loss)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_z_loss_in_16_bits_is_scaled_with_the_loss(ranks, precision):
    """Gradients are those of fp32 as far as 16 bits show, whatever the loss scale of fp16."""
    spec = parse_job_spec(job())
    weights = random_weights(spec, spread=0.03)
    jobs = [job(precision=each) for each in ("fp32", precision)]
    exact, rounded = ranks.run(spec.layout, run_precise, jobs, weights, [windows()])[0]
    expected, actual = assemble(weights, exact.gradients), assemble(weights, rounded.gradients)
    for name in ("embedding.token.weight", "final_norm.weight", "layers.0.mlp.up.weight"):
        assert (actual[name] - expected[name]).norm() <= 0.02 * expected[name].norm(), name


def test_z_loss_with_elastic_sums_has_the_same_bits_for_any_replica_count(ranks, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(200)))
    curves = []
    for replicas in (1, 3):
        document = job((1, 1, replicas), steps=3, deterministic="elastic")
        document["data"]["paths"] = [str(corpus)]
        rows = ranks.run(parse_job_spec(document).layout, train_job, document, None, None, START)[0].rows
        curves.append([(row["loss"], row["z_loss"], row["grad_norm"]) for row in rows])
    assert curves[0] == curves[1]
    assert all(z_loss > 0.1 for _, z_loss, _ in curves[0])
