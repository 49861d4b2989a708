"""ZeRO 2 and 3 (arXiv:1910.02054, sections 5.2, 5.3): a rank keeps its part of the gradients, and under stage 3 of the
weights; a whole unit (a layer, the embedding, the output layer) has memory only while it computes.

Weights: while a unit computes, the next one is gathered; in backward once for recomputation and backward. Gradients:
matmuls write into the unit's buffer; when a micro-batch's are complete they are reduced, and this rank's part is added
to its sums. Buffers and their users are fixed (`flat.UnitBuffers`), so that no step allocates any, and layers that are
still there are not gathered again.

All ranks that hold the same parameters start the same communication in the same order, which follows from the model
alone: forward from the first unit to the last, backward from the last to the first. A rank that has fewer micro-batches
than others takes part in the communication of theirs (`UnitPasses.idle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from manta.workers.comm.backend import Handle
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.errors import ModelError
from manta.workers.parallel.data.elastic_sums import shared_leaves
from manta.workers.parallel.data.flat import FlatParameters, Range, Slot, Unit, UnitBuffers
from manta.workers.parallel.data.reduction import GradientReduction, SharedGradients
from manta.workers.parallel.data.tree_sum import Node, TreeSum
from manta.workers.parallel.tensor.weight_gradients import clear_forgotten, forget
from manta.workers.schedules.schedule import Action


class GatheredWeights:
    """Whole weights of units under ZeRO 3, gathered from the ranks that keep parts of them."""

    def __init__(self, flat: FlatParameters, comm: Comm, arrived: Callable[[Unit], object]):
        """`arrived` is called with each unit whose weights have come to their buffer."""
        assert flat.weight_buffers is not None
        self._flat, self._comm, self._buffers, self._arrived = flat, comm, flat.weight_buffers, arrived
        self._present: list[Unit | None] = [None] * UnitBuffers.COUNT
        """The unit in each buffer, which may still be arriving."""
        self._arriving: list[list[Handle]] = [[] for _ in self._present]

    def begin(self) -> None:
        """The weights may have changed, or a generation has ended in which some were arriving."""
        self._present = [None] * UnitBuffers.COUNT
        for handles in self._arriving:
            handles.clear()

    def start(self, unit: Unit) -> None:
        """Begin to gather a unit in place of the one that was in its buffer, unless it is there."""
        if self._present[unit.buffer] is unit:
            return
        self._present[unit.buffer] = unit
        flat, axis = self._flat, self._comm.grid.holders
        self._arriving[unit.buffer] = [
            self._comm.start_all_gather(
                axis, flat.values.of(*flat.part(bucket, flat.holder)), self._buffers.of(*bucket)
            )[1]
            for bucket in (*unit.trained, *unit.frozen)
        ]

    def wait(self, unit: Unit) -> None:
        """Return once the unit is there. Raises PeerLost."""
        self.start(unit)
        if self._arriving[unit.buffer]:
            for handle in self._arriving[unit.buffer]:
                handle.wait()
            self._arriving[unit.buffer] = []
            self._arrived(unit)


class _Gradients:
    """The gradients of one unit, in its buffer."""

    def __init__(self, unit: Unit, flat: FlatParameters, uses: dict[nn.Parameter, int]):
        assert flat.gradient_buffers is not None
        self.unit, buffers = unit, flat.gradient_buffers
        slots = [slot for slot in flat.head() if flat.unit_of(slot.entry.parameter) is unit]
        self.parameters = [slot.entry.parameter for slot in slots]
        self.uses = sum(uses[parameter] for parameter in self.parameters)
        """How many times a micro-batch adds to one of them."""
        self.whole = [buffers.of(*bucket) for bucket in unit.trained]
        self.paddings = [buffers.of(*padding) for padding in _paddings(slots, unit.trained)]
        self.sums = [flat.sums.of(*flat.part(bucket, flat.holder)) for bucket in unit.trained]
        """This rank's part of the sums over micro-batches."""

    def part(self, flat: FlatParameters, holder: int) -> list[torch.Tensor]:
        """The part of `holder` of what is in the buffer."""
        assert flat.gradient_buffers is not None
        return [flat.gradient_buffers.of(*flat.part(bucket, holder)) for bucket in self.unit.trained]


