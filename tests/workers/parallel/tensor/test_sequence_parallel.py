"""What enters and leaves a tensor-parallel region, with and without sequence parallelism."""

from __future__ import annotations

import pytest
import torch
from engine_specs import layout_of

from manta.workers.comm.backend import DONE
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.parallel.tensor.sequence_parallel import (
    Region,
    gather,
    leave,
    sum_partial,
    sum_replicated_gradients,
)


class OfTwo(Comm):
    """Tensor rank 1 of two; the other one has the same numbers, ten times as large."""

    def start_all_reduce(self, axis, tensor, largest=False):
        assert axis == "tensor"
        tensor.mul_(11.0)
        return DONE

    def start_all_gather(self, axis, tensor, out=None):
        return torch.cat([10.0 * tensor, tensor]), DONE

    def start_reduce_scatter(self, axis, tensor, out=None):
        return 11.0 * tensor[len(tensor) // 2 :], DONE


def region(sequence_parallel: bool) -> Region:
    comm = OfTwo(RankGrid(layout_of(tensor=2)), 1, torch.device("cpu"))
    return Region(comm, sequence_parallel, TorchProducts())


X = torch.arange(1.0, 9.0).view(4, 1, 2)


def test_sequence_parallel_rank_holds_its_part_of_the_sequence():
    assert (region(True).sequence_split, region(False).sequence_split) == (2, 1)
    assert Positions.of(8).outside(region(True)) == Positions(((4, 8),))
    assert Positions.of(8).outside(region(False)) == Positions.of(8)


def test_sequence_is_gathered_only_if_it_is_split():
    assert torch.equal(gather(X, region(True)), torch.cat([10 * X, X]))
    assert gather(X, region(False)) is X


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_leaving_a_tensor_region_sums_and_its_gradient_returns_to_all_ranks(sequence_parallel):
    x = X.clone().requires_grad_()
    left = leave(x, region(sequence_parallel))
    assert torch.equal(left, 11 * (X[2:] if sequence_parallel else X))
    assert torch.equal(x.detach(), X), "what is summed is a copy"
    left.backward(torch.ones_like(left))
    expected = (
        torch.cat([torch.full((2, 1, 2), 10.0), torch.ones(2, 1, 2)]) if sequence_parallel else torch.ones_like(X)
    )
    assert torch.equal(x.grad, expected)


def test_partial_results_are_summed_in_place_without_sequence_parallelism():
    x = X.clone()
    assert sum_partial(x, region(False)) is x
    assert torch.equal(x, 11 * X)


def test_replicated_gradients_are_summed_in_place():
    gradients = [torch.full((2,), 1.0), torch.full((3,), 2.0)]
    sum_replicated_gradients(gradients, region(True).comm)
    assert [each.tolist() for each in gradients] == [[11.0] * 2, [22.0] * 3]
    sum_replicated_gradients([], region(True).comm)
