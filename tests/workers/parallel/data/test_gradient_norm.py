"""The squared norm of a gradient: each parameter counts once, and a GPU sums up rows of its own length."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from manta.workers.parallel.data import agreement
from manta.workers.parallel.data.elastic_sums import ElasticNorm
from manta.workers.parallel.data.flat import FlatParameters
from manta.workers.parallel.tensor.shards import NamedShard, ParameterShard


@pytest.mark.parametrize("length", [64, agreement._LONG_ROW, 3 * agreement._LONG_ROW + 640])
def test_squared_norm_of_a_part_includes_the_remainder_of_long_rows(length: int) -> None:
    part = torch.randn(length, generator=torch.Generator().manual_seed(1))
    square = agreement._square_by_long_rows(part)
    assert square.dtype == torch.float64 and square.shape == ()
    torch.testing.assert_close(square, part.double().square().sum(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("tensor_index", "square"), [(0, 100.0 + 9 * 200.0), (1, 100.0)])
def test_gradient_norm_counts_replicated_parameters_on_the_first_tensor_rank_only(
    tensor_index: int, square: float
) -> None:
    sizes = {"split": (100, ParameterShard((8, 4), 0, std=0.02)), "whole": (200, ParameterShard((4,), std=0.02))}
    shards = [NamedShard(name, nn.Parameter(torch.zeros(size)), shard, False) for name, (size, shard) in sizes.items()]
    flat = FlatParameters(shards, 1, torch.device("cpu"))
    for slot, value in zip(flat.slots, (1.0, 3.0), strict=True):
        flat.gradients[slot.start : slot.end] = value
    reduction = SimpleNamespace(flat=flat, gather=lambda parts, into, row: into.copy_(torch.cat(parts)))
    counted = agreement.CountedNorm(flat, [(0, flat.size)], tensor_index)
    for norm in (counted, ElasticNorm(reduction, tensor_index)):
        assert norm.square([flat.gradients]).item() == pytest.approx(square)