def _paddings(slots: Sequence[Slot], buckets: Iterable[Range]) -> Iterable[Range]:
    """What is between the parameters of these buckets, where another unit may have had gradients."""
    for start, end in buckets:
        position = start
        for slot in (slot for slot in slots if start <= slot.start < end):
            if position < slot.start:
                yield position, slot.start
            position = slot.end
        if position < end:
            yield position, end


class UnitReduction(GradientReduction):
    """The gradients of one rank's parts, each micro-batch's reduced over the ranks that hold the same parameters, then
    summed over micro-batches."""

    def __init__(
        self, flat: FlatParameters, comm: Comm, shared: SharedGradients, uses: dict[nn.Parameter, int], spec: JobSpec
    ):
        """`uses`: how many times a micro-batch adds to the gradient of each weight of the head."""
        super().__init__(flat, comm, shared, {})
        self.spec = spec
        self._of = {unit.name: _Gradients(unit, flat, uses) for unit in flat.units if unit.trained}
        self._owner = {parameter: each for each in self._of.values() for parameter in each.parameters}
        self._in_tail = [parameter for parameter in self._written_over if parameter not in self._owner]
        self._expected: dict[str, int] = {}
        """Of each unit whose gradients are being computed: how often something will still be added."""
        self._leaving: list[tuple[_Gradients, list[Handle]] | None] = [None] * UnitBuffers.COUNT
        """By buffer: gradients whose reduction has begun."""
        self._summed: set[str] = set()
        """Units of which the sums hold a micro-batch of this step."""

    def begin(self, micro_batches: int, sequences: int) -> None:
        """A step of `micro_batches` micro-batches of this replica begins, whether or not the one before was completed.
        `sequences`: in the global batch."""
        self._forget_tail()
        if self._added_to:
            torch._foreach_zero_(self._added_to)
        self._started.clear()
        self._expected.clear()
        self._summed.clear()
        self._leaving = [None] * UnitBuffers.COUNT

    def _forget_tail(self) -> None:
        forget(self._in_tail)

    def expect(self, unit: Unit) -> None:
        """A micro-batch's gradients of the unit will be computed next: make room for them. Raises PeerLost."""
        gradients = self._of.get(unit.name)
        if gradients is None or unit.name in self._expected:
            return
        self._take_leave(unit.buffer)
        self._expected[unit.name] = gradients.uses
        if gradients.paddings:
            torch._foreach_zero_(gradients.paddings)
        self._clear(gradients)

    def _clear(self, gradients: _Gradients) -> None:
        forget(gradients.parameters)

    def added(self, parameter: nn.Parameter) -> None:
        """A micro-batch's gradient has been added to `parameter`."""
        gradients = self._owner.get(parameter)
        if gradients is None:
            return
        self._expected[gradients.unit.name] -= 1
        if self._expected[gradients.unit.name] == 0:
            self._leave(gradients)

    def done(self, action: Action) -> None:
        """The pipeline is done with an action."""
        if action.kind == "backward":
            self.end_round()

    def end_round(self) -> None:
        """Backward of a micro-batch has ended: reduce what it has not completed."""
        for name in reversed(self._of):
            if name in self._expected:
                self._leave(self._of[name])

    def idle(self, unit: Unit) -> None:
        """Take part in the reduction of other ranks' gradients of a unit."""
        gradients = self._of.get(unit.name)
        if gradients is not None:
            self.expect(unit)
            self._leave(gradients)

    def _leave(self, gradients: _Gradients) -> None:
        """Begin the reduction of a unit's gradients."""
        del self._expected[gradients.unit.name]
        clear_forgotten(gradients.parameters)
        self._leaving[gradients.unit.buffer] = gradients, self._start_reducing(gradients)

    def _start_reducing(self, gradients: _Gradients) -> list[Handle]:
        own, axis = gradients.part(self.flat, self.flat.holder), self.comm.grid.holders
        pairs = zip(gradients.whole, own, strict=True)
        return [self.comm.start_reduce_scatter(axis, whole, part)[1] for whole, part in pairs]

    def _take_leave(self, buffer: int) -> None:
        """Return once the buffer is free, and its last unit's gradients are in the sums. Raises PeerLost."""
        leaving, self._leaving[buffer] = self._leaving[buffer], None
        if leaving is not None:
            gradients, handles = leaving
            for handle in handles:
                handle.wait()
            self._add(gradients)

    def _add(self, gradients: _Gradients) -> None:
        own = gradients.part(self.flat, self.flat.holder)
        if gradients.unit.name in self._summed:
            torch._foreach_add_(gradients.sums, own)
        else:
            torch._foreach_copy_(gradients.sums, own)
            self._summed.add(gradients.unit.name)

    def finish(self) -> list[torch.Tensor]:
        """Sum the tail within the replica, reduce it, and return this rank's part of each bucket's sum."""
        clear_forgotten(self._in_tail)
        self.shared.sum()
        self._start(len(self.flat.buckets) - 1)
        for buffer in range(UnitBuffers.COUNT):
            self._take_leave(buffer)
        for work in self._started:
            work.wait()
        self._started.clear()
        return self.reduced


