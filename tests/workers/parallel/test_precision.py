"""16-bit compute keeps fp32 master weights, moments and gradient sums; fp16 scales the loss; and where a step's numbers
are not finite, nothing is updated anywhere.

bf16 has 8 significant bits and fp16 11: a rounding is off by u = 2^-8 and 2^-11 at most, relatively.

A gradient norm is off by no more than the gradient. That has passed some 64 roundings: in each of four layers two
blocks, each of a norm, two products and what lies between them, forward and backward. Their signs are random, and each
is off by 0.29 u to 0.58 u (uniform within half a unit in the last place, relative to a number between 2 and 1), in the
mean 0.43 u: sqrt(64) 0.43 u = 3.5 u together, and sqrt(2) times as much between two runs that are both rounded.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from engine_specs import axes, document
from plain_gpt import PlainGPT, random_weights
from rank_programs import Precise, assemble, attempts, poisoned_steps, run_precise

from manta.workers.parallel.data import loss_scaling
from manta.workers.parallel.data.loss_scaling import LossScale
from manta.workers.spec.reading import parse_job_spec

STEPS = 20
PRECISIONS = ("bf16", "fp16")
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((2, 1, 1), {}), ((2, 1, 1), {"sequence_parallel": False, "recompute": "selective"}),
    ((1, 2, 1), {"schedule": "zb-h1"}), ((1, 2, 1), {"schedule": "zb-v", "virtual_stages": 2, "recompute": "full"}),
    ((1, 1, 2), {"zero": 0}), ((1, 1, 3), {"bucket_megabytes": 0.002}), ((2, 2, 2), {}),
)  # fmt: skip


def job(precision: str = "bf16", layout: tuple[int, int, int] = (1, 1, 1), **parallel: Any) -> dict[str, Any]:
    """A small job that learns something in 20 steps."""
    return document(
        model={"hidden_size": 16},
        train={
            "steps": STEPS,
            "precision": precision,
            "micro_batch_size": 2,
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        },
        parallel={**axes(layout), **parallel},
    )


def one_step_job(precision: str, sequences: int, layout: tuple[int, int, int] = (1, 1, 1)) -> dict[str, Any]:
    """A step of one sequence a micro-batch, without momentum: the first moment is the gradient."""
    train = {"steps": 1, "global_batch_size": sequences, "precision": precision}
    optimizer = {"beta1": 0.0, "clip_norm": 0.0}
    return document(model={"hidden_size": 16}, train={**train, "optimizer": optimizer}, parallel=axes(layout))


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """What every run starts from."""
    return random_weights(parse_job_spec(job()), spread=0.03)


@functools.cache
def batches() -> list[torch.Tensor]:
    """A global batch for each step: sequences that count up in ones, twos or threes."""
    generator = torch.Generator().manual_seed(2)
    starts = torch.randint(64, (STEPS, 8, 1), generator=generator)
    strides = torch.randint(1, 4, (STEPS, 8, 1), generator=generator)
    return list((starts + strides * torch.arange(9)) % 64)


def run(ranks: Any, jobs: list[dict[str, Any]], steps: list[torch.Tensor], scale: float | None = None) -> list:
    """Results by job, then by rank."""
    by_rank = ranks.run(parse_job_spec(jobs[0]).layout, run_precise, jobs, weights(), steps, scale)
    return [[rank[number] for rank in by_rank] for number in range(len(jobs))]


@pytest.fixture(scope="module")
def curves(ranks) -> dict[str, Precise]:
    """Twenty steps of one rank in each precision."""
    jobs = [job(precision) for precision in DTYPES]
    return {name: trained[0] for name, trained in zip(DTYPES, run(ranks, jobs, batches()), strict=True)}


def whole(placed: list[Any]) -> dict[str, torch.Tensor]:
    """The model's tensors from all ranks' parts."""
    return assemble(weights(), placed)


def distance(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """L2 norm of the difference, relative to that of what was expected."""
    differences = torch.cat([(tensors[name].double() - expected[name].double()).flatten() for name in expected])
    return (differences.norm() / torch.cat([tensor.double().flatten() for tensor in expected.values()]).norm()).item()


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-3), ("fp16", 3e-4)])
def test_16_bit_training_follows_the_fp32_curve(curves, precision, tolerance):
    """A loss sums roundings of both signs, so it is nearer than one rounding; after some steps also the weights have
    gone their own ways a little."""
    expected = curves["fp32"].losses
    assert expected[-1] < expected[0] - 1.0, "the job learns"
    assert curves[precision].losses == pytest.approx(expected, rel=tolerance)
    assert curves[precision].losses != expected
    assert curves[precision].grad_norms == pytest.approx(curves["fp32"].grad_norms, rel=4 * UNIT[precision])


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [
        ("bf16", LAYOUTS[1::2] + LAYOUTS[-1:]),
        *(pytest.param(precision, LAYOUTS, marks=pytest.mark.soak) for precision in PRECISIONS),
    ],
    ids=["bf16, some", "bf16, all", "fp16, all"],
)
def test_layouts_agree_within_the_precision(ranks, curves, precision, layouts):
    expected, tolerance = curves[precision], {"bf16": 2e-3, "fp16": 3e-4}[precision]
    for layout, parallel in layouts:
        (by_rank,) = run(ranks, [job(precision, layout, **parallel)], batches()[:6])
        for rank in by_rank:
            assert rank.losses == by_rank[0].losses, "all ranks say the same"
            assert rank.losses == pytest.approx(expected.losses[:6], rel=tolerance), (layout, parallel)
            assert rank.grad_norms == pytest.approx(expected.grad_norms[:6], rel=5 * UNIT[precision]), (
                layout,
                parallel,
            )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_parameters_are_the_rounded_master_weights(ranks, precision, layout):
    for zero in (0, 1):
        (by_rank,) = run(ranks, [job(precision, layout, zero=zero)], batches()[:3])
        masters = whole([placed for rank in by_rank for placed in rank.masters])
        parameters = whole([placed for rank in by_rank for placed in rank.parameters])
        for name, master in masters.items():
            assert master.dtype == torch.float32
            assert parameters[name].dtype == DTYPES[precision]
            assert torch.equal(parameters[name], master.to(DTYPES[precision])), name
        assert distance(parameters, masters) > 1e-5, "the masters know more"


@pytest.mark.parametrize(
    ("precision", "layout", "count"),
    [
        ("bf16", (1, 1, 1), 300),
        pytest.param("fp16", (1, 2, 2), 256, marks=pytest.mark.soak),
        pytest.param("fp16", (1, 1, 1), 512, marks=pytest.mark.soak),
        pytest.param("bf16", (1, 2, 2), 256, marks=pytest.mark.soak),
    ],
)
def test_hundreds_of_micro_batches_add_up(ranks, precision, layout, count):
    """Hundreds of times the same sequence: the mean gradient is that of one. A sum of 16 bits would lose up to half of
    its last bit each time, and in bf16 stand still after 256."""
    one, replicas = batches()[0][:1], layout[2]
    (single,) = run(ranks, [one_step_job(precision, replicas, layout)], [one.expand(replicas, 9)], 2.0**8 * replicas)
    (many,) = run(ranks, [one_step_job(precision, count, layout)], [one.expand(count, 9)], 2.0**8 * count)
    expected, accumulated = (whole([placed for rank in steps for placed in rank.gradients]) for steps in (single, many))
    for name, gradient in expected.items():
        assert (accumulated[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 1e-2), ("fp16", 1e-3)])
def test_the_sum_over_many_micro_batches_is_near_to_that_of_fp64(ranks, precision, tolerance):
    windows = torch.cat(batches())[:128]
    (by_rank,) = run(ranks, [one_step_job(precision, 128)], [windows])
    plain = PlainGPT(parse_job_spec(job())).double().load(weights())
    plain.loss(windows).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert distance(whole(by_rank[0].gradients), expected) < tolerance


# The loss scale of fp16.


@pytest.mark.parametrize("layout", [(1, 1, 1), pytest.param((1, 1, 2), marks=pytest.mark.soak), (2, 2, 2)], ids=str)
def test_fp16_overflow_is_retried_with_half_the_scale_and_the_same_samples(ranks, layout):
    one = job("fp16", layout)
    parallel = parse_job_spec(one).layout
    results = ranks.run(parallel, attempts, one, weights(), batches()[0], 2.0**30)
    scales = [scale for scale, _, _ in results[0][0]]
    assert len(scales) > 3
    assert scales == [2.0**30 / 2**n for n in range(len(scales))]
    for seen, statistics, after in results:
        assert statistics.finite
        assert [scale for scale, _, _ in seen] == scales, "all ranks try as often"
        assert all(samples == seen[0][1] for _, samples, _ in seen)
        assert all(torch.equal(state, seen[0][2]) for _, _, state in seen), "nothing is updated in between"
        assert not torch.equal(after, seen[0][2])
    # As if the last scale had been the first: the moments' clock counts one step.
    again = ranks.run(parallel, attempts, one, weights(), batches()[0], scales[-1])
    for (_, statistics, after), (seen, expected, state) in zip(results, again, strict=True):
        assert len(seen) == 1
        assert (statistics.loss, statistics.grad_norm) == (expected.loss, expected.grad_norm)
        assert torch.equal(after, state)


def test_loss_scale_does_not_change_training(ranks, curves):
    """It is a power of two: only what leaves the range of fp16 can tell."""
    (by_rank,) = run(ranks, [job("fp16")], batches(), 2.0**12)
    assert by_rank[0].losses == pytest.approx(curves["fp16"].losses, rel=1e-4)
    assert by_rank[0].scales == [2.0**12] * STEPS
    assert curves["bf16"].scales == curves["fp32"].scales == [1.0] * STEPS


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_fp16_step_that_no_scale_helps_ends_non_finite_without_retries(ranks, layout):
    """A weight that overflows fp16 itself: the loss is lost already, so a smaller scale is not even tried."""
    one = job("fp16", layout)
    broken = {**weights(), "final_norm.bias": torch.full((16,), 1e30, dtype=torch.float64)}
    for seen, statistics, after in ranks.run(parse_job_spec(one).layout, attempts, one, broken, batches()[0], 2.0**3):
        assert not statistics.finite
        assert [scale for scale, _, _ in seen] == [8.0]
        assert torch.equal(after, seen[0][2])


def test_fp16_step_that_no_scale_helps_leaves_the_scale_unchanged(ranks):
    broken = {**weights(), "final_norm.bias": torch.full((16,), 1e30, dtype=torch.float64)}
    (rank,) = ranks.run(parse_job_spec(job("fp16")).layout, run_precise, [job("fp16")], broken, batches()[:1])
    assert rank[0].scales == [2.0**16]


def test_the_scale_grows_after_many_good_steps(monkeypatch):
    monkeypatch.setattr(loss_scaling, "GROWTH_STEPS", 3)
    scale = LossScale(dynamic=True)
    assert scale.value == loss_scaling.INITIAL == 2.0**16
    for _ in range(3):
        assert scale.value == 2.0**16
        scale.after_finite()
    assert scale.value == 2.0**17
    scale.after_finite()
    scale.after_finite()
    assert scale.after_overflow()
    assert scale.value == 2.0**16
    scale.after_finite()
    scale.after_finite()
    assert scale.value == 2.0**16, "an overflow begins the count anew"
    scale.after_finite()
    assert scale.value == 2.0**17


def test_loss_scale_does_not_fall_below_one():
    scale = LossScale(dynamic=True)
    assert [scale.after_overflow() for _ in range(17)] == [True] * 16 + [False]
    assert scale.value == 1.0


def test_loss_scale_stays_one_without_fp16():
    scale = LossScale(dynamic=False)
    for _ in range(5000):
        scale.after_finite()
    assert not scale.after_overflow()
    assert scale.value == 1.0


# What is not finite.


POISONS = (("fp32", "gradient"), ("fp32", "weight"), ("bf16", "gradient"), ("fp16", "gradient"))
POISONED = (((1, 1, 1), 1), ((1, 1, 2), 0), ((1, 1, 2), 1), ((2, 1, 1), 1), ((1, 2, 1), 1), ((2, 2, 2), 1))
PARTS_OF_OTHERS = POISONED[3:5]


@pytest.mark.parametrize(
    ("precision", "poison", "layout", "zero"),
    [
        # Each poison with each of two layouts, fp16, which looks for itself, with all that are no part of another.
        pytest.param(
            *poison,
            *where,
            marks=[]
            if (row + column) % 3 == 0 or (poison[0] == "fp16" and where not in PARTS_OF_OTHERS)
            else [pytest.mark.soak],
        )
        for row, poison in enumerate(POISONS)
        for column, where in enumerate(POISONED)
    ],
    ids=str,
)
def test_non_finite_step_on_any_rank_changes_nothing_on_all(ranks, precision, poison, layout, zero):
    one = job(precision, layout, zero=zero)
    arguments = (poisoned_steps, one, weights(), batches()[:3])
    by_rank = ranks.run(parse_job_spec(one).layout, *arguments, poison)
    without = ranks.run(parse_job_spec(one).layout, *arguments, None)
    for (seen, after), (_, expected) in zip(by_rank, without, strict=True):
        assert seen == [(True, True), (False, False), (True, True)]
        assert torch.equal(after, expected), "as if the step had not been, AdamW's clock and the loss scale included"
