"""A step is the mean over the valid tokens of its global batch: how the batch is cut into micro-batches and replicas,
and where in it the positions without a target lie, changes neither loss nor gradient.

Shapes: windows are [B, s + 1] = [10, 9] token ids, NO_TARGET where there is nothing to predict.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from engine_specs import axes, document
from plain_gpt import NO_TARGET, PlainGPT, random_weights
from rank_programs import Steps, gradients_of, light, run_steps

from manta.workers.spec.reading import parse_job_spec

TOLERANCE = 1e-10
MICRO_BATCH_SIZES = (1, 2, 3, 4, 10)  # the last of a replica is smaller under most of them
# 10 sequences over 3, 4 and 8 replicas: 4 3 3, 3 3 2 2 and 2 2 1 1 1 1 1 1, so their numbers of micro-batches differ.
LAYOUTS = ((1, 1, 1), (1, 1, 3), (1, 1, 4), (1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 2, 2), (1, 4, 2))
FEW_LAYOUTS = ((1, 1, 1), (1, 1, 3), (2, 2, 2), (1, 4, 2))


def all_valid(windows: torch.Tensor) -> None:
    """Every position has a target."""


def a_few_missing(windows: torch.Tensor) -> None:
    """Some positions here and there, more in the first sequences."""
    for sequence, position in ((0, 1), (0, 2), (0, 3), (0, 8), (1, 4), (1, 5), (5, 8), (9, 1)):
        windows[sequence, position] = NO_TARGET


def padded_ends(windows: torch.Tensor) -> None:
    """Sequences of all lengths, the longest first."""
    for sequence in range(10):
        windows[sequence, max(1, 9 - sequence) :] = NO_TARGET


def only_the_last_sequence(windows: torch.Tensor) -> None:
    """All replicas but the last, and all micro-batches but its last, have nothing to predict."""
    windows[:9, 1:] = NO_TARGET


def a_single_token(windows: torch.Tensor) -> None:
    """One target in the whole batch."""
    target = windows[4, 6].item()
    windows[:, 1:] = NO_TARGET
    windows[4, 6] = target


MASKS = (all_valid, a_few_missing, padded_ends, only_the_last_sequence, a_single_token)


@functools.cache
def batch(mask: Any) -> torch.Tensor:
    """The global batch under one of MASKS."""
    windows = torch.randint(1, 256, (10, 9), generator=torch.Generator().manual_seed(7))
    mask(windows)
    return windows


def job(layout: tuple[int, int, int], micro_batch_size: int, steps: int = 1, **optimizer: float) -> dict[str, Any]:
    """Without momentum and clipping, so that the first moment is the gradient."""
    return document(
        model={"layers": 4, "hidden_size": 16},
        train={
            "steps": steps,
            "global_batch_size": 10,
            "micro_batch_size": micro_batch_size,
            "optimizer": {"beta1": 0.0, "clip_norm": 0.0, **optimizer},
        },
        parallel=axes(layout),
    )


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """The weights that every run starts from."""
    return random_weights(parse_job_spec(job((1, 1, 1), 1)))


@functools.cache
def reference(mask: Any) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(loss, gradient norm, gradients) of the plain model: the mean over all valid tokens at once."""
    model = PlainGPT(parse_job_spec(job((1, 1, 1), 1))).double().load(weights())
    loss = model.loss(batch(mask))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    return loss.item(), norm.item(), gradients


def check(ranks_of_job: list[Steps], mask: Any, description: object) -> None:
    """One job's ranks against the reference."""
    loss, norm, gradients = reference(mask)
    for rank in ranks_of_job:
        assert rank.losses == [pytest.approx(loss, rel=TOLERANCE)], description
        assert rank.grad_norms == [pytest.approx(norm, rel=TOLERANCE)], description
    whole = gradients_of(ranks_of_job, gradients)
    for name, expected in gradients.items():
        error = (whole[name] - expected).norm()
        assert error <= TOLERANCE * expected.norm() + 1e-13 * norm, (name, description)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=str(layout), marks=[] if layout in FEW_LAYOUTS else [pytest.mark.soak])
        for layout in LAYOUTS
    ],
)
def test_loss_and_gradient_are_means_over_the_valid_tokens_of_the_global_batch(ranks, layout):
    cases = [(size, mask) for size in MICRO_BATCH_SIZES[:: 1 if layout == (1, 1, 1) else 2] for mask in MASKS]
    jobs = [job(layout, size) for size, _ in cases]
    batches, starts = [[batch(mask)] for _, mask in cases], [light(weights())] * len(cases)
    by_rank = ranks.run(parse_job_spec(jobs[0]).layout, run_steps, jobs, starts, batches, torch.float64)
    for number, (size, mask) in enumerate(cases):
        check([rank[number] for rank in by_rank], mask, (size, mask.__name__))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-v"])
def test_every_schedule_takes_micro_batches_of_different_sizes(ranks, schedule):
    jobs = [job((1, 2, 2), size) for size in (1, 2, 3)]
    for each in jobs:
        each["parallel"].update(schedule=schedule, virtual_stages=2 if schedule == "zb-v" else 1)
    for mask in (a_few_missing, padded_ends):
        batches = [[batch(mask)]] * len(jobs)
        layout = parse_job_spec(jobs[0]).layout
        by_rank = ranks.run(layout, run_steps, jobs, [light(weights())] * len(jobs), batches, torch.float64)
        for number in range(len(jobs)):
            check([rank[number] for rank in by_rank], mask, schedule)


def test_a_batch_without_any_target_has_no_loss_and_no_gradient(ranks):
    nothing = torch.full((10, 9), NO_TARGET)
    for layout in ((1, 1, 1), (2, 2, 2)):
        one = job(layout, 2, weight_decay=0.0)
        by_rank = ranks.run(
            parse_job_spec(one).layout, run_steps, [one], [light(weights())], [[nothing]], torch.float64
        )
        for rank in by_rank:
            assert rank[0].losses == [0.0]
            assert rank[0].grad_norms == [0.0]
            assert not any(values.any() for _, _, values in rank[0].gradients)


@pytest.mark.parametrize(
    "layouts",
    [((1, 1, 4), (2, 2, 2)), pytest.param(((1, 1, 4), (1, 2, 2), (2, 2, 2)), marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_steps_of_varying_batch_sizes_follow_the_same_curve_with_and_without_parallelism(ranks, layouts):
    """With momentum, clipping and decay, as a job with a batch ramp has it."""
    sizes = (10, 4, 7, 10)
    batches = [batch(padded_ends).roll(number, 0)[:size] for number, size in enumerate(sizes)]
    optimizer = {"beta1": 0.9, "clip_norm": 0.5, "learning_rate": 1e-2}
    curves = {}
    for layout in ((1, 1, 1), *layouts):
        jobs = [job(layout, size, len(sizes), **optimizer) for size in (1, 2, 3)]
        by_rank = ranks.run(
            parse_job_spec(jobs[0]).layout, run_steps, jobs, [light(weights())] * 3, [batches] * 3, torch.float64
        )
        for number, size in enumerate((1, 2, 3)):
            curves[layout, size] = [(rank[number].losses, rank[number].grad_norms) for rank in by_rank]
    losses, norms = curves[(1, 1, 1), 1][0]
    assert min(norms) > 0.5, "every step is clipped"
    for case, curve in curves.items():
        for other_losses, other_norms in curve:
            assert other_losses == pytest.approx(losses, rel=TOLERANCE), case
            assert other_norms == pytest.approx(norms, rel=TOLERANCE), case