_Parts = list[torch.Tensor]
"""A rank's part of each bucket of a unit."""


class _Leaves:
    """The sum over the leaves of the tree (elastic_sums.py) of this rank's part of one unit, or of the tail."""

    def __init__(self, sums: _Parts | None, like: _Parts):
        """`sums`: where the first sum that waits for others lies, and in the end the total; None: apart."""
        self._waiting: list[_Parts] = [] if sums is None else [sums]
        self._like = like
        self._tree: TreeSum[_Parts] = TreeSum(0)

    def begin(self, leaves: int) -> None:
        """A step of so many leaves begins."""
        self._tree = TreeSum(leaves)

    def add(self, leaves: Iterable[tuple[int, _Parts]]) -> None:
        """Add the next neighbouring leaves, whose memory is used for something else afterwards."""
        for leaf, parts in leaves:
            self._tree.push(Node(0, leaf), parts, _added)
        for number, (node, parts) in enumerate(self._tree.nodes):
            if number == len(self._waiting):
                self._waiting.append([torch.empty_like(part) for part in self._like])
            if parts is not self._waiting[number]:
                torch._foreach_copy_(self._waiting[number], parts)
                self._tree.nodes[number] = node, self._waiting[number]

    def total(self) -> _Parts:
        """The sum of all leaves."""
        return self._tree.total()


def _added(left: _Parts, right: _Parts) -> _Parts:
    torch._foreach_add_(left, right)
    return left


