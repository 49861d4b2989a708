"""Dropout zeroes the same elements under every layout, independently of each other, and costs one byte an element.

The masks are compared with the hash written out in plain integers; whole steps with a plain model that applies the
masks of `manta.workers.parallel.tensor.dropout` to whole tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from engine_specs import axes, document
from plain_gpt import PlainGPT, random_weights
from rank_programs import assemble, evaluate, light, run_steps

from manta.workers.model.shared import DROPOUTS_PER_LAYER, EMBEDDING_DROPOUT
from manta.workers.parallel.tensor.dropout import derived_keys, dropout, kept, sample_keys
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.spec.reading import parse_job_spec

CPU = torch.device("cpu")


def masks(samples: int = 4, rows: int = 64, columns: int = 256, rate: float = 0.2, place: int = 0) -> torch.Tensor:
    """Masks [samples, rows, columns] of one place in the model."""
    keys = derived_keys(sample_keys(1, range(samples), CPU), place)
    return kept(derived_keys(keys.unsqueeze(1), torch.arange(rows, dtype=torch.int32)), columns, rate)


def near(share: float, expected: float, count: int) -> bool:
    """Whether a mean of `count` independent zeros and ones lies within five standard deviations."""
    return abs(share - expected) <= 5 * math.sqrt(expected * (1 - expected) / count)


def mixed(bits: int) -> int:
    """The finaliser on unsigned 32 bits."""
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> shift)) * multiplier % 2**32
    return bits ^ (bits >> 16)


def signed(bits: int) -> int:
    """Unsigned 32 bits as int32 has them."""
    return bits - 2**32 if bits >= 2**31 else bits


def test_keys_are_the_hash_written_out():
    keys = [0, 1, -1, 2**31 - 1, -(2**31), 123456789]
    for number in (0, 1, 7, 2**20, 2**31 - 1):
        expected = [signed(mixed((key + number * 0x9E3779B9) % 2**32)) for key in keys]
        start = torch.tensor(keys, dtype=torch.int32)
        assert derived_keys(start, number).tolist() == expected
        assert derived_keys(start, torch.tensor([number], dtype=torch.int32)).tolist() == expected
        assert start.tolist() == keys, "keys are not changed"


def test_dropout_keys_of_samples_never_change_between_releases():
    """A job that is resumed by another version of this code must go on with the same masks."""
    assert sample_keys(1234, [0, 1, 2**40], CPU).tolist() == [810834308, 601016350, -1664425319]


def test_dropout_keeps_elements_whose_hash_reaches_the_rate():
    row_key, rate = 987654321, 0.3
    expected = [signed(mixed((row_key + c * 0x9E3779B9) % 2**32)) + 2**31 >= rate * 2**32 for c in range(500)]
    assert kept(torch.tensor([row_key], dtype=torch.int32), 500, rate)[0].tolist() == expected


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_dropout_keeps_the_share_of_elements_that_its_rate_says(rate):
    mask = masks(rate=rate)
    assert near(mask.double().mean().item(), 1 - rate, mask.numel())


@pytest.mark.parametrize(("rows", "columns"), [(1025, 512), (2050, 513), (3, 2**19)], ids=str)
def test_dropout_mask_larger_than_a_block_consists_of_its_rows(rows, columns):
    """The hash is computed 2^19 elements at a time."""
    keys = derived_keys(sample_keys(1, range(rows), CPU), 7)
    whole = kept(keys, columns, 0.25)
    for row in (0, rows // 2, rows - 2, rows - 1):
        assert torch.equal(whole[row], kept(keys[row : row + 1], columns, 0.25)[0]), row
    assert near(whole[-1].double().mean().item(), 0.75, columns)


def test_dropout_at_rate_zero_keeps_everything():
    assert masks(rate=0.0).all()


def test_dropout_drops_every_row_and_column_at_the_rate():
    mask = masks(samples=1, rows=512, columns=512)[0].double()
    for dimension in (0, 1):
        # Over 512 means of 512 the squared deviations add up to a chi-squared with 512 degrees of freedom.
        deviations = (mask.mean(dimension) - 0.8) / math.sqrt(0.16 / 512)
        assert deviations.square().sum().item() == pytest.approx(512, abs=5 * math.sqrt(2 * 512))


def test_dropout_masks_are_independent_of_each_other():
    """Of two masks the elements agree as often as independent ones do: samples, places in the model, rows, neighbours
    in a row and seeds."""
    agree = 0.8**2 + 0.2**2
    first, other_place = masks(), masks(place=1)
    other_seed = kept(
        derived_keys(derived_keys(sample_keys(2, range(4), CPU), 0).unsqueeze(1), torch.arange(64, dtype=torch.int32)),
        256,
        0.2,
    )
    above, right = torch.triu_indices(64, 64, 1)
    pairs = {
        "samples": (first[0], first[1]), "places": (first, other_place), "rows": (first[:, 1:], first[:, :-1]),
        "columns": (first[..., 1:], first[..., :-1]), "row and column": (first[:, 1:, 1:], first[:, :-1, :-1]),
        "row and column changed": (first[:, above, right], first[:, right, above]),
        "sample and row": (first[1, :-1], first[0, 1:]), "seeds": (first, other_seed),
    }  # fmt: skip
    for name, (one, other) in pairs.items():
        assert near((one == other).double().mean().item(), agree, one.numel()), name


def test_dropout_masks_of_all_rows_in_a_batch_differ():
    places = torch.cat([masks(samples=16, place=place) for place in range(7)]).flatten(0, 1)
    assert len(places.unique(dim=0)) == len(places)


def test_dropout_mask_is_the_same_for_the_same_arguments():
    assert torch.equal(masks(), masks())
    assert torch.equal(sample_keys(3, [5, 7], CPU), sample_keys(3, [5, 7], CPU))


def test_samples_far_apart_and_large_seeds_have_keys_of_their_own():
    samples = [0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**40, 10**15]
    keys = [key for seed in (0, 1, 2**32, 2**63 - 1) for key in sample_keys(seed, samples, CPU).tolist()]
    assert len(set(keys)) == len(keys)


def test_dropout_of_a_slice_equals_the_slice_of_the_whole():
    keys = derived_keys(sample_keys(1, range(6), CPU), 3)
    x = torch.rand(16, 6, 24) + 1.0
    whole = dropout(x, keys, 0.2, Positions.of(16))
    for rows, samples in itertools.product(
        (slice(0, 4), slice(4, 8), slice(12, 16), slice(3, 11)), (slice(0, 2), slice(2, 5), slice(5, 6))
    ):
        assert torch.equal(
            dropout(x[rows, samples], keys[samples], 0.2, Positions(((rows.start, rows.stop),))), whole[rows, samples]
        )


def test_dropout_scales_kept_elements_and_masks_gradients_alike():
    keys = sample_keys(1, range(3), CPU)
    x = (torch.rand(5, 3, 8, dtype=torch.float64) + 1.0).requires_grad_()
    y = dropout(x, keys, 0.25, Positions.of(5))
    mask = kept(derived_keys(keys, torch.arange(5, dtype=torch.int32).unsqueeze(-1)), 8, 0.25)
    assert torch.allclose(y, torch.where(mask, x / 0.75, 0.0), rtol=1e-15)
    assert torch.autograd.gradcheck(lambda x: dropout(x, keys, 0.25, Positions.of(5)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_saves_one_byte_per_element_for_backward(dtype):
    saved: list[torch.Tensor] = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.ones(5, 3, 8, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        y = dropout(x, sample_keys(1, range(3), CPU), 0.5, Positions.of(len(x)))
    assert y.dtype == dtype
    assert [(tensor.dtype, tensor.nbytes) for tensor in saved] == [(torch.bool, x.numel())]


# Whole steps.

RATE, SEQUENCES = 0.2, 8
MODULES = ("core_attention", "norm", "mlp_activation")
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    *({"recompute": "selective", "recompute_modules": [module]} for module in MODULES),
    {"recompute": "selective", "recompute_modules": list(MODULES)},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": 2},
    {"recompute": "full", "recompute_keep": 1},
)
MODELS: tuple[dict[str, Any], ...] = ({}, {"kv_heads": 2})


def job(model: dict[str, Any], layout: tuple[int, int, int], micro_batch_size: int = 2, **parallel: Any) -> dict:
    """Two steps that change no weight, and without momentum: the first moment is the second step's gradient."""
    optimizer = {"beta1": 0.0, "clip_norm": 0.0, "learning_rate": 1e-30, "min_learning_rate": 0.0}
    return document(
        model={"layers": 4, "hidden_size": 16, "dropout": RATE, **model},
        train={"steps": 2, "micro_batch_size": micro_batch_size, "optimizer": optimizer},
        parallel={**axes(layout), **parallel},
    )


