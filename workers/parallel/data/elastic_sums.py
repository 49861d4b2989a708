"""Sums over the global batch whose bits do not depend on the number of replicas (`train.deterministic: elastic`).

What replicas share are the micro-batches of the global batch: the leaves of one fixed tree (tree_sum.py). A replica
makes each leaf in the flat gradient buffer, from zero, and adds what the tree allows among its neighbouring leaves, in
further buffers of the same size. At the end of the step each part of the flat buffer goes to the replica that answers
for it, as the fewest nodes that cover each replica's leaves, and is added there up to the root. Only then come the sums
within a replica (tied, replicated and copied parameters), since they would round differently on parts of a sum.

Loss and squared norm are put together from single micro-batches and single rows in one order for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import nn

from workers.comm.comm import Comm
from workers.config import JobSpec
from workers.data.batch_plan import leaf_share
from workers.parallel.data.flat import ALIGNMENT, FlatParameters, Range, Slot, merged
from workers.parallel.data.reduction import GradientReduction
from workers.parallel.data.tree_sum import Node, TreeSum, cover
from workers.parallel.data.zero import Loss, ZeroOptimizer
from workers.parallel.pipeline.schedules.action import Action

# In place of the number of a waiting buffer: the flat buffer itself, in which leaves are made.
FLAT = -1

Pass = tuple[str, int]
"""Kind of action and chunk."""


class Region:
    """Parts of the flat buffer whose leaves are made at the same time. Waiting node number i lies in buffer i."""

    def __init__(self, ranges: list[Range], uses: int, waiting: WaitingBuffers):
        """`uses`: how many passes of a micro-batch add to these parts: 2 for the tied embedding where both ends of the
        model are on this rank."""
        self.uses = uses
        self._views = cache(lambda place: [waiting[place][start:end] for start, end in ranges])
        self._leaf = self._views(FLAT)
        self._tree: TreeSum[int] = TreeSum(0, self._add)
        self._leaves = range(0)
        self._next = 0
        self._halves: dict[int, list[torch.Tensor]] = {}

    def begin(self, leaves: int, mine: range) -> None:
        """A step begins in which this replica makes the leaves `mine` out of `leaves`."""
        self._tree, self._leaves, self._next = TreeSum(leaves, self._add), mine, mine.start
        self._halves.clear()

    def finished(self, micro_batch: int) -> None:
        """A pass of the replica's `micro_batch` has added to the flat buffer what it had to."""
        if self.uses > 1 and not self._second_use(micro_batch):
            return
        leaf = self._leaves.start + micro_batch
        assert leaf == self._next, "schedules finish the micro-batches of a chunk in order"
        self._next += 1
        self._tree.push(Node(0, leaf), FLAT)
        if self._next < self._leaves.stop:
            self._keep()

    def _second_use(self, micro_batch: int) -> bool:
        """Complete the leaf where this is the second pass that adds to it, else put what the first one made aside:
        passes of other micro-batches come in between."""
        half = self._halves.pop(micro_batch, None)
        if half is not None:
            torch._foreach_add_(self._leaf, half)
            return True
        self._halves[micro_batch] = [part.clone() for part in self._leaf]
        torch._foreach_zero_(self._leaf)
        return False

    def _add(self, left: int, right: int) -> int:
        """The last leaf stays in the flat buffer, with all that it can be added to; the others leave it."""
        into, other = (right, left) if self._next == self._leaves.stop else (left, right)
        torch._foreach_add_(self._views(into), self._views(other))
        return into

    def _keep(self) -> None:
        """Make room in the flat buffer for the next leaf."""
        node, where = self._tree.nodes[-1]
        if where == FLAT:
            place = len(self._tree.nodes) - 1
            torch._foreach_copy_(self._views(place), self._leaf)
            self._tree.nodes[-1] = (node, place)
        torch._foreach_zero_(self._leaf)

    @property
    def complete(self) -> bool:
        """Whether all leaves have been made."""
        return self._next == self._leaves.stop


