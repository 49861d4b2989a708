"""Output layer and loss of a few tokens at a time (`train.head_tokens`): losses and gradients of the plain path under
every layout, and its bits where a micro-batch is taken at once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from dispatch_mode import DispatchMode
from engine_specs import axes, document, spec
from one_layer import lone_rank
from plain_gpt import NO_TARGET, random_weights
from rank_programs import START, Steps, evaluate, gradients_of, light, micro_batches, run_steps, train_job

from manta.workers.engine import Engine
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.spec.reading import parse_job_spec

TOKENS = 5
"""Of the 16 of a micro-batch: the last part has one."""
JOBS: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    "alone": ((1, 1, 1), {}, {}),
    "tensor": ((2, 1, 1), {}, {}),
    "whole sequences, z-loss": ((2, 1, 1), {"sequence_parallel": False}, {"z_loss": 0.02}),
    "pipeline, replicas": ((1, 2, 2), {"zero": 1}, {"z_loss": 0.02}),
    "zb-h1": ((1, 2, 1), {"schedule": "zb-h1"}, {}),
    "zb-v": ((2, 2, 1), {"schedule": "zb-v", "virtual_stages": 2}, {"z_loss": 0.02}),
    "zb-v, elastic": ((1, 2, 1), {"schedule": "zb-v", "virtual_stages": 2}, {"deterministic": "elastic"}),
    "zb-h1, elastic": ((1, 2, 1), {"schedule": "zb-h1"}, {"deterministic": "elastic"}),
    "gpipe, full": ((1, 2, 1), {"schedule": "gpipe", "recompute": "full"}, {}),
    "interleaved": ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2}, {}),
}


def job(name: str, head_tokens: int, tied: bool = True) -> dict[str, Any]:
    """One step without momentum, so that the first moment is the gradient itself; a vocabulary that nothing divides."""
    layout, parallel, train = JOBS[name]
    numbers = {"steps": 1, "micro_batch_size": 2, "optimizer": {"beta1": 0.0, "clip_norm": 0.0}}
    return document(
        model={"layers": 4, "hidden_size": 16, "vocabulary_size": 257, "tie_embeddings": tied},
        train=numbers | train | {"head_tokens": head_tokens},
        parallel=axes(layout) | parallel,
    )


@functools.cache
def windows() -> torch.Tensor:
    """A global batch [B, 9] with some positions that have no target."""
    tokens = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(4))
    tokens[0, 2:7] = NO_TARGET
    tokens[5, 8] = NO_TARGET
    return tokens


def steps_of(ranks: Any, name: str, tied: bool, *sizes: int, dtype: torch.dtype = torch.float64) -> list[list[Steps]]:
    """Of each size what every rank knows after a step."""
    jobs = [job(name, size, tied) for size in sizes]
    weights = light(random_weights(parse_job_spec(jobs[0])))
    batches = [[windows()] for _ in jobs]
    by_rank = ranks.run(parse_job_spec(jobs[0]).layout, run_steps, jobs, [weights for _ in jobs], batches, dtype)
    return [[rank[number] for rank in by_rank] for number in range(len(jobs))]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", JOBS)
def test_every_layout_has_the_gradients_of_the_plain_path(ranks, name, tied):
    whole, parts, at_once = steps_of(ranks, name, tied, 0, TOKENS, 16)
    weights = random_weights(parse_job_spec(job(name, 0, tied)))
    expected, actual, bits = (gradients_of(each, weights) for each in (whole, parts, at_once))
    norm = torch.stack([each.norm() for each in expected.values()]).norm()
    for plain, each, same in zip(whole, parts, at_once, strict=True):
        assert each.losses == pytest.approx(plain.losses, rel=1e-13)
        if plain.z_losses != [None]:
            assert each.z_losses == pytest.approx(plain.z_losses, rel=1e-13)
        assert each.grad_norms == pytest.approx(plain.grad_norms, rel=1e-11)
        assert (same.losses, same.z_losses, same.grad_norms) == (plain.losses, plain.z_losses, plain.grad_norms)
    for parameter, gradient in expected.items():
        assert (actual[parameter] - gradient).norm() <= 1e-11 * max(gradient.norm(), 5e-4 * norm), parameter
    assert all(torch.equal(bits[parameter], gradient) for parameter, gradient in expected.items())


def test_evaluation_has_the_losses_of_the_plain_path(ranks):
    for name in ("alone", "tensor"):
        weights = light(random_weights(parse_job_spec(job(name, 0))))
        losses = [
            ranks.run(parse_job_spec(job(name, 0)).layout, evaluate, job(name, size), weights, windows())[0]
            for size in (0, TOKENS)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-14)


def test_chunked_head_with_elastic_sums_has_the_same_bits_for_any_replica_count(ranks, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(200)))
    curves = []
    for replicas in (1, 3):
        sections = {"model": {"layers": 2}, "parallel": axes((1, 1, replicas)), "data": {"paths": [str(corpus)]}}
        numbers = {"steps": 3, "micro_batch_size": 2, "head_tokens": TOKENS, "deterministic": "elastic"}
        each = document(**sections, train=numbers)
        rows = ranks.run(parse_job_spec(each).layout, train_job, each, None, None, START)[0].rows
        curves.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert curves[0] == curves[1]


@pytest.mark.parametrize("frozen", [["output"], ["embedding", "layers", "final_norm"], ["embedding", "layers.0"]])
def test_chunked_head_gives_frozen_parameters_no_gradient_and_others_the_same(frozen):
    gradients = []
    for size in (0, 16, TOKENS):
        model = {"layers": 2, "hidden_size": 16, "tie_embeddings": False}
        engine = Engine(one_rank(size, model=model, frozen=frozen), lone_rank(one_rank(size)), torch.float64)
        engine.initialise(1)
        trained(engine)
        gradients.append(engine.flat.gradients.clone())
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-5, atol=1e-9)


def one_rank(head_tokens: int, model: dict[str, Any] | None = None, **train: Any) -> Any:
    """A small job of one rank."""
    numbers = {"micro_batch_size": 2, "head_tokens": head_tokens}
    return spec(model={"layers": 2, "hidden_size": 16} | (model or {}), train=numbers | train)


def trained(engine: Engine) -> None:
    """Gradients of a batch."""
    batch = micro_batches(engine.spec, 0, windows().abs())
    engine.reduction.begin(len(batch), len(windows()))
    engine.pipeline.train(batch, 1.0)
    engine.reduction.finish()


class _Largest(DispatchMode):
    """The most elements of a tensor as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (301,) and not func.is_view:
            self.rows = max(self.rows, result.numel() // 301)
        return result


@pytest.mark.parametrize(("size", "most"), [(0, 16), (TOKENS, TOKENS)])
def test_chunked_head_never_makes_more_logits_than_its_chunk(size, most):
    job_spec = one_rank(size, model={"vocabulary_size": 301})
    engine = Engine(job_spec, lone_rank(job_spec))
    engine.initialise(1)
    with _Largest() as seen:
        trained(engine)
        engine.pipeline.evaluate(micro_batches(job_spec, 0, windows().abs()))
    assert seen.rows == most


def test_a_weight_is_reported_once_a_micro_batch():
    """The reduction of its bucket begins when all micro-batches have been added."""
    job_spec = one_rank(TOKENS, model={"tie_embeddings": False})
    engine, reported = Engine(job_spec, lone_rank(job_spec)), []
    engine.initialise(1)
    engine.pipeline._when_added = reported.append
    trained(engine)
    output = engine.model.chunks[0].output.weight
    assert sum(each is output for each in reported) == 4


def test_products_of_the_engine_make_the_logits():
    """Other kernels take the place of torch's here too."""
    rows: list[int] = []

    class Counted(TorchProducts):
        def output(self, x, weight, bias=None):
            if weight.shape[0] == 301:
                rows.append(len(x))
            return super().output(x, weight, bias)

    job_spec = one_rank(TOKENS, model={"vocabulary_size": 301})
    engine = Engine(job_spec, lone_rank(job_spec), products=Counted())
    engine.initialise(1)
    trained(engine)
    assert rows == [5, 5, 5, 1] * 4
