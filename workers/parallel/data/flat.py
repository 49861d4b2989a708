"""One rank's parameters and gradients in two flat buffers, so that a step's communication, optimizer, snapshot and
restore each work on a few long ranges instead of on hundreds of tensors.

The buffers' order groups parameters by what happens to their gradients at the end of a step:

    | head: matrices split over the tensor group | experts | tail: tied, copied and replicated matrices, vectors |

The head holds nearly everything. It is cut into buckets, whose gradients are reduced over the n ranks that hold the
same parameters (`RankGrid.holders`) while backward still runs. With expert parallelism of size e, experts have buckets
of their own, which only n / e ranks hold; otherwise they are in the head. Gradients of the tail first have something
else to wait for (other tensor ranks, the other end of the pipeline), so it is one bucket, reduced last. Within each
bucket, holder r answers for the r-th of n equal parts, of experts for the (r // e)-th of n / e. Within each kind what
is decayed comes first, so that it lies in a few ranges.
Every parameter starts at a multiple of ALIGNMENT elements, and so does every part, so that an element meets the same
vector instructions on every rank and layout.

Parameters that are not trained (`train.frozen`) lie behind all others, where there are no gradients. Of these too,
holder r answers for the r-th of n equal parts.

From ZeRO 2 on a rank stores only some ranges of the buffers (`Stored`): of the gradients its part of each bucket, and
the tail; under ZeRO 3 the same of the parameters. Buckets of the head are then units: a layer, the embedding, the
output layer. A whole unit has memory only while it is computed (`UnitBuffers`), where its parameters or gradients are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import nn

from manta.workers.config import ParameterGroup
from manta.workers.parallel.tensor.shards import NamedShard

ALIGNMENT = 64

_HEAD, _EXPERTS, _TAIL = "head", "experts", "tail"

Range = tuple[int, int]
"""Elements [start, end) of the flat buffers."""
_Section = tuple[str, Range]
"""What may become a bucket or several: its name and where it is."""


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the flat buffers."""

    entry: NamedShard
    start: int
    """First element."""
    end: int
    """One past its last element, alignment not included."""


