"""One rank's parameters and gradients in two flat buffers, so that a step's communication, optimizer, snapshot and
restore each work on a few long ranges instead of on hundreds of tensors.

The buffer's order groups parameters by what happens to them:

    | tied copy | split, decayed | replicated, decayed | replicated, not decayed | split, not decayed |

so that everything decayed is one range, everything replicated over the tensor group is one range (its gradients
are summed over that group under sequence parallelism, and it is counted once in the norm), and the tied copy, which
is never counted, is the front. Every parameter starts at a multiple of ALIGNMENT elements, and the data-parallel
parts are multiples of it too, so that an element meets the same vector instructions on every rank and layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.parallel.shards import NamedShard

ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the flat buffers."""

    entry: NamedShard
    start: int
    """First element."""
    end: int
    """One past its last element, alignment not included."""


@dataclass(frozen=True)
class Ranges:
    """Element ranges [start, end) of the flat buffers; the rest is not decayed / not replicated."""

    shared_copy: tuple[int, int]
    decayed: tuple[int, int]
    replicated: tuple[int, int]


class FlatParameters:
    """Moves a stage's parameters, and their gradients, into flat buffers; the parameters become views.

    `dtype` is that of the buffers and must be the parameters' own: fp32, or fp64 to check the arithmetic.
    """

    def __init__(self, shards: list[NamedShard], parts: int, device: torch.device, dtype: torch.dtype = torch.float32):
        ordered = sorted(shards, key=_class_of)  # stable: the model's order within a class
        self.slots: list[Slot] = []
        position = 0
        for entry in ordered:
            size = entry.parameter.numel()
            self.slots.append(Slot(entry, position, position + size))
            position = _aligned(position + size, ALIGNMENT)
        self.size = _aligned(max(position, ALIGNMENT), ALIGNMENT * parts)
        self.ranges = self._ranges()
        self.parameters = torch.zeros(self.size, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.size, dtype=dtype, device=device)
        for slot in self.slots:
            parameter = slot.entry.parameter
            parameter.data = self.parameters[slot.start : slot.end].view(parameter.shape)
            # Autograd adds into an existing .grad in place: micro-batches accumulate here.
            parameter.grad = self.gradients[slot.start : slot.end].view(parameter.shape)

    def slot(self, name: str) -> Slot | None:
        """The slot of the parameter with the layout-free name `name`, or None when it lives on another stage."""
        return next((slot for slot in self.slots if slot.entry.name == name), None)

    def _ranges(self) -> Ranges:
        def cover(chosen: list[Slot]) -> tuple[int, int]:
            return (chosen[0].start, _aligned(chosen[-1].end, ALIGNMENT)) if chosen else (0, 0)

        return Ranges(
            shared_copy=cover([slot for slot in self.slots if slot.entry.shard.shared_copy]),
            decayed=cover([slot for slot in self.slots if slot.entry.shard.decay]),
            replicated=cover([slot for slot in self.slots if slot.entry.shard.split_dim is None]),
        )


def _class_of(entry: NamedShard) -> int:
    shard = entry.shard
    if shard.shared_copy:
        return 0
    split = shard.split_dim is not None
    if shard.decay:
        return 1 if split else 2
    return 4 if split else 3


def _aligned(position: int, to: int) -> int:
    return -(-position // to) * to


def overlap(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Intersection of two ranges; empty ones come out as (x, x)."""
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))
