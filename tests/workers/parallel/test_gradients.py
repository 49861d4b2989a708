"""The engine's loss and gradients are those of a plain GPT on one machine, whatever the layout."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from engine_specs import axes, document
from plain_gpt import PlainGPT, random_weights
from rank_programs import Steps, assemble, run_steps

from workers.config import ParallelConfig
from workers.spec_reading import parse_job_spec

LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2), (4, 1, 1), (1, 4, 1))

# Every pair of choices of every two columns occurs (the orthogonal array L8).
CHOICES = tuple((a, b, a ^ b, c, a ^ c, b ^ c, a ^ b ^ c) for a, b, c in itertools.product((0, 1), repeat=3))


def job(layout: tuple[int, int, int], choice: tuple[int, ...]) -> dict[str, Any]:
    """One step of a small model without momentum, so that the first moment is the gradient itself."""
    gpipe, sequence_parallel, untied, bias, selective, odd_vocabulary, two = choice
    return document(
        model={
            "tie_embeddings": not untied,
            "bias": bool(bias),
            "vocabulary_size": 257 if odd_vocabulary else 256,
            "ffn_hidden_size": 72,
        },
        train={
            "steps": 1,
            "micro_batch_size": 2 if two else 1,
            "optimizer": {"beta1": 0.0, "clip_norm": 0.0},
        },
        parallel={
            **axes(layout),
            "schedule": "gpipe" if gpipe else "1f1b",
            "sequence_parallel": bool(sequence_parallel) and layout[0] > 1,
            "recompute": "selective" if selective else "none",
        },
    )


@functools.cache
def windows(vocabulary: int) -> torch.Tensor:
    """A global batch [8, 9] that uses the whole vocabulary, its last id included."""
    tokens = torch.randint(vocabulary, (8, 9), generator=torch.Generator().manual_seed(vocabulary))
    tokens[3, 4], tokens[5, 8], tokens[0, 0] = vocabulary - 1, vocabulary - 1, 0
    return tokens


@functools.cache
def reference(choice: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """(weights, loss, gradients) of the plain model in fp64."""
    spec = parse_job_spec(job((1, 1, 1), choice))
    weights = random_weights(spec)
    model = PlainGPT(spec).double().load(weights)
    loss = model.loss(windows(spec.vocabulary_size))
    loss.backward()
    return weights, loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-10)], ids=["fp32", "fp64"])
def test_gradients_equal_those_of_a_plain_model(ranks, layout, dtype, tolerance):
    references = [reference(choice) for choice in CHOICES]
    jobs = [job(layout, choice) for choice in CHOICES]
    batches = [[windows(parse_job_spec(each).vocabulary_size)] for each in jobs]
    found = ranks.run(ParallelConfig(**axes(layout)), run_steps, jobs, [r[0] for r in references], batches, dtype)
    for number, (weights, loss, gradients) in enumerate(references):
        check(jobs[number], [rank[number] for rank in found], loss, gradients, tolerance)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        after = assemble(shapes, [placed for rank in found for placed in rank[number].parameters])
        assert not any(torch.equal(after[name].double(), weights[name]) for name in weights), "a step changes all"


def check(
    description: dict[str, Any], steps: list[Steps], loss: float, gradients: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Losses, norms and gradients of all ranks against the reference."""
    shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    whole = assemble(shapes, [placed for rank in steps for placed in rank.gradients])
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for rank in steps:
        assert rank.losses[0] == pytest.approx(loss, rel=tolerance / 2), description
        assert rank.grad_norms[0] == pytest.approx(norm, rel=tolerance), description
    for name, expected in gradients.items():
        error = (whole[name].double() - expected).norm().item()
        assert error <= tolerance * expected.norm().item() + 1e-9 * norm * (tolerance / 2e-6), (name, description)
