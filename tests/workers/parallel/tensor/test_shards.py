"""A parameter's first values are those of its part of the whole model, whoever holds it."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from workers.parallel.tensor import shards
from workers.parallel.tensor.shards import NamedShard, ParameterShard, fill_initial


def filled(shard: ParameterShard, shape: tuple[int, ...], seed: int = 1, name: str = "it") -> torch.Tensor:
    """What a rank begins with whose memory holds something."""
    local = torch.full(shape, 9.0)
    fill_initial(NamedShard(name, nn.Parameter(torch.zeros(shape)), shard, by_autograd=False), local, seed)
    return local


WHOLE = filled(ParameterShard((10, 6), std=0.5), (10, 6))


@pytest.mark.parametrize(("dim", "start", "shape"), [(0, 0, (4, 6)), (0, 4, (4, 6)), (1, 3, (10, 3)), (0, 9, (1, 6))])
def test_a_part_is_cut_out_of_the_whole(dim, start, shape):
    values = filled(ParameterShard((10, 6), dim, start, std=0.5), shape)
    assert torch.equal(values, WHOLE.narrow(dim, start, shape[dim]))


@pytest.mark.parametrize(("start", "real"), [(8, 2), (10, 0), (12, 0)])
def test_what_reaches_past_the_vocabulary_is_zero(start, real):
    values = filled(ParameterShard((10, 6), 0, start, std=0.5), (4, 6))
    assert torch.equal(values[:real], WHOLE[start : start + real])
    assert not values[real:].any()


def test_values_depend_on_seed_and_name_and_have_the_deviation_that_is_said():
    shard = ParameterShard((200, 50), std=0.5)
    first = filled(shard, (200, 50))
    assert first.std().item() == pytest.approx(0.5, rel=0.05)
    assert abs(first.mean().item()) < 0.02
    assert torch.equal(first, filled(shard, (200, 50)))
    assert not torch.equal(first, filled(shard, (200, 50), seed=2))
    assert not torch.equal(first, filled(shard, (200, 50), name="other"))


def test_what_has_no_deviation_is_constant():
    assert filled(ParameterShard((3,), constant=1.0), (3,)).tolist() == [1.0] * 3
    assert filled(ParameterShard((3,)), (3,)).tolist() == [0.0] * 3


SHAPES = [(7, 3), (100, 48), (1003, 37), (257, 32), (33,), (16, 1)]


def one_draw(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shards._name_seed(7, "name"))
    return torch.empty(shape).normal_(0.0, 0.02, generator=generator)


@pytest.mark.parametrize("block", [16, 64, 1000, 5000, 2**22])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_those_of_one_draw_of_all(shape, block):
    whole = one_draw(shape)
    for dim, ranks in [(None, 1), (0, 2), (0, 5), *[(1, n) for n in (1, 2, 3) if shape[1:] and shape[1] % n == 0]]:
        length = -(-shape[dim] // ranks) if dim is not None else 0
        for rank in range(ranks):
            local = torch.full([length if d == dim else size for d, size in enumerate(shape)], float("nan"))
            shard = ParameterShard(shape, dim, rank * length, std=0.02)
            with patch.object(shards, "BLOCK", block):
                fill_initial(NamedShard("name", torch.nn.Parameter(local), shard, False), local, 7)
            expected = torch.zeros_like(local)
            part = (
                whole
                if dim is None
                else whole.narrow(dim, min(rank * length, shape[dim]), max(0, min(length, shape[dim] - rank * length)))
            )
            expected[tuple(slice(0, size) for size in part.shape)] = part
            assert torch.equal(local, expected)


def test_no_more_than_a_block_is_drawn_at_a_time():
    drawn = []
    normal = torch.Tensor.normal_

    def noted(self, *args, **kwargs):
        drawn.append(self.numel())
        return normal(self, *args, **kwargs)

    local = torch.empty(100, 64)
    shard = ParameterShard((1000, 64), 0, 100, std=0.02)
    with patch.object(shards, "BLOCK", 4096), patch.object(torch.Tensor, "normal_", noted):
        fill_initial(NamedShard("name", torch.nn.Parameter(local), shard, False), local, 7)
    assert max(drawn) <= 4096
    assert sum(drawn) < 300 * 64, "what lies behind the part is not drawn"
