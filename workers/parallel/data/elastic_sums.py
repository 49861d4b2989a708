"""Sums over the global batch whose bits do not depend on the number of replicas (`train.deterministic: elastic`).

Replicas share out the micro-batches of the global batch, which are the leaves of one fixed tree (tree_sum.py). A
micro-batch's gradient is computed in the flat gradient buffer, from zero; a replica adds its neighbouring leaves as far
as the tree allows. Sums that wait for their right neighbour lie in further buffers of the same size, number i of them
in buffer i. At the end of the step each replica receives, for its part of the flat buffer, the fewest nodes that cover
each other replica's leaves, and adds them up to the root. With context parallelism each context rank has a tree of its
own, of its part of the sequence, and the roots are added in the order of these ranks. Only then come the sums within a
replica (tied, replicated and copied parameters), since they would round differently on parts of a sum.

Loss and squared norm are added up from single micro-batches and single rows, in one order for all layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batch_plan import leaf_share
from manta.workers.parallel.data.agreement import Agreement, Loss, StepSums
from manta.workers.parallel.data.flat import ALIGNMENT, FlatParameters, Range, Slot, merged
from manta.workers.parallel.data.reduction import GradientReduction, SharedGradients
from manta.workers.parallel.data.tree_sum import Node, TreeSum, cover
from manta.workers.parallel.tensor.shards import ShardedModule
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.schedule import Action

BLOCK_ROWS = 2**16
"""Rows of ALIGNMENT elements that are squared at once: this takes 24 MB, instead of half the gradients' memory."""


