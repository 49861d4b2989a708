"""A rank's flat state as rectangles of layout-free tensors.

With ZeRO-1 a rank owns ranges of the flat buffer, which begin and end anywhere inside a parameter. A range of a
row-major matrix is at most three rectangles: the rest of its first row, whole rows, the beginning of its last row.
Rectangles with global offsets are what torch.distributed.checkpoint stores, so any layout can read any other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workers.parallel.data.flat import FlatParameters, Range, Slot, answers_for, overlap


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a global tensor, and where its elements lie in this rank's part of the flat state."""

    name: str
    """Layout-free parameter name."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    offsets: tuple[int, ...]
    """First index of the rectangle in each dimension."""
    sizes: tuple[int, ...]
    """Length of the rectangle in each dimension."""
    start: int
    """First element in the rank's part."""
    stride: int
    """Elements from one row of the rectangle to the next, in the rank's part."""

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """The rectangle's elements within `part` (1-D), as a tensor of `sizes`."""
        strides = (1,) if len(self.sizes) == 1 else (self.stride, 1)
        return part.as_strided(self.sizes, strides, part.storage_offset() + self.start)


def rectangles_of(
    flat: FlatParameters, held: list[Range], wanted: list[Range], owned_only: bool, tensor_index: int
) -> list[Rectangle]:
    """The rectangles that make up the ranges `wanted` of the flat buffer, in a state that keeps the ranges `held` one
    after the other. Each wanted range lies within a held one.

    `owned_only` leaves out what another rank of the same replica answers for (copies of the tied embedding, and all
    but the first of equal parts on tensor ranks), so that over all ranks every element of the model appears once.
    """
    starts, position = [], 0
    for start, end in held:
        starts.append(position - start)
        position += end - start
    rectangles: list[Rectangle] = []
    for slot in (*flat.slots, *flat.frozen):
        if owned_only and not answers_for(slot.entry, tensor_index):
            continue
        for wish in wanted:
            first, last = overlap((slot.start, slot.end), wish)
            if first < last:
                shift = next(s for s, r in zip(starts, held, strict=True) if r[0] <= first and last <= r[1])
                rectangles += _rectangles(slot, first, last, shift)
    return rectangles


def _rectangles(slot: Slot, start: int, end: int, shift: int) -> Iterator[Rectangle]:
    local = tuple(slot.entry.parameter.shape)
    columns = local[1] if len(local) == 2 else 1
    position = start
    while position < end:
        row, column = divmod(position - slot.start, columns)
        if column or end - position < columns:
            rows, width = 1, min(columns - column, end - position)
        else:
            rows, width = (end - position) // columns, columns
        rectangle = _global_rectangle(slot, row, column, rows, width, position + shift, columns)
        if rectangle is not None:
            yield rectangle
        position += rows * width


def _global_rectangle(
    slot: Slot, row: int, column: int, rows: int, width: int, start: int, columns: int
) -> Rectangle | None:
    """The local rectangle in global indices, cut at the real size of a padded vocabulary."""
    shard, name = slot.entry.shard, slot.entry.name
    offsets, sizes = [row, column], [rows, width]
    if len(shard.shape) == 1:
        offsets, sizes = [row], [rows]
    if shard.split_dim is not None:
        offsets[shard.split_dim] += shard.start
        room = shard.shape[shard.split_dim] - offsets[shard.split_dim]
        sizes[shard.split_dim] = min(sizes[shard.split_dim], room)
    if min(sizes) <= 0:
        return None
    return Rectangle(name, shard.shape, tuple(offsets), tuple(sizes), start, columns)
