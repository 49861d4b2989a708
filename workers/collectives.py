"""Collectives over point-to-point messages, for gloo.

gloo's own all-reduce and reduce-scatter cost 5 to 10 times as much as the messages they are made of once ranks share
cores (docs/decisions/0001-own-gloo-collectives.md). These send every rank's part straight to whoever needs it, which
moves the least bytes possible, and add in the order of ranks, so that the same layout always gives the same bits.
On GPUs NCCL's own are used instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

# Up to this size latency counts, not volume: one rank adds for all.
SMALL_BYTES = 32 * 1024

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def add(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """In-place sum."""
    return total.add_(part)


def maximum(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """In-place maximum."""
    return torch.maximum(total, part, out=total)


class PointToPoint:
    """Collectives of one process group. `ranks` are global, in order along the axis; tensors are contiguous."""

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], rank: int):
        self._group, self._ranks, self._index = group, ranks, ranks.index(rank)
        self._others = [i for i in range(len(ranks)) if i != self._index]

    def _send(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        return dist.isend(tensor, self._ranks[to], group=self._group)

    def _receive(self, tensor: torch.Tensor, source: int) -> dist.Work | None:
        return dist.irecv(tensor, self._ranks[source], group=self._group)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Every rank's `tensor`, one after the other, into `out`."""
        parts = out.view(len(self._ranks), -1)
        works = [self._receive(parts[i], i) for i in self._others]
        works += [self._send(tensor, i) for i in self._others]
        parts[self._index].copy_(tensor.view(-1))
        _wait(works)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, combine: Combine = add) -> None:
        """This rank's part of the sum of every rank's `tensor` into `out`."""
        parts = tensor.view(len(self._ranks), -1)
        received = parts.new_empty(parts.shape)
        works = [self._receive(received[i], i) for i in self._others]
        works += [self._send(parts[i], i) for i in self._others]
        received[self._index].copy_(parts[self._index])
        _wait(works)
        flat = out.view(-1)
        flat.copy_(received[0])
        for part in received[1:]:
            combine(flat, part)

    def all_reduce(self, tensor: torch.Tensor, combine: Combine = add) -> None:
        """The sum of every rank's `tensor` in place, with the same bits on every rank."""
        flat = tensor.view(-1)
        size = len(self._ranks)
        if size == 2:
            self._exchange(flat, combine)
        elif flat.numel() * flat.element_size() <= SMALL_BYTES:
            self._through_first(flat, combine)
        else:
            padded = flat.new_zeros(-(-flat.numel() // size) * size)
            padded[: flat.numel()] = flat
            part = padded.new_empty(padded.numel() // size)
            self.reduce_scatter(part, padded, combine)
            self.all_gather(padded, part)
            flat.copy_(padded[: flat.numel()])

    def _exchange(self, flat: torch.Tensor, combine: Combine) -> None:
        other = self._others[0]
        received = torch.empty_like(flat)
        _wait([self._receive(received, other), self._send(flat, other)])
        combine(flat, received)

    def _through_first(self, flat: torch.Tensor, combine: Combine) -> None:
        if self._index > 0:
            _wait([self._send(flat, 0)])
            _wait([self._receive(flat, 0)])
            return
        received = [torch.empty_like(flat) for _ in self._others]
        _wait([self._receive(part, i) for part, i in zip(received, self._others, strict=True)])
        for part in received:
            combine(flat, part)
        _wait([self._send(flat, i) for i in self._others])


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