def jobs_of(layout: tuple[int, int, int], policies: tuple[dict[str, Any], ...]) -> list[tuple[int, dict]]:
    """(model, job): what a layout is tried with."""
    tensor, pipeline, _ = layout
    variants: list[dict[str, Any]] = [{}]
    if layout == (1, 1, 1):
        variants = [{"micro_batch_size": size} for size in (1, 3, 8)]
    if tensor > 1:
        variants = [{"sequence_parallel": on, "micro_batch_size": size} for on, size in ((True, 2), (False, 1))]
    if pipeline == 2:
        variants = [{"schedule": kind} for kind in ("gpipe", "1f1b", "zb-h1")]
        variants.append({"schedule": "interleaved", "virtual_stages": 2, "micro_batch_size": 1})
        if tensor > 1:
            variants[0]["sequence_parallel"] = False
    jobs = [(number % 2, job(MODELS[number % 2], layout, **each)) for number, each in enumerate(variants)]
    return jobs + [(1, job(MODELS[1], layout, **each)) for each in policies]


@functools.cache
def batches() -> list[torch.Tensor]:
    """The windows of both steps."""
    return list(torch.randint(256, (2, SEQUENCES, 9), generator=torch.Generator().manual_seed(5)))


@functools.cache
def weights(model: int) -> dict[str, torch.Tensor]:
    """The weights of one of MODELS."""
    return random_weights(parse_job_spec(job(MODELS[model], (1, 1, 1))))


