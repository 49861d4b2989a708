"""Forward in chunks: the numbers of one rank, whatever enters or leaves a region; one communication beside one
product, in the order that all ranks have."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_specs import axes, document, layout_of
from plain_gpt import random_weights
from plain_lora import adapted_model
from rank_programs import gradients_of, light, run_steps, train_job
from torch.multiprocessing.reductions import StorageWeakRef

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.parallel.tensor.linear_autograd import chunks_of, column_forward, row_forward
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.parallel.tensor.sequence_parallel import Region
from manta.workers.spec.reading import parse_job_spec

LENGTH = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama", "kv_heads": 2, "ffn_hidden_size": 40},
    "adapters": {"family": "llama", "kv_heads": 2, "ffn_hidden_size": 40},
    "adapters of gpt": {"family": "gpt"},
}


@pytest.mark.parametrize(
    ("rows", "count", "sizes"), [(12, 3, [4, 4, 4]), (7, 3, [2, 2, 3]), (2, 5, [1, 1]), (4, 1, [4])]
)
def test_forward_chunks_differ_by_at_most_a_row(rows, count, sizes):
    chunks = chunks_of(rows, count)
    assert [end - first for first, end in chunks] == sizes
    assert [first for first, _ in chunks] == [0, *(end for _, end in chunks[:-1])]


# Whole jobs.


def job(family: str, sequence_parallel: bool, chunks: int, **layout: Any) -> dict[str, Any]:
    """One step of a small model without momentum, so that the first moment is the gradient itself."""
    model = {"layers": 4, "hidden_size": 16, "vocabulary_size": 257, "sequence_length": LENGTH}
    train = {"steps": 1, "global_batch_size": 4, "micro_batch_size": 2, "optimizer": {"beta1": 0.0, "clip_norm": 0.0}}
    parallel = {"sequence_parallel": sequence_parallel, "forward_chunks": chunks} | layout
    if family.startswith("adapters"):
        train["lora"] = {"rank": 3, "alpha": 20.0, "dropout": 0.3}
    return document(model=model | FAMILIES[family], train=train, parallel=parallel)


@functools.cache
def windows() -> torch.Tensor:
    """A global batch."""
    return torch.randint(257, (4, LENGTH + 1), generator=torch.Generator().manual_seed(3))


@functools.cache
def reference(family: str) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """(weights, loss, gradients) of the plain model on one rank in fp64."""
    spec = parse_job_spec(job(family, False, 1))
    model = adapted_model(spec).double()
    weights = random_weights(spec, spread=0.03, model=model)
    model.load(weights)
    loss = model.loss(windows())
    loss.backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return weights, loss.item(), trained


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest, of each parameter's part of the global norm."""
    norm = torch.stack([each.norm() for each in expected.values()]).norm()
    return max(((actual[name] - each).norm() / norm).item() for name, each in expected.items())


PIPELINES: tuple[dict[str, Any], ...] = (
    {"schedule": "zb-v", "virtual_stages": 2},
    {"schedule": "zb-v", "virtual_stages": 2, "recompute": "full"},
    {"schedule": "zb-v", "virtual_stages": 2, "recompute": "selective", "recompute_modules": ["norm"]},
)
"""One layout, so that its ranks are connected once."""


