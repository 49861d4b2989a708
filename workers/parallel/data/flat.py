"""One rank's parameters and gradients in two flat buffers, so that a step's communication, optimizer, snapshot and
restore each work on a few long ranges instead of on hundreds of tensors.

The buffers' order groups parameters by what happens to their gradients at the end of a step:

    | head: matrices that are split over the tensor group | tail: tied, copied and replicated matrices, vectors |

The head holds nearly everything. It is cut into buckets, whose gradients are reduced over the n ranks that hold the
same parameters (`RankGrid.holders`) while backward still runs. Gradients of the tail first have something else to wait
for (other tensor ranks, the other end of the pipeline), so it is one bucket, reduced last. Within each bucket, holder r
answers for the r-th of n equal parts. Within each kind what is decayed comes first, so that it lies in a few ranges.
Every parameter starts at a multiple of ALIGNMENT elements, and so does every part, so that an element meets the same
vector instructions on every rank and layout.

Parameters that are not trained (`train.frozen`) lie behind all others, where there are no gradients. Of these too,
holder r answers for the r-th of n equal parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from manta.workers.config import ParameterGroup
from manta.workers.parallel.tensor.shards import NamedShard

ALIGNMENT = 64

Range = tuple[int, int]
"""Elements [start, end) of the flat buffers."""


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the flat buffers."""

    entry: NamedShard
    start: int
    """First element."""
    end: int
    """One past its last element, alignment not included."""


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
    ):
        """`holders`: number of ranks that hold the same parameters; `decayed_groups`: groups of parameters to which
        weight decay applies."""
        self.holders = holders
        trained = [entry for entry in shards if entry.parameter.requires_grad]

        def order(entry: NamedShard) -> tuple[int, bool]:  # stable: else the model's order
            return self._class_of(entry), entry.shard.group not in decayed_groups

        self.slots: list[Slot] = []
        """Parameters that are trained."""
        unit = ALIGNMENT * holders
        position, head_end = 0, None
        for entry in sorted(trained, key=order):
            if self._class_of(entry) > 0 and head_end is None:
                head_end = position = _aligned(position, unit)
            size = entry.parameter.numel()
            self.slots.append(Slot(entry, position, position + size))
            position = _aligned(position + size, ALIGNMENT)
        self.size = _aligned(max(position, ALIGNMENT), unit)
        self.decayed = self._decayed(decayed_groups)
        """Ranges with weight decay, in order."""
        self.frozen, self.total_size = self._behind([entry for entry in shards if not entry.parameter.requires_grad])
        """Parameters that are not trained, and the number of elements of all, of which the first `size` are trained."""
        self.parameters = torch.zeros(self.total_size, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.size, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.buckets = [(0, self.size)]
        """Ranges that are reduced as a whole; the last one is the tail."""
        if holders > 1 and head_end is not None:
            self.buckets = _buckets(head_end, self.size, unit, int(bucket_bytes / self.gradients.element_size()))
        for slot in (*self.slots, *self.frozen):
            parameter = slot.entry.parameter
            parameter.data = self.parameters[slot.start : slot.end].view(parameter.shape)
        for slot in self.slots:
            self._give_gradient(slot)

    def _behind(self, frozen: list[NamedShard]) -> tuple[list[Slot], int]:
        """Slots after the trained parameters, and where they end."""
        slots, position = [], self.size
        for entry in frozen:
            slots.append(Slot(entry, position, position + entry.parameter.numel()))
            position = _aligned(slots[-1].end, ALIGNMENT)
        return slots, _aligned(position, ALIGNMENT * self.holders)

    def _give_gradient(self, slot: Slot) -> None:
        parameter = slot.entry.parameter
        gradient = self.gradients[slot.start : slot.end].view(parameter.shape)
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        parameter.holds_gradient = True  # type: ignore[attr-defined]
        if gradient.dtype == parameter.dtype:
            parameter.grad = gradient  # autograd adds into an existing .grad in place
        else:
            parameter.register_post_accumulate_grad_hook(_widen)

    @staticmethod
    def _class_of(entry: NamedShard) -> int:
        """0: head; 1: tied matrices; 2: other matrices of the tail; 3: vectors."""
        shard = entry.shard
        if shard.group in ("norm", "bias"):
            return 3
        if shard.tied_across_stages:
            return 1
        return 0 if shard.split_dim is not None and shard.copies == 1 else 2

    def _decayed(self, groups: Collection[ParameterGroup]) -> list[Range]:
        """Runs of parameters with weight decay, each up to the beginning of the next parameter."""
        ends = [*(slot.start for slot in self.slots[1:]), self.size]
        pairs = zip(self.slots, ends, strict=False)
        return _joined((slot.start, end) for slot, end in pairs if slot.entry.shard.group in groups)

    def head(self) -> list[Slot]:
        """Parameters whose gradients are only reduced over the holders."""
        return [slot for slot in self.slots if self._class_of(slot.entry) == 0]

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

    def parts(self, holder: int) -> list[Range]:
        """The part of each bucket that belongs to `holder`, an index among the ranks with the same parameters."""
        count = self.holders
        return [
            (start + holder * (end - start) // count, start + (holder + 1) * (end - start) // count)
            for start, end in self.buckets
        ]

    def frozen_part(self, holder: int) -> Range:
        """The part of the frozen parameters that belongs to `holder`."""
        share = (self.total_size - self.size) // self.holders
        return self.size + holder * share, self.size + (holder + 1) * share

    def same_on_tensor_ranks(self) -> list[Range]:
        """Ranges of parameters, frozen or not, that every tensor rank holds as a whole."""
        return merged([slot for slot in (*self.slots, *self.frozen) if slot.entry.shard.split_dim is None])

    def same_on_both_ends(self) -> list[Range]:
        """Ranges of the token embedding, frozen or not, if another stage holds it too."""
        return merged([slot for slot in (*self.slots, *self.frozen) if slot.entry.shard.tied_across_stages])


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


def _buckets(head_end: int, size: int, unit: int, elements: int) -> list[Range]:
    """The head in ranges of about `elements`, then the tail; all boundaries are multiples of `unit`."""
    step = max(unit, elements // unit * unit)
    ranges = [(start, min(start + step, head_end)) for start in range(0, head_end, step)]
    return [*ranges, (head_end, size)]


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