class WaitingBuffers:
    """The flat gradient buffer, and as many more of its size as the tree turned out to need."""

    def __init__(self, flat: FlatParameters):
        self.flat = flat
        self._buffers: list[torch.Tensor] = []

    def __getitem__(self, place: int) -> torch.Tensor:
        if place == FLAT:
            return self.flat.gradients
        while len(self._buffers) <= place:
            self._buffers.append(torch.zeros_like(self.flat.gradients))
        return self._buffers[place]

    def __len__(self) -> int:
        return len(self._buffers)


def regions(
    flat: FlatParameters, chunks: Iterable[nn.Module], apart: bool
) -> tuple[list[Region], dict[Pass, list[Region]], WaitingBuffers]:
    """All regions of a rank, and which of them a pass (kind of action, chunk) adds to.

    `apart`: the weights' gradients come in a pass of their own, and so at another time than those that autograd adds.
    """
    waiting = WaitingBuffers(flat)
    by_autograd = {slot.entry.parameter for slot in flat.slots if slot.entry.by_autograd}
    passes: dict[nn.Parameter, set[Pass]] = {slot.entry.parameter: set() for slot in flat.slots}
    for number, chunk in enumerate(chunks):
        for parameter in chunk.parameters():
            kind = "backward"
            if apart:
                kind = "backward_input" if parameter in by_autograd else "backward_weight"
            passes[parameter].add((kind, number))
    together: dict[frozenset[Pass], list[Slot]] = {}
    for slot in flat.slots:
        together.setdefault(frozenset(passes[slot.entry.parameter]), []).append(slot)
    found: list[Region] = []
    by_pass: dict[Pass, list[Region]] = {}
    for users, slots in together.items():
        region = Region(merged(slots), len(users), waiting)
        found.append(region)
        for user in users:
            by_pass.setdefault(user, []).append(region)
    return found, by_pass, waiting


class ElasticReduction(GradientReduction):
    """The gradients of one rank's part of each bucket, summed over the data group in the tree's order."""

    def __init__(self, flat: FlatParameters, comm: Comm, spec: JobSpec, chunks: Iterable[nn.Module]):
        super().__init__(flat, comm, {})
        self.spec = spec
        apart = spec.layout.schedule in ("zb-h1", "zb-v")
        self._regions, self._by_pass, self._waiting = regions(flat, chunks, apart)
        self.leaves, self.mine = 0, range(0)
        """Micro-batches of the step's global batch, and those of this replica."""

    def begin(self, micro_batches: int, sequences: int) -> None:
        """A step begins, whatever became of the one before."""
        self.flat.gradients.zero_()  # a leaf is made from zero
        self.leaves, self.mine = shared_leaves(self.spec, sequences, self.comm.index("data"))
        if len(self.mine) != micro_batches:
            raise ValueError(f"of {self.leaves} micro-batches this replica runs {self.mine}, not {micro_batches}")
        for region in self._regions:
            region.begin(self.leaves, self.mine)

    @property
    def waiting_buffers(self) -> int:
        """Buffers of the flat gradients' size that steps have needed so far, beside the flat buffer itself."""
        return len(self._waiting)

    def done(self, action: Action) -> None:
        """The pipeline is done with an action."""
        touched = self._by_pass.get((action.kind, action.chunk))
        if touched is not None:
            for region in touched:
                region.finished(action.micro_batch)

    def added(self, parameter: nn.Parameter) -> None:
        """Nothing is reduced before the end of the step."""

    def finish(self, complete_tail: Callable[[], None]) -> torch.Tensor:
        """Add up to the root, then complete the tail, and return this rank's parts, one after the other."""
        assert all(region.complete for region in self._regions)
        if self.comm.size("data") == 1:
            complete_tail()
            return self.reduced
        for number in range(len(self.flat.buckets)):
            self._reduce(number)
        start, end = self.flat.buckets[-1]
        tail = self._reduced_part(len(self.flat.buckets) - 1)
        self.comm.all_gather("data", tail, self.flat.gradients[start:end])
        complete_tail()
        start, end = self.parts[-1]
        tail.copy_(self.flat.gradients[start:end])
        return self.reduced

    def _reduce(self, number: int) -> None:
        """Bring every replica's nodes of this rank's part of a bucket here, and add them in the tree's order."""
        size, me = self.comm.size("data"), self.comm.index("data")
        covers = [cover(self.leaves, *_ends(leaf_share(self.leaves, self.spec.layout, each))) for each in range(size)]
        own, out = self._own_nodes(len(covers[me])), self._reduced_part(number)
        outgoing = [[node[start:end] for node in own] for start, end in self._parts_of(number)]
        incoming = [[out.new_empty(len(out)) for _ in nodes] for nodes in covers]
        incoming[me] = outgoing[me]
        self.comm.start_all_to_all("data", outgoing, incoming).wait()
        tree: TreeSum[torch.Tensor] = TreeSum(self.leaves, lambda left, right: left.add_(right))
        for nodes, values in zip(covers, incoming, strict=True):
            for node, value in zip(nodes, values, strict=True):
                tree.push(node, value)
        out.copy_(tree.total())

    def _own_nodes(self, count: int) -> list[torch.Tensor]:
        """The whole flat buffers of this replica's nodes, in order: the last one is where leaves are made."""
        return [self._waiting[place] for place in (*range(count - 1), FLAT)]

    def _parts_of(self, number: int) -> list[Range]:
        """Each replica's part of a bucket."""
        return [self.flat.parts(replica)[number] for replica in range(self.comm.size("data"))]


