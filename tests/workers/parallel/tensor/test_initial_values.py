"""A parameter's first values are those of its part of the whole model, whoever holds it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manta.workers.parallel.tensor import shards
from manta.workers.parallel.tensor.shards import NamedShard, ParameterShard, fill_initial


def filled(shard: ParameterShard, shape: tuple[int, ...], seed: int = 1, name: str = "it") -> torch.Tensor:
    """What a rank begins with whose memory holds something."""
    local = torch.full(shape, 9.0)
    fill_initial(NamedShard(name, nn.Parameter(torch.zeros(shape)), shard, by_autograd=False), local, seed)
    return local


WHOLE = filled(ParameterShard((10, 6), std=0.5), (10, 6))


@pytest.mark.parametrize(("dim", "start", "shape"), [(0, 0, (4, 6)), (0, 4, (4, 6)), (1, 3, (10, 3)), (0, 9, (1, 6))])
def test_initial_values_of_a_shard_are_cut_from_the_whole(dim, start, shape):
    values = filled(ParameterShard((10, 6), dim, start, std=0.5), shape)
    assert torch.equal(values, WHOLE.narrow(dim, start, shape[dim]))


@pytest.mark.parametrize(("start", "real"), [(8, 2), (10, 0), (12, 0)])
def test_initial_values_beyond_the_vocabulary_are_zero(start, real):
    values = filled(ParameterShard((10, 6), 0, start, std=0.5), (4, 6))
    assert torch.equal(values[:real], WHOLE[start : start + real])
    assert not values[real:].any()


def test_initial_values_depend_on_seed_and_name_and_have_the_given_deviation():
    shard = ParameterShard((200, 50), std=0.5)
    first = filled(shard, (200, 50))
    assert first.std().item() == pytest.approx(0.5, rel=0.05)
    assert abs(first.mean().item()) < 0.02
    assert torch.equal(first, filled(shard, (200, 50)))
    assert not torch.equal(first, filled(shard, (200, 50), seed=2))
    assert not torch.equal(first, filled(shard, (200, 50), name="other"))


def test_initial_values_without_a_deviation_are_constant():
    assert filled(ParameterShard((3,), constant=1.0), (3,)).tolist() == [1.0] * 3
    assert filled(ParameterShard((3,)), (3,)).tolist() == [0.0] * 3


PARTS = [(None, 1), (0, 2), (0, 5), (1, 1), (1, 2), (1, 3)]


@pytest.fixture
def small_tiles(monkeypatch):
    """Of 4 rows and 16 columns, of vectors 64 numbers."""
    for name, value in (("SINGLE_DRAW_ELEMENTS", 100), ("TILE", 64), ("TILE_COLUMNS", 16)):
        monkeypatch.setattr(shards, name, value)


@pytest.mark.parametrize("shape", [(7, 12), (100, 48), (103, 30), (257, 6), (333,)], ids=str)
def test_initial_values_of_shards_of_a_large_parameter_match_the_whole(small_tiles, shape):
    whole = filled(ParameterShard(shape, std=0.02), shape)
    assert len(torch.unique(whole)) > 0.99 * whole.numel(), "no tile is like another"
    for dim, ranks in PARTS:
        if dim == 1 and (not shape[1:] or shape[1] % ranks):
            continue
        length = -(-shape[dim] // ranks) if dim is not None else 0
        for rank in range(ranks):
            local = tuple(length if d == dim else size for d, size in enumerate(shape))
            values = filled(ParameterShard(shape, dim, rank * length, std=0.02), local)
            expected = torch.zeros(local)
            part = whole if dim is None else whole.split(length, dim)[rank] if rank * length < shape[dim] else whole[:0]
            expected[tuple(slice(0, size) for size in part.shape)] = part
            assert torch.equal(values, expected)


def test_initial_values_drawn_by_several_threads_are_the_same(small_tiles, monkeypatch):
    one = filled(ParameterShard((90, 70), std=0.02), (90, 70))
    monkeypatch.setattr(shards, "_threads", lambda: 5)
    assert torch.equal(filled(ParameterShard((90, 70), std=0.02), (90, 70)), one)


@pytest.mark.parametrize(("dim", "start", "shape"), [(0, 100, (100, 64)), (1, 16, (1000, 16))])
def test_rank_draws_few_initial_values_beyond_its_own(small_tiles, monkeypatch, dim, start, shape):
    drawn, normal = [], torch.Tensor.normal_

    def noted(self, *args, **kwargs):
        drawn.append(self.numel())
        return normal(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", noted)
    filled(ParameterShard((1000, 64), dim, start, std=0.02), shape)
    assert max(drawn) <= 64
    assert sum(drawn) <= shape[0] * shape[1] + 4 * 64


def test_initial_values_of_a_moderate_parameter_are_one_draw():
    generator = torch.Generator().manual_seed(shards._name_seed(1, "it"))
    one = torch.empty(100, 48).normal_(0.0, 0.02, generator=generator)
    assert torch.equal(filled(ParameterShard((100, 48), std=0.02), (100, 48)), one)