class Stored:
    """Some ranges of a flat buffer, which lie one after the other in memory."""

    def __init__(self, ranges: Iterable[Range], dtype: torch.dtype, device: torch.device):
        self.ranges = _joined(each for each in ranges if each[0] < each[1])
        self._starts = [start for start, _ in self.ranges]
        self._places = [0, *accumulate(end - start for start, end in self.ranges)]
        self.elements = torch.zeros(self._places[-1], dtype=dtype, device=device)

    def of(self, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of the flat buffer, a view; they lie within one of the ranges."""
        number = max(0, bisect_right(self._starts, start) - 1)
        place = self._places[number] + start - self._starts[number]
        return self.elements[place : place + end - start]


@dataclass(frozen=True)
class Unit:
    """A part of the model that is computed as a whole, and of which ZeRO 2 and 3 keep parts: a layer, the embedding,
    the output layer. Parameters in the buffers' tails are in none."""

    name: str
    buffer: int
    """Which of the buffers of `UnitBuffers` it uses."""
    trained: tuple[Range, ...] = ()
    """Buckets of the unit."""
    frozen: tuple[Range, ...] = ()
    """Buckets of the unit's parameters that are not trained."""


class UnitBuffers:
    """Memory for whole units: two buffers that layers use in turns, so that one layer can arrive or leave while the
    next is computed, and one for what comes before and after the layers."""

    COUNT = 3

    def __init__(self, units: Iterable[Unit], with_frozen: bool, dtype: torch.dtype, device: torch.device):
        """`with_frozen`: whether a unit's frozen parameters are there too."""
        buckets = {unit: (*unit.trained, *(unit.frozen if with_frozen else ())) for unit in units}
        lengths = [0] * self.COUNT
        for unit, each in buckets.items():
            lengths[unit.buffer] = max(lengths[unit.buffer], sum(end - start for start, end in each))
        begins = [0, *accumulate(lengths)]
        self._places: dict[int, int] = {}
        """First element in the memory, by the first element of a bucket."""
        for unit, each in buckets.items():
            ends = accumulate((end - start for start, end in each), initial=begins[unit.buffer])
            self._places |= zip((start for start, _ in each), ends, strict=False)
        self._starts = sorted(self._places)
        self.memory = torch.zeros(begins[-1], dtype=dtype, device=device)

    def of(self, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of the flat buffer while their unit is there, a view; they lie within one bucket."""
        bucket = self._starts[bisect_right(self._starts, start) - 1]
        place = self._places[bucket] - bucket
        return self.memory[place + start : place + end]


class FlatParameters:
    """Moves a stage's parameters, and their gradients, into flat buffers; the parameters become views.

    `dtype` is that of the parameters in compute; gradients are summed in at least fp32. Each parameter's attribute
    `main_grad` is its gradient's view; where both have the same type it is also its `.grad`, into which autograd adds.
    `holds_gradient` says whether what is there belongs to the step (workers/parallel/tensor/weight_gradients.py).
    """

    def __init__(
        self,
        shards: list[NamedShard],
        holders: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: float = 25e6,
        decayed_groups: Collection[ParameterGroup] = ("linear", "embedding"),
        zero: int = 1,
        holder: int = 0,
        expert: int = 1,
    ):
        """`holders`: number of ranks that hold the same parameters, of which this one is number `holder`;
        `decayed_groups`: groups of parameters to which weight decay applies; `zero`: ZeRO stage (at
        most 1 for a single holder, or with expert parallelism), from which it follows what this rank stores;
        `expert`: number of neighboring holders over which experts are spread."""
        self.holders, self.holder, self.expert = holders, holder, expert
        self.zero = zero
        trained = [entry for entry in shards if entry.parameter.requires_grad]

        def order(entry: NamedShard) -> tuple[int, bool]:  # stable: else the model's order
            return self._class_of(entry), entry.shard.group not in decayed_groups

        together = ALIGNMENT * holders
        self.slots, begins, end = self._placed(sorted(trained, key=order), 0, self._bucket_name)
        """Parameters that are trained."""
        has_experts = any(name == _EXPERTS for name, _ in begins)
        if (self.by_unit or has_experts) and (not begins or begins[-1][0] != _TAIL):
            begins.append((_TAIL, _aligned(end, together)))
            end = begins[-1][1] + ALIGNMENT
        self.size = _aligned(max(end, ALIGNMENT), together)
        self.decayed = self._decayed(decayed_groups)
        """Ranges with weight decay, in order."""
        frozen = [entry for entry in shards if not entry.parameter.requires_grad]
        name_of = self._bucket_name if self.zero == 3 else self._frozen_name
        last = _TAIL if self.zero == 3 else _EXPERTS
        frozen.sort(key=lambda entry: name_of(entry) == last)
        self.frozen, frozen_begins, end = self._placed(frozen, self.size, name_of)
        self.total_size = _aligned(end, together)
        """Parameters that are not trained, and the number of elements of all, of which the first `size` are trained."""
        sections, frozen_sections = _sections(begins, self.size), _sections(frozen_begins, self.total_size)
        sum_dtype = torch.promote_types(dtype, torch.float32)
        self.buckets = self._buckets(sections, int(bucket_bytes / sum_dtype.itemsize))
        """Ranges that are reduced as a whole; the last one is the tail."""
        self.bucket_order = self._bucket_order(shards)
        """Numbers of the buckets but the tail, by the first of their parameters in the model's order."""
        self.frozen_buckets = [each for _, each in frozen_sections] or [(self.size, self.total_size)]
        """Ranges of frozen parameters of which each holder answers for a part: all, or those of experts apart. Under
        ZeRO 3 these are units, and perhaps a tail, which is whole on every rank."""
        self._expert_ranges = [each for name, each in (*sections, *frozen_sections) if name == _EXPERTS]
        self.frozen_tail = self.size if self.zero < 3 else self.total_size
        """First of the frozen parameters that are whole on every rank even under ZeRO 3."""
        if self.zero == 3 and frozen_begins and frozen_begins[-1][0] == _TAIL:
            self.frozen_tail = frozen_begins[-1][1]
        self.units = self._units(shards, sections, frozen_sections)
        """Under ZeRO 2 and 3, the units in the model's order."""
        by_name = {unit.name: unit for unit in self.units}
        names = {slot.entry.parameter: self._bucket_name(slot.entry) for slot in (*self.slots, *self.frozen)}
        self._unit_of = {parameter: by_name[name] for parameter, name in names.items() if name in by_name}
        self._store(dtype, sum_dtype, device)

    def _store(self, dtype: torch.dtype, sum_dtype: torch.dtype, device: torch.device) -> None:
        """Allocate what this rank keeps, and move the parameters there."""
        head, frozen = self.parts(self.holder)[:-1], self.frozen_parts(self.holder)
        sharded = [*head, self.buckets[-1]]
        self.sums = Stored(sharded if self.by_unit else [(0, self.size)], sum_dtype, device)
        """What this rank stores of the gradients."""
        kept = [(0, self.total_size)]
        if self.zero == 3:
            kept = [*sharded, *(part for part in frozen if part[1] <= self.frozen_tail)]
            kept.append((self.frozen_tail, self.total_size))
        self.values = Stored(kept, dtype, device)
        """What this rank stores of the parameters."""
        self.parameters, self.gradients = self.values.elements, self.sums.elements
        self.weight_buffers = UnitBuffers(self.units, True, dtype, device) if self.zero == 3 else None
        """Where whole units of parameters are under ZeRO 3."""
        self.gradient_buffers = UnitBuffers(self.units, False, sum_dtype, device) if self.by_unit else None
        """Where whole units of gradients are under ZeRO 2 and 3."""
        for slot in (*self.slots, *self.frozen):
            where = self._where(slot, self.values, self.weight_buffers)
            slot.entry.parameter.data = where.of(slot.start, slot.end).view(slot.entry.parameter.shape)
        for slot in self.slots:
            self._give_gradient(slot)

    @property
    def by_unit(self) -> bool:
        """Whether gradients are reduced unit by unit, and stored in parts."""
        return self.zero >= 2

    def _placed(
        self, entries: Iterable[NamedShard], position: int, name_of: Callable[[NamedShard], str]
    ) -> tuple[list[Slot], list[tuple[str, int]], int]:
        """Slots for `entries` from `position` on; names and beginnings of what can become buckets; and the end."""
        slots: list[Slot] = []
        begins: list[tuple[str, int]] = []
        for entry in entries:
            name = name_of(entry)
            if not begins or begins[-1][0] != name:
                position = _aligned(position, ALIGNMENT * self.holders)
                begins.append((name, position))
            slots.append(Slot(entry, position, position + entry.parameter.numel()))
            position = _aligned(slots[-1].end, ALIGNMENT)
        return slots, begins, position

    def _bucket_name(self, entry: NamedShard) -> str:
        """What a parameter is reduced with: its unit, or the head, or experts, or the tail."""
        kind = self._class_of(entry)
        if kind > 1:
            return _TAIL
        if kind == 1:
            return _EXPERTS
        return unit_name(entry) if self.by_unit else _HEAD

    def _frozen_name(self, entry: NamedShard) -> str:
        """What a frozen parameter is divided with among its holders."""
        return _EXPERTS if self._is_spread(entry) else _HEAD

    def _is_spread(self, entry: NamedShard) -> bool:
        """Whether only some of the holders have the parameter."""
        return self.expert > 1 and entry.shard.of_expert

    def _buckets(self, sections: list[_Section], elements: int) -> list[Range]:
        """Units, or the other sections cut into ranges of about `elements`, and the tail; all in one without either."""
        if self.by_unit:
            return [each for _, each in sections]
        if self.holders == 1 or not sections or sections[-1][0] != _TAIL:
            return [(0, self.size)]
        together = ALIGNMENT * self.holders
        parts = [[each] if name == _TAIL else _cut(each, together, elements) for name, each in sections]
        return [*chain.from_iterable(parts)]

    def _units(self, shards: Iterable[NamedShard], trained: list[_Section], frozen: list[_Section]) -> list[Unit]:
        if not self.by_unit:
            return []
        units: dict[str, Unit] = {}
        layers = 0
        for name in dict.fromkeys(self._bucket_name(entry) for entry in shards):
            of_name = [tuple(bucket for owner, bucket in each if owner == name) for each in (trained, frozen)]
            if name != _TAIL and any(of_name):
                is_layer = name.startswith("layers.")
                units[name] = Unit(name, layers % 2 if is_layer else 2, *of_name)
                layers += is_layer
        return list(units.values())

    def _where(self, slot: Slot, stored: Stored, buffers: UnitBuffers | None) -> Stored | UnitBuffers:
        """Where a parameter is, or its gradient, while it is used."""
        return stored if buffers is None or self._bucket_name(slot.entry) == _TAIL else buffers

    def _give_gradient(self, slot: Slot) -> None:
        parameter = slot.entry.parameter
        where = self._where(slot, self.sums, self.gradient_buffers)
        gradient = where.of(slot.start, slot.end).view(parameter.shape)
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        parameter.holds_gradient = True  # type: ignore[attr-defined]
        if gradient.dtype == parameter.dtype:
            parameter.grad = gradient  # autograd adds into an existing .grad in place
        else:
            parameter.register_post_accumulate_grad_hook(_widen)

    def _class_of(self, entry: NamedShard) -> int:
        """0: head; 1: experts; 2: tied matrices; 3: other matrices of the tail; 4: vectors."""
        shard = entry.shard
        if self._is_spread(entry):
            return 1
        if shard.group in ("norm", "bias"):
            return 4
        if shard.tied_across_stages:
            return 2
        # Nobody tells when autograd has added a gradient.
        by_autograd = entry.by_autograd and self.by_unit
        return 0 if shard.split_dim is not None and shard.copies == 1 and not by_autograd else 3

    def _decayed(self, groups: Collection[ParameterGroup]) -> list[Range]:
        """Runs of parameters with weight decay, each up to the beginning of the next parameter."""
        ends = [*(slot.start for slot in self.slots[1:]), self.size]
        pairs = zip(self.slots, ends, strict=False)
        return _joined((slot.start, end) for slot, end in pairs if slot.entry.shard.group in groups)

    def head(self) -> list[Slot]:
        """Parameters whose gradients are only reduced over the holders, experts included."""
        return [slot for slot in self.slots if self._class_of(slot.entry) <= 1]

    def replicated(self) -> list[Slot]:
        """Parameters that every tensor rank holds as a whole."""
        return [slot for slot in self.slots if slot.entry.shard.split_dim is None]

    def copied(self) -> list[Slot]:
        """Parameters of which neighbouring tensor ranks hold the same part."""
        return [slot for slot in self.slots if slot.entry.shard.copies > 1]

    def tied(self) -> list[Slot]:
        """The token embedding, if another stage holds it too as its output layer."""
        return [slot for slot in self.slots if slot.entry.shard.tied_across_stages]

    def not_answered_for(self, tensor_index: int) -> list[Range]:
        """Ranges (alignment included) of parameters that another rank of the same replica counts and saves, so that
        over all ranks every element of the model appears once: copies of the tied embedding, and all but the first
        of equal parts."""
        others = [slot for slot in self.slots if not answers_for(slot.entry, tensor_index)]
        return [(slot.start, _aligned(slot.end, ALIGNMENT)) for slot in others]

    def unit_of(self, parameter: nn.Parameter) -> Unit | None:
        """The unit that a parameter is in; None: it is in the tail, or not sharded."""
        return self._unit_of.get(parameter)

    def parts(self, holder: int) -> list[Range]:
        """The part of each bucket that belongs to `holder`, an index among the ranks with the same parameters."""
        return [self.part(bucket, holder) for bucket in self.buckets]

    def frozen_parts(self, holder: int) -> list[Range]:
        """The part of each bucket of frozen parameters that belongs to `holder`."""
        return [self.part(bucket, holder) for bucket in self.frozen_buckets]

    def part(self, bucket: Range, holder: int) -> Range:
        """The part of a bucket that belongs to `holder`."""
        (start, end), count = bucket, self.holders
        if self.has_experts(bucket):
            holder, count = holder // self.expert, count // self.expert
        return start + holder * (end - start) // count, start + (holder + 1) * (end - start) // count

    def has_experts(self, bucket: Range) -> bool:
        """Whether a bucket has experts that are spread over the holders."""
        return any(start <= bucket[0] < end for start, end in self._expert_ranges)

    def _bucket_order(self, shards: Iterable[NamedShard]) -> list[int]:
        number_of = {entry.parameter: number for number, entry in enumerate(shards)}
        starts, firsts = [start for start, _ in self.buckets], [len(number_of)] * len(self.buckets)
        for slot in self.slots:
            for bucket in range(bisect_right(starts, slot.start) - 1, bisect_right(starts, slot.end - 1)):
                firsts[bucket] = min(firsts[bucket], number_of[slot.entry.parameter])
        return sorted(range(len(starts) - 1), key=firsts.__getitem__)

    def same_on_tensor_ranks(self) -> list[Range]:
        """Ranges of parameters, frozen or not, that every tensor rank holds as a whole."""
        return merged([slot for slot in (*self.slots, *self.frozen) if slot.entry.shard.split_dim is None])

    def same_on_both_ends(self) -> list[Range]:
        """Ranges of the token embedding, frozen or not, if another stage holds it too."""
        return merged([slot for slot in (*self.slots, *self.frozen) if slot.entry.shard.tied_across_stages])


def unit_name(entry: NamedShard) -> str:
    """The unit that a parameter belongs to, if any."""
    first, *rest = entry.name.split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first


def answers_for(entry: NamedShard, tensor_index: int) -> bool:
    """Whether tensor rank `tensor_index` counts and saves its part of a parameter."""
    shard = entry.shard
    if shard.shared_copy or (shard.split_dim is None and tensor_index > 0):
        return False
    return tensor_index % shard.copies == 0


def _widen(parameter: torch.Tensor) -> None:
    """Add a 16-bit gradient that autograd has computed to the fp32 sum. Autograd computes none for the weights of
    parallel products, whose gradients are added elsewhere."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def _sections(begins: list[tuple[str, int]], end: int) -> list[_Section]:
    """From their beginnings, and the end of the last one."""
    ranges = pairwise([*(start for _, start in begins), end])
    return [(name, each) for (name, _), each in zip(begins, ranges, strict=True)]


def _cut(section: Range, unit: int, elements: int) -> list[Range]:
    """A section in ranges of about `elements`; all boundaries are multiples of `unit`."""
    (first, end), step = section, max(unit, elements // unit * unit)
    return [(start, min(start + step, end)) for start in range(first, end, step)]


def _aligned(position: int, to: int) -> int:
    return -(-position // to) * to


def merged(slots: list[Slot]) -> list[Range]:
    """Ranges of these slots (alignment included), which are in the buffers' order; adjacent ones are merged."""
    return _joined((slot.start, _aligned(slot.end, ALIGNMENT)) for slot in slots)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, with adjacent ones merged."""
    joined: list[Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def overlap(first: Range, second: Range) -> Range:
    """Intersection of two ranges; empty ones come out as (x, x)."""
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))
