"""Updated parameters that are still being gathered from the other replicas while the next step's forward begins: a
computation waits only for the buckets of the parameters that it uses.

Every replica starts the gathers in one order: the tail first, in which each layer has its norms and biases, then the
head from the first layers on. Nothing about the numbers depends on when they are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from workers.comm.backend import Handle
from workers.comm.comm import Comm
from workers.parallel.data.flat import FlatParameters


class ArrivingParameters:
    """Gathers of one rank that have not been waited for yet."""

    def __init__(self, flat: FlatParameters, comm: Comm):
        self._flat, self._comm = flat, comm
        self._under_way: dict[int, Handle] = {}
        """Handles by bucket."""
        self._needed: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()

    def start(self, parts: Sequence[torch.Tensor]) -> None:
        """Begin to gather every replica's `parts`, one per bucket, into the flat parameters. They may already be in
        their final place."""
        self.wait()
        numbers = range(len(parts))
        for number in (*numbers[-1:], *numbers[:-1]):
            start, end = self._flat.buckets[number]
            whole = self._flat.parameters[start:end]
            self._under_way[number] = self._comm.start_all_gather("data", parts[number], whole)[1]

    def wait_for(self, module: nn.Module) -> None:
        """Return once the module's parameters have come. Raises PeerLost."""
        if not self._under_way:
            return
        if module not in self._needed:
            self._needed[module] = self._buckets_of(module)
        for number in self._needed[module]:
            work = self._under_way.pop(number, None)
            if work is not None:
                work.wait()

    def wait(self) -> None:
        """Return once all have come. Raises PeerLost."""
        while self._under_way:
            self._under_way.pop(next(iter(self._under_way))).wait()

    def forget(self) -> None:
        """Wait for none of them: the groups that they use are gone."""
        self._under_way.clear()

    def _buckets_of(self, module: nn.Module) -> tuple[int, ...]:
        wanted = set(module.parameters())
        slots = [slot for slot in self._flat.slots if slot.entry.parameter in wanted]
        return tuple(
            number
            for number, (start, end) in enumerate(self._flat.buckets)
            if any(slot.start < end and start < slot.end for slot in slots)
        )
