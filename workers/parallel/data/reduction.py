"""Reduction of gradients over the ranks that hold the same parameters, bucket by bucket, overlapped with the remaining
backward passes; and sums, once per step, of gradients that several ranks of a replica compute in parts.

A bucket is started once every weight in it has the gradients of all micro-batches. Buckets start in one fixed order,
from the last layers to the first, so that all holders agree on it, those of experts among the others. A sum is over
holders in their order, so its bits depend neither on the buckets nor on when they were started.
"""

from __future__ import annotations

import torch
from torch import nn

from manta.workers.comm.backend import Handle
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import Axis
from manta.workers.parallel.data.flat import FlatParameters, Range, Slot
from manta.workers.parallel.tensor.sequence_parallel import sum_replicated_gradients
from manta.workers.parallel.tensor.weight_gradients import clear_forgotten, forget, main_grad


class GradientReduction:
    """The gradients of one rank's part of each bucket, summed over the ranks that hold the same parameters."""

    def __init__(self, flat: FlatParameters, comm: Comm, shared: SharedGradients, uses: dict[nn.Parameter, int]):
        """`uses`: how many times a micro-batch adds to the gradient of each weight of the head."""
        self.flat, self.comm, self.shared, self.uses = flat, comm, shared, uses
        self.parts = flat.parts(comm.index(comm.grid.holders))
        self.reduced = [flat.sums.of(start, end) for start, end in self.parts]
        """This rank's part of each bucket, in place: the sum replaces the rank's own gradient."""
        self.overlaps = comm.size(comm.grid.holders) > 1
        self._buckets_of = {
            slot.entry.parameter: [
                number for number, (start, end) in enumerate(flat.buckets[:-1]) if start < slot.end and slot.start < end
            ]
            for slot in flat.slots
        }
        self._awaited: dict[nn.Parameter, int] = {}
        self._incomplete: list[int] = []
        self._order = flat.bucket_order[::-1]
        """Buckets but the tail, in the order in which they start."""
        self._next = 0
        """How many of these have started."""
        self._started: list[Handle] = []
        self._written_over = [slot.entry.parameter for slot in flat.slots if not slot.entry.by_autograd]
        self._added_to = [main_grad(slot.entry.parameter) for slot in flat.slots if slot.entry.by_autograd]

    def begin(self, micro_batches: int, sequences: int) -> None:
        """A step of `micro_batches` micro-batches of this replica begins, whether or not the one before was completed.
        `sequences`: in the global batch."""
        self._started.clear()
        forget(self._written_over)
        if self._added_to:
            torch._foreach_zero_(self._added_to)
        self._awaited = {parameter: uses * micro_batches for parameter, uses in self.uses.items()}
        self._incomplete = [0] * len(self.flat.buckets)
        for parameter in self._awaited:
            for number in self._buckets_of[parameter]:
                self._incomplete[number] += 1
        self._next = 0

    def added(self, parameter: nn.Parameter) -> None:
        """A micro-batch's gradient has been added to `parameter`."""
        if parameter not in self._awaited:
            return
        self._awaited[parameter] -= 1
        if self._awaited[parameter] == 0:
            for number in self._buckets_of[parameter]:
                self._incomplete[number] -= 1
            while self._next < len(self._order) and self._incomplete[self._order[self._next]] == 0:
                self._start(self._order[self._next])
                self._next += 1

    def finish(self) -> list[torch.Tensor]:
        """Sum the tail within the replica, reduce what is left, and return this rank's part of each bucket's sum."""
        clear_forgotten(self._written_over)
        self.shared.sum()
        if self.overlaps:
            for number in self._order[self._next :]:
                self._start(number)
            self._start(len(self.flat.buckets) - 1)
            for work in self._started:
                work.wait()
            self._started.clear()
        return self.reduced

    def _start(self, number: int) -> None:
        start, end = bucket = self.flat.buckets[number]
        gradients, axis = self.flat.sums.of(start, end), holders_of(self.flat, bucket, self.comm)
        self._started.append(self.comm.start_reduce_scatter(axis, gradients, self.reduced[number])[1])

    def gather(self, parts: list[torch.Tensor], into: torch.Tensor, row: int = 1) -> None:
        """Gather every holder's `parts`, one per bucket, into the flat buffer `into`, which has one element for each
        `row` elements of the gradients. They may already be in their final place."""
        works = []
        for part, bucket in zip(parts, self.flat.buckets, strict=True):
            axis, (start, end) = holders_of(self.flat, bucket, self.comm), bucket
            works.append(self.comm.start_all_gather(axis, part, into[start // row : end // row])[1])
        for work in works:
            work.wait()


def holders_of(flat: FlatParameters, bucket: Range, comm: Comm) -> Axis:
    """The axis of the ranks that hold the same parameters of a bucket."""
    return "expert_holders" if flat.has_experts(bucket) else comm.grid.holders


class SharedGradients:
    """The shared gradients of one rank; they make up the flat buffer's tail."""

    def __init__(self, flat: FlatParameters, comm: Comm, sequence_parallel: bool):
        """`sequence_parallel`: tensor ranks see different parts of the sequence."""
        self._flat, self._comm = flat, comm
        self._replicated = [slot for slot in flat.replicated() if sequence_parallel or slot.entry.shard.partial]
        self._copied, self._tied = flat.copied(), flat.tied()

    def sum(self) -> None:
        """Complete the gradients in the flat buffer. Raises PeerLost."""
        sum_replicated_gradients([self._gradient(slot) for slot in self._replicated], self._comm)
        self._sum_copied()
        for slot in self._tied:
            # The tied embedding is used on the first and on the last stage.
            self._comm.all_reduce("embedding", self._gradient(slot))

    def _sum_copied(self) -> None:
        """Sum over the tensor ranks that hold the same part: each adds its own in that part's place, in one message."""
        if not self._copied:
            return
        index, size = self._comm.index("tensor"), self._comm.size("tensor")
        copies = self._copied[0].entry.shard.copies  # of key-value heads, the only ones there are
        gradients = [self._gradient(slot) for slot in self._copied]
        flat_gradients = torch.cat(gradients)
        places = flat_gradients.new_zeros(size // copies, len(flat_gradients))
        places[index // copies] = flat_gradients
        self._comm.all_reduce("tensor", places)
        totals = places[index // copies].split([len(gradient) for gradient in gradients])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total)

    def _gradient(self, slot: Slot) -> torch.Tensor:
        return self._flat.sums.of(slot.start, slot.end)