class ElasticReduction(GradientReduction):
    """The gradients of one rank's part of each bucket, summed over all holders in the trees' order."""

    def __init__(
        self, flat: FlatParameters, comm: Comm, shared: SharedGradients, spec: JobSpec, chunks: Iterable[nn.Module]
    ):
        super().__init__(flat, comm, shared, {})
        self.spec = spec
        self.waiting = WaitingBuffers(flat.gradients)
        """Where sums of micro-batches wait for others, in addition to the flat buffer."""
        self._by_pass = leaf_sums(flat, chunks, SCHEDULES[spec.layout.schedule].splits_backward, self.waiting)
        self._leaf_sums = list(dict.fromkeys(block_sum for sums in self._by_pass.values() for block_sum in sums))
        self.leaves, self.own_leaves = 0, range(0)
        """Micro-batches of the step's global batch, and those of this replica."""

    def begin(self, micro_batches: int, sequences: int) -> None:
        """A step begins, whether or not the one before was completed. Raises ValueError if this replica does not run
        `micro_batches` micro-batches of a global batch of `sequences`."""
        self.flat.gradients.zero_()  # a leaf begins at zero
        self.leaves, self.own_leaves = shared_leaves(self.spec, sequences, self.comm.index("data"))
        if len(self.own_leaves) != micro_batches:
            raise ValueError(f"of {self.leaves} micro-batches this replica runs {self.own_leaves}, not {micro_batches}")
        for leaf_sum in self._leaf_sums:
            leaf_sum.begin(self.leaves, self.own_leaves)

    def done(self, action: Action) -> None:
        """The pipeline is done with an action."""
        touched = self._by_pass.get((action.kind, action.chunk))
        if touched is not None:
            for each in touched:
                each.finished(action.micro_batch)

    def added(self, parameter: nn.Parameter) -> None:
        """Nothing is reduced before the end of the step."""

    def finish(self) -> list[torch.Tensor]:
        """Add up to the root, sum the tail within the replica, and return this rank's part of each bucket."""
        assert all(leaf_sum.complete for leaf_sum in self._leaf_sums)
        if not self.overlaps:
            self.shared.sum()
            return self.reduced
        for number in range(len(self.flat.buckets)):
            self._reduce(number)
        start, end = self.flat.buckets[-1]
        self.comm.all_gather(self.comm.grid.holders, self.reduced[-1], self.flat.gradients[start:end])
        self.shared.sum()
        return self.reduced

    def _reduce(self, number: int) -> None:
        """Bring every holder's nodes for this rank's part of a bucket here, and add them in the trees' order."""
        axis, contexts = self.comm.grid.holders, self.comm.size("context")
        size, me = self.comm.size(axis), self.comm.index(axis)
        shares = [leaf_share(self.leaves, self.spec.layout, holder // contexts) for holder in range(size)]
        covers = [cover(self.leaves, share.start, share.stop) for share in shares]
        # The whole flat buffers of this replica's nodes, in order; leaves are computed in the last one.
        own = [*(self.waiting[node] for node in range(len(covers[me]) - 1)), self.flat.gradients]
        out, parts = self.reduced[number], [self.flat.parts(holder)[number] for holder in range(size)]
        outgoing = [[node[start:end] for node in own] for start, end in parts]
        incoming = [
            outgoing[me] if holder == me else [out.new_empty(len(out)) for _ in nodes]
            for holder, nodes in enumerate(covers)
        ]
        self.comm.start_all_to_all(axis, outgoing, incoming).wait()
        totals = [self._total(covers[index::contexts], incoming[index::contexts]) for index in range(contexts)]
        for total in totals[1:]:
            totals[0].add_(total)
        out.copy_(totals[0])

    def _total(self, covers: Sequence[Sequence[Node]], values: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The root of a tree, from the nodes of all replicas."""
        tree: TreeSum[torch.Tensor] = TreeSum(self.leaves)
        for nodes, parts in zip(covers, values, strict=True):
            for node, part in zip(nodes, parts, strict=True):
                tree.push(node, part, torch.Tensor.add_)
        return tree.total()


class LeafReduction(Protocol):
    """A reduction that adds the leaves of the tree."""

    flat: FlatParameters
    leaves: int
    """Micro-batches of the step's global batch."""
    own_leaves: range
    """Micro-batches of this replica."""

    def gather(self, parts: list[torch.Tensor], into: torch.Tensor, row: int = 1) -> None:
        """Gather every holder's `parts` (`GradientReduction.gather`)."""
        ...


class ElasticNorm:
    """The squared norm of the stage's parameters that this rank's tensor index counts, the same in every replica."""

    def __init__(self, reduction: LeafReduction, tensor_index: int):
        self._reduction, self._flat = reduction, reduction.flat
        self._elsewhere_ranges = self._flat.not_answered_for(tensor_index)

    def square(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """fp64 scalar, of this rank's part of each bucket's gradient."""
        by_bucket = [row_squares(part) for part in parts]
        rows = by_bucket[0].new_empty(self._flat.size // ALIGNMENT)
        self._reduction.gather(by_bucket, rows, row=ALIGNMENT)
        for start, end in self._elsewhere_ranges:
            rows[start // ALIGNMENT : end // ALIGNMENT] = 0.0
        # Without the padding, whose length depends on the number of replicas.
        used = [rows[start // ALIGNMENT : end // ALIGNMENT] for start, end in merged(self._flat.slots)]
        return sum_of_halves(torch.cat([rows[:0], *used]).double())


class ElasticStepSums(StepSums):
    """StepSums with a loss and a gradient norm whose bits do not depend on the number of replicas: they are added in
    one order, from numbers that a single rank knows."""

    def __init__(self, comm: Comm, reduction: LeafReduction):
        super().__init__(comm, ElasticNorm(reduction, comm.index("tensor")))
        self.reduction = reduction

    def agree(self, gradient: Sequence[torch.Tensor], loss: Loss, memory_bytes: int) -> Agreement:
        """The sums over all ranks, of this rank's reduced `gradient`, its part of each bucket, among others."""
        comm, own_leaves = self.comm, self.reduction.own_leaves
        square, replica_ranks = self.norm.square(gradient), comm.size("pipeline") * comm.size("tensor")
        losses, z_losses_m = self.reduction.leaves * comm.size("context"), loss.z_losses_m
        of_z, of_balance = (0 if each is None else losses for each in (z_losses_m, loss.balance_m))
        agreed = Agreement(comm, replica_ranks, losses, of_z, of_balance, loss.expert_tokens)
        self._write_own(agreed, loss, memory_bytes)
        if comm.index(comm.grid.holders) == 0:  # all holders know the same
            agreed.rank_squares[comm.index("pipeline") * comm.size("tensor") + comm.index("tensor")] = square
        of_own_leaves(agreed.micro_batch_losses, own_leaves, comm).copy_(loss.losses_m)
        if z_losses_m is not None:
            of_own_leaves(agreed.micro_batch_z, own_leaves, comm).copy_(z_losses_m)
        if loss.balance_m is not None:
            of_own_leaves(agreed.balance_losses, own_leaves, comm).copy_(loss.balance_m)
        agreed.sum()
        agreed.loss.copy_(sum_of_halves(agreed.micro_batch_losses))
        agreed.z_loss.copy_(sum_of_halves(agreed.micro_batch_z))
        if loss.balance_m is not None:
            agreed.balance_losses = sum_of_halves(agreed.balance_losses).view(1)
        agreed.square.copy_(sum_of_halves(agreed.rank_squares))
        return agreed


def of_own_leaves(losses: torch.Tensor, own_leaves: range, comm: Comm) -> torch.Tensor:
    """View of `losses`, one of each micro-batch of the global batch and context rank: those of this rank's part of the
    sequence of `own_leaves`."""
    own = slice(own_leaves.start, own_leaves.stop, own_leaves.step)
    return losses.view(-1, comm.size("context"))[own, comm.index("context")]


def shared_leaves(spec: JobSpec, sequences: int, replica: int) -> tuple[int, range]:
    """Micro-batches of a global batch of `sequences`, and those of them that `replica` runs."""
    leaves = -(-sequences // spec.train.micro_batch_size)
    return leaves, leaf_share(leaves, spec.layout, replica)


def row_squares(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row of ALIGNMENT elements, independent of the other rows."""
    return torch.cat([_row_squares(rows) for rows in values.view(-1, ALIGNMENT).split(BLOCK_ROWS)])


def _row_squares(rows: torch.Tensor) -> torch.Tensor:
    squares = rows.square()
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares.view(-1)


def sum_of_halves(values: torch.Tensor) -> torch.Tensor:
    """The sum of a vector, as a scalar that depends only on its values and its length: the two halves are added, then
    the halves of the result, and so on. Sums of kernels may depend on the device and the number of threads."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        added = values[:half].clone()
        added[: len(values) - half] += values[half:]
        values = added
    return values.sum()


_Pass = tuple[str, int]
"""Kind of action and chunk."""

_Parts = list[torch.Tensor]
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
        self._waiting_parts: list[_Parts] = []
        self._tree: TreeSum[_Parts] = TreeSum(0)
        self._leaves = range(0)
        self._next = 0
        self._halves: dict[int, _Parts] = {}

    def _parts(self, buffer: torch.Tensor) -> _Parts:
        return [buffer[start:end] for start, end in self._ranges]

    def begin(self, leaves: int, own_leaves: range) -> None:
        """A step begins, whether or not the last one was completed. This replica computes `own_leaves` of `leaves`."""
        self._tree, self._leaves, self._next = TreeSum(leaves), own_leaves, own_leaves.start
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

    def _add(self, left: _Parts, right: _Parts) -> _Parts:
        """The last leaf stays in the flat buffer, with all it can be added to; the others are moved out of it."""
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

    def _waiting_at(self, number: int) -> _Parts:
        while len(self._waiting_parts) <= number:
            self._waiting_parts.append(self._parts(self._waiting[len(self._waiting_parts)]))
        return self._waiting_parts[number]

    @property
    def complete(self) -> bool:
        """Whether all leaves have been computed."""
        return self._next == self._leaves.stop


def leaf_sums(
    flat: FlatParameters, chunks: Iterable[nn.Module], split_backward: bool, waiting: WaitingBuffers
) -> dict[_Pass, list[LeafSum]]:
    """All sums of a rank, by the passes (kind of action, chunk) that add to them.

    `split_backward`: the weights' gradients come in a pass of their own, and so at another time than those that
    autograd adds.
    """
    passes: dict[nn.Parameter, set[_Pass]] = {slot.entry.parameter: set() for slot in flat.slots}
    for number, chunk in enumerate(chunks):
        for module in (each for each in chunk.modules() if isinstance(each, ShardedModule)):
            kind = "backward"
            if split_backward:
                kind = "backward_input" if module.by_autograd or module.never_deferred else "backward_weight"
            for parameter in module.parameters(recurse=False):
                if parameter in passes:
                    passes[parameter].add((kind, number))
    together: dict[frozenset[_Pass], list[Slot]] = {}
    for slot in flat.slots:
        together.setdefault(frozenset(passes[slot.entry.parameter]), []).append(slot)
    by_pass: dict[_Pass, list[LeafSum]] = {}
    for users, slots in together.items():
        leaf_sum = LeafSum(merged(slots), len(users), flat.gradients, waiting)
        for user in users:
            by_pass.setdefault(user, []).append(leaf_sum)
    return by_pass
