"""Collectives over the CPU links: every rank's part is sent directly to the ranks that need it, which moves the minimum
number of bytes, and sums are added in the order of ranks, so that the same layout always gives the same bits. On GPUs
NCCL's collectives are used instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workers.comm.backend import Started, Tensors
from workers.comm.links import Links, Operation

# Up to this size latency matters, not volume: one rank adds for all.
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

    `star`: all are linked to the first rank only, so only `all_reduce` is there.
    """

    def __init__(self, links: Links, channel: int, ranks: list[int], star: bool = False):
        self._links, self._channel, self._ranks, self._star = links, channel, ranks, star
        self._index = ranks.index(links.rank)
        self._others = [i for i in range(len(ranks)) if i != self._index]

    def _send(self, tensor: torch.Tensor, to: int) -> Operation:
        return self._links.send(self._ranks[to], self._channel, tensor)

    def _receive(self, tensor: torch.Tensor, source: int) -> Operation:
        return self._links.receive(self._ranks[source], self._channel, tensor)

    def start_all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Started:
        """Begin to gather every rank's `tensor`, one after the other, into `out`."""
        parts = out.view(len(self._ranks), -1)
        works = [self._receive(parts[i], i) for i in self._others]
        works += [self._send(tensor, i) for i in self._others]
        parts[self._index].copy_(tensor.view(-1))
        return Started(works)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Every rank's `tensor`, one after the other, into `out`."""
        self.start_all_gather(out, tensor).wait()

    def start_reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, combine: Combine = add) -> Started:
        """Begin to bring this rank's part of the sum of every rank's `tensor` into `out`, which may be that part of
        `tensor` itself; otherwise `tensor` must not change until the wait is over."""
        parts = tensor.view(len(self._ranks), -1)
        received = parts.new_empty((len(self._others), parts.shape[1]))
        works = [self._receive(received[at], i) for at, i in enumerate(self._others)]
        works += [self._send(parts[i], i) for i in self._others]

        def finish() -> None:
            flat = out.view(-1)
            # In the order of ranks, for the same bits every time. The sum is in the first one's memory if that is ours:
            # `out` may hold a part that is yet to be added.
            in_order = [*received[: self._index], parts[self._index], *received[self._index :]]
            total = flat.copy_(in_order[0]) if self._index == 0 else in_order[0]
            for part in in_order[1:]:
                combine(total, part)
            if self._index > 0:
                flat.copy_(total)

        return Started(works, finish)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, combine: Combine = add) -> None:
        """This rank's part of the sum of every rank's `tensor` into `out`."""
        self.start_reduce_scatter(out, tensor, combine).wait()

    def start_all_to_all(self, outgoing: Sequence[Tensors], incoming: Sequence[Tensors]) -> Started:
        """Begin to send `outgoing[i]` to rank i, tensor by tensor, and to receive `incoming[i]` from it; nothing goes
        to this rank itself."""
        works = [self._receive(tensor, i) for i in self._others for tensor in incoming[i]]
        return Started(works + [self._send(tensor, i) for i in self._others for tensor in outgoing[i]])

    def start_all_reduce(self, tensor: torch.Tensor, combine: Combine = add) -> Started:
        """Begin to sum every rank's `tensor` in place, with the same bits on every rank. Nothing else may be started
        along the axis before its wait: part of its messages are sent then."""
        flat = tensor.view(-1)
        size = len(self._ranks)
        if size == 2:
            return self._start_exchange(flat, combine)
        if self._star or flat.numel() * flat.element_size() <= SMALL_BYTES:
            return self._start_through_first(flat, combine)
        padded = flat.new_zeros(-(-flat.numel() // size) * size)
        padded[: flat.numel()] = flat
        part = padded.new_empty(padded.numel() // size)
        scattering = self.start_reduce_scatter(part, padded, combine)

        def finish() -> None:
            scattering.wait()
            self.all_gather(padded, part)
            flat.copy_(padded[: flat.numel()])

        return Started((), finish)

    def all_reduce(self, tensor: torch.Tensor, combine: Combine = add) -> None:
        """The sum of every rank's `tensor` in place, with the same bits on every rank."""
        self.start_all_reduce(tensor, combine).wait()

    def _start_exchange(self, flat: torch.Tensor, combine: Combine) -> Started:
        other = self._others[0]
        received = torch.empty_like(flat)
        return Started([self._receive(received, other), self._send(flat, other)], lambda: combine(flat, received))

    def _start_through_first(self, flat: torch.Tensor, combine: Combine) -> Started:
        if self._index > 0:
            sending = self._send(flat, 0)

            def receive() -> None:
                sending.wait()  # the sum overwrites what is sent
                self._receive(flat, 0).wait()

            return Started((), receive)
        received = [torch.empty_like(flat) for _ in self._others]
        works = [self._receive(part, i) for part, i in zip(received, self._others, strict=True)]

        def finish() -> None:
            for part in received:
                combine(flat, part)
            Started([self._send(flat, i) for i in self._others]).wait()

        return Started(works, finish)
