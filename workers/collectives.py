"""Collectives over the CPU links: every rank's part goes straight to whoever needs it, which moves the least bytes
possible, and sums are added in the order of ranks, so that the same layout always gives the same bits.

On GPUs NCCL's own are used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from workers.links import Links, Operation

# Up to this size latency counts, not volume: one rank adds for all.
SMALL_BYTES = 32 * 1024

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def add(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """In-place sum."""
    return total.add_(part)


def maximum(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """In-place maximum."""
    return torch.maximum(total, part, out=total)


class Collectives:
    """Collectives along one axis. `ranks` are global, in order along the axis; tensors are contiguous.

    `star`: everybody is linked to the first rank only, so only `all_reduce` is there.
    """

    def __init__(self, links: Links, channel: int, ranks: list[int], star: bool = False):
        self._links, self._channel, self._ranks, self._star = links, channel, ranks, star
        self._index = ranks.index(links.rank)
        self._others = [i for i in range(len(ranks)) if i != self._index]

    def _send(self, tensor: torch.Tensor, to: int) -> Operation:
        return self._links.send(self._ranks[to], self._channel, tensor)

    def _receive(self, tensor: torch.Tensor, source: int) -> Operation:
        return self._links.receive(self._ranks[source], self._channel, tensor)

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
        elif self._star or flat.numel() * flat.element_size() <= SMALL_BYTES:
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


def _wait(operations: Iterable[Operation]) -> None:
    for operation in operations:
        operation.wait()
