"""A parameter's first values are those of its part of the whole model, whoever holds it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