class ElasticUnitReduction(UnitReduction):
    """UnitReduction with sums in the tree's order, the same for every number of replicas.

    In each round the replicas' micro-batches are neighbouring leaves. Every rank sends the others their parts of its
    leaf, and adds the leaves of its own part at once, so that few sums wait for others.
    """

    def __init__(
        self, flat: FlatParameters, comm: Comm, shared: SharedGradients, uses: dict[nn.Parameter, int], spec: JobSpec
    ):
        super().__init__(flat, comm, shared, uses, spec)
        self.leaves, self.own_leaves = 0, range(0)
        """Micro-batches of the step's global batch, and those of this replica."""
        self._round = 0
        self._tail = flat.sums.of(*flat.buckets[-1])
        contexts = range(comm.grid.context)
        self._sums = {
            name: [_Leaves(None if context else each.sums, each.sums) for context in contexts]
            for name, each in self._of.items()
        }
        """By unit; of each one for every context rank, since these compute parts of the same leaf."""
        self._tail_sums = [_Leaves(None, self.reduced[-1:]) for _ in contexts]
        longest = max([len(self.reduced[-1]), *(sum(map(len, each.sums)) for each in self._of.values())])
        self._received = self._tail.new_empty(flat.holders, longest)
        """Leaves' parts from other ranks."""

    def begin(self, micro_batches: int, sequences: int) -> None:
        """A step begins, whether or not the one before was completed."""
        super().begin(micro_batches, sequences)
        self._tail.zero_()  # a leaf begins at zero
        self._round = 0
        self.leaves, self.own_leaves = shared_leaves(self.spec, sequences, self.comm.index("data"))
        for sums in (*self._sums.values(), self._tail_sums):
            for each in sums:
                each.begin(self.leaves)

    def _forget_tail(self) -> None:
        pass

    def _clear(self, gradients: _Gradients) -> None:
        torch._foreach_zero_(gradients.whole)

    def _start_reducing(self, gradients: _Gradients) -> list[Handle]:
        for buffer in range(UnitBuffers.COUNT):
            self._take_leave(buffer)  # what it receives is where this unit's parts will arrive
        return [self._exchange(partial(gradients.part, self.flat))]

    def _exchange(self, part_of: Callable[[int], _Parts]) -> Handle:
        """Begin to send every other rank its part of this rank's leaf, and to receive this rank's part of others'."""
        me, holders = self.flat.holder, range(self.flat.holders)
        own = [part_of(holder) for holder in holders]
        outgoing = own if self._leaf_of(me) < self.leaves else [[] for _ in holders]
        incoming = [
            self._received_from(holder, own[me]) if self._leaf_of(holder) < self.leaves else [] for holder in holders
        ]
        incoming[me] = outgoing[me]
        return self.comm.start_all_to_all(self.comm.grid.holders, outgoing, incoming)

    def _leaf_of(self, holder: int) -> int:
        """The leaf that a holder computes, or has a part of, in this round; there may be none of this number."""
        return self._round * self.comm.grid.data + holder // self.comm.grid.context

    def _received_from(self, holder: int, like: _Parts) -> _Parts:
        lengths = [len(part) for part in like]
        return list(self._received[holder, : sum(lengths)].split(lengths))

    def _add(self, gradients: _Gradients) -> None:
        self._add_leaves(self._sums[gradients.unit.name], gradients.part(self.flat, self.flat.holder))

    def _add_leaves(self, sums: list[_Leaves], own: _Parts) -> None:
        """Add this round's leaves, of which all parts are here: this rank's `own`, and what was received."""
        for context, each in enumerate(sums):
            holders = range(context, self.flat.holders, self.comm.grid.context)
            each.add(
                (self._leaf_of(holder), own if holder == self.flat.holder else self._received_from(holder, own))
                for holder in holders
                if self._leaf_of(holder) < self.leaves
            )

    def end_round(self) -> None:
        """Backward of a micro-batch has ended: add what it has computed of all units, and of the tail."""
        super().end_round()
        for buffer in range(UnitBuffers.COUNT):
            self._take_leave(buffer)
        self._exchange(lambda holder: [self.flat.sums.of(*self.flat.parts(holder)[-1])]).wait()
        self._add_leaves(self._tail_sums, self.reduced[-1:])
        self._tail.zero_()
        self._round += 1

    def finish(self) -> list[torch.Tensor]:
        """Add up the context ranks' sums, sum the tail within the replica, and return this rank's part of each
        bucket."""
        for first, *others in (*self._sums.values(), self._tail_sums):
            for other in others:
                torch._foreach_add_(first.total(), other.total())
        self.reduced[-1].copy_(self._tail_sums[0].total()[0])
        self.comm.all_gather(self.comm.grid.holders, self.reduced[-1], self._tail)
        self.shared.sum()
        return self.reduced