@pytest.mark.parametrize(
    ("size", "splits", "counts", "more"),
    [
        ((2, 1, 1), (True, False), (5,), ({},)),
        ((4, 1, 1), (True, False), (2,), ({},)),
        ((2, 2, 1), (True,), (3,), PIPELINES[1:2]),
        *(pytest.param((size, 1, 1), (True, False), (2, 3), ({},), marks=pytest.mark.soak) for size in (2, 4)),
        pytest.param((2, 2, 1), (True, False), (2, 5), PIPELINES, marks=pytest.mark.soak),
    ],
    ids=[
        *("tensor 2", "tensor 4", "zero-bubble, recomputed"),
        *("tensor 2, few chunks", "tensor 4, few chunks", "zero-bubble"),
    ],
)
def test_forward_chunks_have_the_numbers_of_one_rank(ranks, size, splits, counts, more):
    """A rank has 12, 6 or 3 rows of the sequence: some chunks are larger than others."""
    kinds = [(family, split, each) for family in FAMILIES for split in splits for each in more]
    jobs = [
        (family, job(family, split, count, **axes(size), **each))
        for family, split, each in kinds
        for count in (1, *counts)
    ]
    documents, weights = [each for _, each in jobs], [light(reference(family)[0]) for family, _ in jobs]
    layout = parse_job_spec(documents[0]).layout
    by_rank = ranks.run(layout, run_steps, documents, weights, [[windows()]] * len(jobs), torch.float64)
    for number, (family, _) in enumerate(jobs):
        _, loss, expected = reference(family)
        steps = [rank[number] for rank in by_rank]
        gradients = gradients_of(steps, expected)
        if number % (1 + len(counts)) == 0:
            in_one_piece = gradients
        assert steps[0].losses[0] == pytest.approx(loss, rel=1e-11)
        assert distance(gradients, expected) < 1e-10
        # A kernel may add up products of fewer rows in another order.
        assert distance(gradients, in_one_piece) < 1e-14


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_process_groups_give_the_bits_of_links(ranks, tmp_path: Path, sequence_parallel):
    corpus = tmp_path / "numbers.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    data = {"paths": [str(corpus)], "validation_fraction": 0.2}
    parallel = {"tensor": 2, "sequence_parallel": sequence_parallel, "forward_chunks": 3}
    train = {"steps": 2, "validate_every": 1, "validation_batches": 1}
    spec = document(data=data, train=train, parallel=parallel)
    links, groups = (
        ranks.run(layout_of(tensor=2), train_job, spec, backend=backend) for backend in ("links", "process_groups")
    )
    for one, other in zip(links, groups, strict=True):
        assert one.statistics == other.statistics
        assert torch.equal(one.parameters, other.parameters)
        losses = [[row.get("validation_loss") for row in each.rows] for each in (one, other)]
        assert losses[0] == losses[1]


# One product.


class Noted:
    """A communication that is over when it is waited for."""

    def __init__(self, notes: list[str], name: str, finish: Any):
        self._notes, self._name, self._finish = notes, name, finish

    def wait(self) -> None:
        """Only now is the result there."""
        self._notes.append(f"wait for {self._name}")
        self._finish()