class ElasticOptimizer(ZeroOptimizer):
    """ZeroOptimizer with a loss and a gradient norm whose bits do not depend on the number of replicas."""

    reduction: ElasticReduction

    def _agree(self, gradient: torch.Tensor, loss: Loss, memory_bytes: int) -> torch.Tensor:
        """What ZeroOptimizer's says, from numbers that one rank each knows and that are added here in one order."""
        comm, leaves, mine = self.comm, self.reduction.leaves, self.reduction.mine
        square, stage = self._counted_square(gradient), comm.size("pipeline") * comm.size("tensor")
        shared = self._numbers(loss, memory_bytes, stage + leaves)
        known = len(shared) - stage - leaves
        if comm.index("data") == 0:  # every replica knows the same
            shared[known + comm.index("pipeline") * comm.size("tensor") + comm.index("tensor")] = square
        losses = shared[known + stage :]
        losses[mine.start : mine.stop] = loss.losses_m
        comm.all_reduce("world", shared)
        shared[0] = sum_of_halves(losses)
        shared[2] = sum_of_halves(shared[known : known + stage])
        return shared[:known]

    def _counted_square(self, gradient: torch.Tensor) -> torch.Tensor:
        """Squared norm of the whole stage's parameters that this rank's tensor index answers for."""
        squares = row_squares(gradient)
        rows = squares.new_empty(self.flat.size // ALIGNMENT)
        by_bucket = squares.split([(end - start) // ALIGNMENT for start, end in self.owned])
        self.reduction.gather(list(by_bucket), rows, row=ALIGNMENT)
        for start, end in self.flat.not_answered_for(self.comm.index("tensor")):
            rows[start // ALIGNMENT : end // ALIGNMENT] = 0.0
        # Without the padding, whose length depends on the number of replicas.
        used = [rows[start // ALIGNMENT : end // ALIGNMENT] for start, end in merged(self.flat.slots)]
        return sum_of_halves(torch.cat(used).double())


def shared_leaves(spec: JobSpec, sequences: int, replica: int) -> tuple[int, range]:
    """Micro-batches of a global batch of `sequences`, and those of them that `replica` runs."""
    leaves = -(-sequences // spec.train.micro_batch_size)
    return leaves, leaf_share(leaves, spec.layout, replica)


def row_squares(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row of ALIGNMENT elements, whatever rows come with it."""
    squares = values.view(-1, ALIGNMENT).square()
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares.view(-1)


def sum_of_halves(values: torch.Tensor) -> torch.Tensor:
    """The sum of a vector, which depends on nothing but its values and its length: its halves are added, then the
    halves of that, as scalar. Kernels' own sums may depend on the device and the number of threads."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        added = values[:half].clone()
        added[: len(values) - half] += values[half:]
        values = added
    return values.sum()


def _ends(leaves: range) -> tuple[int, int]:
    return leaves.start, leaves.stop