class UnitPasses:
    """What happens around each pass of each unit: weights come, gradients leave."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        flat: FlatParameters,
        reduction: UnitReduction,
        weights: GatheredWeights | None,
        looks_up: bool,
    ):
        """`parts`: embedding, layers and output layer, in their order; `weights`: under ZeRO 3; `looks_up`: whether the
        embedding only looks rows up, so that its backward does not read its weights. Raises ModelError if there are
        matrices elsewhere."""
        self._reduction, self._weights = reduction, weights
        units_of = [[flat.unit_of(parameter) for parameter in part.parameters()] for part in parts]
        self._units = [next((unit for unit in units if unit is not None), None) for units in units_of]
        elsewhere = {unit.name for unit in flat.units} - {unit.name for unit in self._units if unit is not None}
        if elsewhere:
            raise ModelError(
                f"parallel.zero: {flat.zero} handles matrices of the embedding, of layers and of the output layer, and "
                f"{min(elsewhere)} has some too: use parallel.zero: 1"
            )
        self._first_read = 1 if looks_up else 0
        """The first part whose weights backward reads."""
        self._numbers: dict[nn.Module, int] = {part: number for number, part in enumerate(parts)}
        trained = [any(parameter.requires_grad for parameter in part.parameters()) for part in parts]
        self._reached = [any(trained[: number + 1]) for number in range(len(parts))]
        """Whether backward reaches each part."""
        self._last = len(parts) - 1
        reading = [number for number in range(self._first_read, self._last) if self._reached[number]]
        self._lowest = reading[0] if reading else None
        """The part that is the last one of backward to read weights."""
        self._rounds = 0
        """Micro-batches of the step whose backward has not reached that part."""

    def begin(self, rounds: int = 0) -> None:
        """A step of `rounds` micro-batches on the rank that has most begins, or an evaluation."""
        self._rounds = rounds
        if self._weights is not None:
            self._weights.begin()

    def before(self, part: nn.Module) -> None:
        """A part is about to compute forward. Raises PeerLost."""
        number = self._numbers.get(part)
        if number is not None:
            self._forward(number, torch.is_grad_enabled())

    def after(self, part: nn.Module, y: torch.Tensor) -> None:
        """A part has computed y."""
        if y.requires_grad and torch.is_grad_enabled():
            number = self._numbers[part]
            y.register_hook(lambda _: self._backward(number))

    def _forward(self, number: int, training: bool) -> None:
        unit = self._units[number]
        if self._weights is not None:
            if unit is not None:
                self._weights.wait(unit)
            self._start(self._units[number + 1 :])
        if training and number == self._last and unit is not None:
            self._reduction.expect(unit)

    def _start(self, units: Iterable[Unit | None]) -> None:
        """Begin to gather the first of these units that is one."""
        unit = next((each for each in units if each is not None), None)
        if unit is not None and self._weights is not None:
            self._weights.start(unit)

    def _backward(self, number: int) -> None:
        """Backward of a part but the output layer begins."""
        unit = self._units[number]
        if self._weights is not None and number >= self._first_read:
            if unit is not None:
                self._weights.wait(unit)
            self._rounds -= number == self._lowest
            if number != self._lowest:
                self._start(reversed(self._units[self._first_read : number]))
            elif self._rounds:
                self._start(self._units)
        if unit is not None:
            self._reduction.expect(unit)

    def idle(self, rounds: int, training: bool) -> None:
        """Take part in the communication of `rounds` micro-batches that other ranks compute. Raises PeerLost."""
        for _ in range(rounds):
            for number in range(self._last + 1):
                self._forward(number, training)
            if training:
                self._idle_backward()

    def _idle_backward(self) -> None:
        first, last = self._units[0], self._units[self._last]
        if last is not None and last is not first:
            self._reduction.idle(last)
        for number in reversed(range(self._last)):
            if self._reached[number]:
                self._backward(number)
                if (unit := self._units[number]) is not None:
                    self._reduction.idle(unit)
        self._reduction.end_round()
