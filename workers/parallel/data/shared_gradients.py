"""Gradients that several ranks of a replica compute in parts, summed over them once per step."""

from __future__ import annotations

import torch

from workers.comm.comm import Comm
from workers.parallel.data.flat import FlatParameters, Slot
from workers.parallel.tensor.sequence_parallel import sum_replicated_gradients


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
        mine = torch.cat(gradients)
        places = mine.new_zeros(size // copies, len(mine))
        places[index // copies] = mine
        self._comm.all_reduce("tensor", places)
        totals = places[index // copies].split([len(gradient) for gradient in gradients])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total)

    def _gradient(self, slot: Slot) -> torch.Tensor:
        return self._flat.gradients[slot.start : slot.end]
