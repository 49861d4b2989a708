"""Adds the gradients of a replica's micro-batches in a fixed tree (tree_sum.py), as far as the replica's part of the
tree allows.

A micro-batch's gradient is a leaf. It is computed in the flat gradient buffer, from zero; sums that wait for their
right neighbour lie in further buffers of the same size, number i of them in buffer i.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from workers.parallel.data.flat import FlatParameters, Range, Slot, merged
from workers.parallel.data.tree_sum import Node, TreeSum
from workers.parallel.tensor.shards import ShardedModule

Pass = tuple[str, int]
"""Kind of action and chunk."""

Parts = list[torch.Tensor]
"""Views of the same ranges of one buffer."""


class WaitingBuffers:
    """Buffers of the flat gradients' size, as many as the tree has needed so far."""

    def __init__(self, gradients: torch.Tensor):
        self._gradients = gradients
        self._buffers: list[torch.Tensor] = []

    def __getitem__(self, number: int) -> torch.Tensor:
        while len(self._buffers) <= number:
            self._buffers.append(torch.zeros_like(self._gradients))
        return self._buffers[number]

    def __len__(self) -> int:
        return len(self._buffers)


class LeafSum:
    """The sum over micro-batches of those ranges of the flat buffer whose leaves are completed at the same time."""

    def __init__(self, ranges: list[Range], uses: int, gradients: torch.Tensor, waiting: WaitingBuffers):
        """`uses`: number of passes of a micro-batch that add to these ranges of `gradients`: 2 for the tied embedding
        if both ends of the model are on this rank."""
        self._ranges, self._uses, self._waiting = ranges, uses, waiting
        self._leaf = self._parts(gradients)
        self._waiting_parts: list[Parts] = []
        self._tree: TreeSum[Parts] = TreeSum(0)
        self._leaves = range(0)
        self._next = 0
        self._halves: dict[int, Parts] = {}

    def _parts(self, buffer: torch.Tensor) -> Parts:
        return [buffer[start:end] for start, end in self._ranges]

    def begin(self, leaves: int, mine: range) -> None:
        """A step begins, whether or not the one before was completed. This replica computes the leaves `mine` out of
        `leaves`."""
        self._tree, self._leaves, self._next = TreeSum(leaves), mine, mine.start
        self._halves.clear()

    def finished(self, micro_batch: int) -> None:
        """A pass of `micro_batch` has added its gradients to the flat buffer."""
        if self._uses > 1 and not self._second_use(micro_batch):
            return
        leaf = self._leaves.start + micro_batch
        assert leaf == self._next, "schedules finish the micro-batches of a chunk in order"
        self._next += 1
        self._tree.push(Node(0, leaf), self._leaf, self._add)
        if not self.complete:
            self._free_flat_buffer()

    def _second_use(self, micro_batch: int) -> bool:
        """Whether this is the second pass that adds to the leaf, which completes it. After the first one its result is
        set aside, since passes of other micro-batches follow."""
        half = self._halves.pop(micro_batch, None)
        if half is not None:
            torch._foreach_add_(self._leaf, half)
            return True
        self._halves[micro_batch] = [part.clone() for part in self._leaf]
        torch._foreach_zero_(self._leaf)
        return False

    def _add(self, left: Parts, right: Parts) -> Parts:
        """The last leaf stays in the flat buffer, with everything it can be added to; the others are moved out of
        it."""
        into, other = (right, left) if self.complete else (left, right)
        torch._foreach_add_(into, other)
        return into

    def _free_flat_buffer(self) -> None:
        """Make room in the flat buffer for the next leaf."""
        node, parts = self._tree.nodes[-1]
        if parts is self._leaf:
            kept = self._waiting_at(len(self._tree.nodes) - 1)
            torch._foreach_copy_(kept, self._leaf)
            self._tree.nodes[-1] = (node, kept)
        torch._foreach_zero_(self._leaf)

    def _waiting_at(self, number: int) -> Parts:
        while len(self._waiting_parts) <= number:
            self._waiting_parts.append(self._parts(self._waiting[len(self._waiting_parts)]))
        return self._waiting_parts[number]

    @property
    def complete(self) -> bool:
        """Whether all leaves have been computed."""
        return self._next == self._leaves.stop


def leaf_sums(
    flat: FlatParameters, chunks: Iterable[nn.Module], split_backward: bool, waiting: WaitingBuffers
) -> dict[Pass, list[LeafSum]]:
    """All sums of a rank, by the passes (kind of action, chunk) that add to them.

    `split_backward`: the weights' gradients come in a pass of their own, and so at another time than those that
    autograd adds.
    """
    passes: dict[nn.Parameter, set[Pass]] = {slot.entry.parameter: set() for slot in flat.slots}
    for number, chunk in enumerate(chunks):
        for module in (each for each in chunk.modules() if isinstance(each, ShardedModule)):
            kind = "backward"
            if split_backward:
                kind = "backward_input" if module.by_autograd or module.never_put_off else "backward_weight"
            for parameter in module.parameters(recurse=False):
                if parameter in passes:
                    passes[parameter].add((kind, number))
    together: dict[frozenset[Pass], list[Slot]] = {}
    for slot in flat.slots:
        together.setdefault(frozenset(passes[slot.entry.parameter]), []).append(slot)
    by_pass: dict[Pass, list[LeafSum]] = {}
    for users, slots in together.items():
        leaf_sum = LeafSum(merged(slots), len(users), flat.gradients, waiting)
        for user in users:
            by_pass.setdefault(user, []).append(leaf_sum)
    return by_pass