@functools.cache
def reference(model: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """(losses, gradient norms, last gradients) of the plain model with the same masks."""
    spec = parse_job_spec(job(MODELS[model], (1, 1, 1)))
    plain = PlainGPT(spec).double().load(weights(model))
    losses, norms = [], []
    for step, windows in enumerate(batches()):
        samples = range(step * SEQUENCES, (step + 1) * SEQUENCES)

        def drop(x: torch.Tensor, place: int, samples: range = samples) -> torch.Tensor:
            """[b, ..., columns], masked by (sample, place, ..., column)."""
            keys = derived_keys(sample_keys(spec.train.seed, samples, CPU), place)
            for size in x.shape[1:-1]:
                keys = derived_keys(keys.unsqueeze(-1), torch.arange(size, dtype=torch.int32))
            return x * kept(keys, x.shape[-1], RATE) / (1 - RATE)

        plain.zero_grad()
        loss = plain.loss(windows, drop)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.cat([p.grad.flatten() for p in plain.parameters()]).norm().item())
    return losses, norms, {name: parameter.grad for name, parameter in plain.named_parameters()}


def test_plain_model_uses_the_dropout_places_of_the_engine():
    assert (EMBEDDING_DROPOUT, DROPOUTS_PER_LAYER) == (0, 3)


@pytest.mark.parametrize(
    ("layout", "policies"),
    [
        *(((1, 1, 1), RECOMPUTE), ((1, 1, 3), RECOMPUTE[:1]), ((2, 2, 2), RECOMPUTE[1::3])),
        *(
            pytest.param(each, RECOMPUTE, marks=pytest.mark.soak)
            for each in ((2, 1, 1), (1, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (1, 1, 3), (2, 2, 2))
        ),
    ],
    ids=lambda value: str(value) if isinstance(value[0], int) else f"{len(value)} policies",
)
def test_dropout_in_every_layout_matches_a_plain_model(ranks, layout, policies):
    described = jobs_of(layout, policies)
    models, jobs = [model for model, _ in described], [each for _, each in described]
    by_rank = ranks.run(
        parse_job_spec(jobs[0]).layout, run_steps, jobs, [light(weights(m)) for m in models], [batches()] * len(jobs),
        torch.float64,
    )  # fmt: skip
    for number, model in enumerate(models):
        losses, norms, gradients = reference(model)
        for rank in by_rank:
            assert rank[number].losses == pytest.approx(losses, rel=1e-10), jobs[number]
            assert rank[number].grad_norms == pytest.approx(norms, rel=1e-10), jobs[number]
        whole = assemble(gradients, [placed for rank in by_rank for placed in rank[number].gradients])
        for name, expected in gradients.items():
            error = (whole[name] - expected).norm()
            assert error <= 1e-10 * expected.norm() + 1e-13 * norms[-1], (name, jobs[number])


def test_dropout_under_zb_v_matches_a_plain_model(ranks):
    one = job(MODELS[1], (1, 2, 2), micro_batch_size=1, schedule="zb-v", virtual_stages=2)
    by_rank = ranks.run(parse_job_spec(one).layout, run_steps, [one], [weights(1)], [batches()], torch.float64)
    losses, norms, _ = reference(1)
    assert by_rank[0][0].losses == pytest.approx(losses, rel=1e-10)
    assert by_rank[0][0].grad_norms == pytest.approx(norms, rel=1e-10)


def test_dropout_of_ranks_that_share_a_sequence_matches_a_plain_model(ranks):
    methods = ("all_gather", "all_to_all", "ring")
    jobs = [job(MODELS[1], (1, 1, 2), context=2, context_method=each, recompute="selective") for each in methods]
    arguments = jobs, [weights(1)] * 3, [batches()] * 3, torch.float64
    by_rank = ranks.run(parse_job_spec(jobs[0]).layout, run_steps, *arguments)
    losses, norms, _ = reference(1)
    for steps in by_rank[0]:
        assert steps.losses == pytest.approx(losses, rel=1e-10)
        assert steps.grad_norms == pytest.approx(norms, rel=1e-10)


def test_every_step_drops_other_elements():
    losses, _, _ = reference(0)
    plain = PlainGPT(parse_job_spec(job({}, (1, 1, 1)))).double().load(weights(0))
    without = [plain.loss(windows).item() for windows in batches()]
    differences = [a - b for a, b in zip(losses, without, strict=True)]
    assert min(abs(difference) for difference in differences) > 1e-4, "dropout does something"
    assert abs(differences[0] - differences[1]) > 1e-4


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_evaluation_applies_no_dropout(ranks, layout):
    one = job({}, layout)
    plain = PlainGPT(parse_job_spec(one)).double().load(weights(0))
    expected = plain.loss(batches()[0]).item()
    for loss in ranks.run(parse_job_spec(one).layout, evaluate, one, weights(0), batches()[0]):
        assert loss == pytest.approx(expected, rel=1e-12)