class OfTwo(Comm):
    """Tensor rank 1 of two; the other one has the same numbers, ten times as large."""

    def __init__(self) -> None:
        super().__init__(RankGrid(layout_of(tensor=2)), 1, torch.device("cpu"))
        self.notes: list[str] = []
        self.most_alive, self._started = 0, 0
        self._chunks: list[StorageWeakRef] = []

    def _begins(self, chunk: torch.Tensor, finish: Any) -> Noted:
        self._chunks.append(StorageWeakRef(chunk.untyped_storage()))
        self.most_alive = max(self.most_alive, sum(not each.expired() for each in self._chunks))
        name = f"communication {self._started}"
        self._started += 1
        self.notes.append(f"start {name}")
        return Noted(self.notes, name, finish)

    def start_all_reduce(self, axis, tensor, largest=False):
        return self._begins(tensor, lambda: tensor.mul_(11.0))

    def start_all_gather(self, axis, tensor, out=None):
        out = tensor.new_full((2 * len(tensor), *tensor.shape[1:]), float("nan"))
        return out, self._begins(out, lambda: out.copy_(torch.cat([10.0 * tensor, tensor])))

    def start_reduce_scatter(self, axis, tensor, out=None):
        if out is None:
            out = torch.empty_like(tensor[: len(tensor) // 2])
        return out, self._begins(tensor, lambda: out.copy_(11.0 * tensor[len(tensor) // 2 :]))


class NotedProducts(TorchProducts):
    """Notes each product of a chunk."""

    def __init__(self, notes: list[str]):
        super().__init__()
        self._notes = notes

    def output_into(self, out_rno, x_rni, weight, bias=None):
        self._notes.append(f"product of {x_rni.shape[0] * x_rni.shape[1]} rows")
        super().output_into(out_rno, x_rni, weight, bias)


def region_of(sequence_parallel: bool, chunks: int) -> tuple[Region, list[str]]:
    comm = OfTwo()
    return Region(comm, sequence_parallel, NotedProducts(comm.notes), chunks), comm.notes


def test_forward_holds_two_gathered_chunks_at_once():
    region, _ = region_of(True, 6)
    assert isinstance(region.comm, OfTwo)
    column_forward(whole_numbers(6, 1, 4), [whole_numbers(5, 4)], [None], region)
    assert region.comm.most_alive == 2
    region, _ = region_of(True, 6)
    assert isinstance(region.comm, OfTwo)
    row_forward(whole_numbers(12, 1, 4), whole_numbers(5, 4), None, region)
    assert region.comm.most_alive == 2


def whole_numbers(*shape: int) -> torch.Tensor:
    """Whose sums no rounding touches, in whatever order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


BESIDE = ["start communication 0", "wait for communication 0", "start communication 1", "product of 4 rows",
          "wait for communication 1", "start communication 2", "product of 4 rows", "wait for communication 2",
          "product of 6 rows"]  # fmt: skip
SUMMED = ["product of 4 rows", "start communication 0", "product of 4 rows", "wait for communication 0",
          "start communication 1", "product of 6 rows", "wait for communication 1", "start communication 2",
          "wait for communication 2"]  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
def test_forward_gathers_a_chunk_beside_the_product_of_the_previous(bias):
    """Seven rows a rank in three chunks, of which two weights share the input."""
    weights = [whole_numbers(5, 4), whole_numbers(3, 4)]
    biases = [whole_numbers(5) if bias else None, None]
    x, (region, notes) = whole_numbers(7, 1, 4), region_of(True, 3)
    actual, expected = (column_forward(x, weights, biases, each) for each in (region, region_of(True, 1)[0]))
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert [note for number, note in enumerate(notes) if note != notes[number - 1]] == BESIDE
    one_weight, notes = region_of(True, 3)
    column_forward(x, weights[:1], biases[:1], one_weight)
    assert notes == BESIDE


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_chunk_is_summed_beside_the_product_of_the_next_one(sequence_parallel):
    rows = 14 if sequence_parallel else 7
    x, weight, bias, residual = whole_numbers(rows, 2, 4), whole_numbers(5, 4), whole_numbers(5), whole_numbers(7, 2, 5)
    region, notes = region_of(sequence_parallel, 3)
    actual = row_forward(x, weight, bias, region, residual)
    assert torch.equal(actual, row_forward(x, weight, bias, region_of(sequence_parallel, 1)[0], residual))
    per_row = 2 if sequence_parallel else 1  # rows of the micro-batch's two samples
    assert notes == [note.replace("4 rows", f"{4 * per_row} rows").replace("6 rows", f"{6 * per_row} rows")
                     for note in SUMMED]  # fmt: skip


def test_products_of_separate_row_blocks_are_right_on_gpus_too(monkeypatch):
    """By its one kernel for all blocks."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    x, weight, bias = whole_numbers(3, 8, 4), whole_numbers(5, 4), whole_numbers(5)
    out = torch.full((3, 8, 5), float("nan"))
    for part in (slice(0, 2), slice(2, 8)):
        TorchProducts().output_into(out[:, part], x[:, part], weight, bias)
    assert torch.equal(out, x @ weight.t() + bias)


def test_forward_of_a_single_tensor_rank_is_not_chunked():
    comm = Comm(RankGrid(layout_of()), 0, torch.device("cpu"))
    assert Region(comm, False, TorchProducts(), 4).forward_chunks == 1
