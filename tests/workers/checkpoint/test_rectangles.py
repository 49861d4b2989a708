"""Over all ranks of a layout, each element of each tensor is owned exactly once, and lies where its rectangle says."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manta.workers.checkpoint.durable import rectangles_of
from manta.workers.parallel.data.flat import ALIGNMENT, FlatParameters, Range
from manta.workers.parallel.tensor.shards import NamedShard, ParameterShard

CPU = torch.device("cpu")
sizes = st.integers(1, 40)


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[tuple[int, ...], int | None, bool, bool]]:
    """Some (shape, split dimension, matrix of a layer, tied copy)."""
    shapes = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(st.tuples(sizes) | st.tuples(sizes, sizes))
        split = draw(st.sampled_from([None, *range(len(shape))]))
        copy = split == 0 and draw(st.booleans())
        shapes.append((shape, split, copy or draw(st.booleans()), copy))  # the tied embedding is one
    return shapes


def model_of(described: list, tensor_size: int, index: int) -> list[NamedShard]:
    """One tensor rank's parameters; each element holds its own global number."""
    entries = []
    for number, (shape, split, matrix, copy) in enumerate(described):
        local, start = list(shape), 0
        if split is not None:
            local[split] = math.ceil(shape[split] / tensor_size)  # padded where it does not divide
            start = index * local[split]
        shard = ParameterShard(shape, split, start, group="linear" if matrix else "norm")
        padded = [*shape]
        if split is not None:
            padded[split] = local[split] * tensor_size
        whole = torch.full(padded, -1.0)
        whole[tuple(slice(0, size) for size in shape)] = torch.arange(math.prod(shape)).view(shape).float()
        mine = whole if split is None else whole.narrow(split, start, local[split])
        parameter = nn.Parameter(mine.clone())
        placed = replace(shard, shared_copy=copy)
        entries.append((NamedShard(f"p{number}", parameter, placed, by_autograd=False), mine))
    flat_order = [entry for entry, _ in entries]
    values = {entry.name: mine for entry, mine in entries}
    for entry in flat_order:
        entry.parameter.data = values[entry.name].clone()
    return flat_order


def flat_of(entries: list[NamedShard], replicas: int) -> FlatParameters:
    """Flat buffers, in small buckets, that hold the parameters' values."""
    values = {entry.name: entry.parameter.detach().clone() for entry in entries}
    flat = FlatParameters(entries, replicas, CPU, bucket_bytes=1024)
    for slot in flat.slots:
        slot.entry.parameter.data.copy_(values[slot.entry.name])
    return flat


def state_of(flat: FlatParameters, held: list[Range], values: torch.Tensor) -> torch.Tensor:
    """The ranges `held` of `values`, one after the other."""
    return torch.cat([values[start:end] for start, end in held])


@settings(deadline=None)
@given(tensors(), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_owned_rectangles_hold_every_element_of_the_state_exactly_once(
    described, tensor_size, replicas, everything_held
):
    seen = {f"p{n}": torch.zeros(case[0]) for n, case in enumerate(described) if not case[3]}
    for index in range(tensor_size):
        flat = flat_of(model_of(described, tensor_size, index), replicas)
        for replica in range(replicas):
            owned = flat.parts(replica)
            held = [(0, flat.size)] if everything_held else owned
            state = state_of(flat, held, flat.parameters)
            for rectangle in rectangles_of(flat, held, owned, owned_only=True, tensor_index=index):
                where = tuple(slice(a, a + n) for a, n in zip(rectangle.offsets, rectangle.sizes, strict=True))
                numbers = torch.arange(math.prod(rectangle.shape)).view(rectangle.shape).float()
                assert torch.equal(rectangle.view(state), numbers[where])
                seen[rectangle.name][where] += 1
    assert all((count == 1).all() for count in seen.values())


@settings(deadline=None)
@given(tensors(), st.integers(1, 4), st.integers(1, 5))
def test_rectangles_that_a_rank_needs_cover_its_part_exactly_once(described, tensor_size, replicas):
    for index in range(tensor_size):
        flat = flat_of(model_of(described, tensor_size, index), replicas)
        counts = torch.zeros(flat.size)
        for replica in range(replicas):
            held = flat.parts(replica)
            count = state_of(flat, held, torch.zeros(flat.size))
            for rectangle in rectangles_of(flat, held, held, owned_only=False, tensor_index=index):
                rectangle.view(count).add_(1)
            for (start, end), part in zip(held, count.split([e - s for s, e in held]), strict=True):
                counts[start:end] += part
        for slot in flat.slots:
            values, count = flat.parameters[slot.start : slot.end], counts[slot.start : slot.end]
            assert torch.equal(count, (values >= 0).float()), "once each, padding never"


@settings(deadline=None)
@given(tensors(), st.integers(1, 5))
def test_a_range_of_a_matrix_is_at_most_three_rectangles(described, replicas):
    flat = flat_of(model_of(described, 1, 0), replicas)
    for replica in range(replicas):
        for part in flat.parts(replica):
            rectangles = rectangles_of(flat, [part], [part], owned_only=False, tensor_index=0)
            for slot in flat.slots:
                assert sum(rectangle.name == slot.entry.name for rectangle in rectangles) <= 3


@settings(deadline=None)
@given(tensors(), st.integers(1, 4), st.integers(1, 5))
def test_flat_buffers_group_parameters_by_weight_decay_and_reduction(described, tensor_size, replicas):
    flat = flat_of(model_of(described, tensor_size, 0), replicas)
    unit = ALIGNMENT * replicas
    assert all(start % unit == 0 and end % unit == 0 and start < end for start, end in flat.buckets)
    assert [start for start, _ in flat.buckets] == [0, *(end for _, end in flat.buckets[:-1])]
    assert flat.buckets[-1][1] == flat.size
    tail = flat.buckets[-1][0]
    for slot in flat.slots:
        assert slot.start % ALIGNMENT == 0
        parameter, shard = slot.entry.parameter, slot.entry.shard
        assert parameter.data_ptr() == flat.parameters[slot.start :].data_ptr()
        assert parameter.grad.data_ptr() == flat.gradients[slot.start :].data_ptr()
        matrix = shard.group == "linear"
        assert any(start <= slot.start and slot.end <= end for start, end in flat.decayed) == matrix
        if replicas > 1 and (shard.split_dim is None or not matrix):
            assert slot.start >= tail, "what has more to wait for is reduced last"
