"""The optimizer under ZeRO (arXiv:1910.02054, section 5.1). Stage 1: each replica keeps the optimizer state of its
parts of the flat buffer and updates them; the updated parts are then gathered. Stage 0: every replica keeps and updates
everything; gradients are reduced in the same way, so both stages give the same bits. For the optimizer stage 2 is like
stage 1; under stage 3 only the tail is gathered, since each unit's weights are when it computes (`units.py`).

The arithmetic (`adamw.py`) works on flat ranges in fp32, with weight decay on some of them. With 16-bit compute the
parts are fp32 master weights, rounded into the parameters after each step. The state may be in host memory
(`offloaded.py`), which always includes master weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from manta.workers.comm.backend import Handle
from manta.workers.comm.comm import Comm
from manta.workers.config import OptimizerConfig
from manta.workers.parallel.data import adamw
from manta.workers.parallel.data.agreement import Agreement, Loss, StepStatistics, StepSums
from manta.workers.parallel.data.flat import FlatParameters, Range, overlap
from manta.workers.parallel.data.offloaded import Cut, OffloadedState
from manta.workers.parallel.data.reduction import GradientReduction, holders_of
from manta.workers.parallel.data.state import FROZEN, MODEL, Groups, Piece, StatePart
from manta.workers.protocol.requests import ASKED_LENGTH, Asked


class UpdateRule(Protocol):
    """The functions that the file of an optimizer provides; what it keeps is in `OptimizerConfig.moments`."""

    def update(self, groups: Groups, config: OptimizerConfig, learning_rate: float, refused: torch.Tensor) -> None:
        """One step, for gradients that were multiplied by their factor. Does not round. Changes nothing if the step is
        `refused`, bool scalar."""
        ...

    def update_in_one_pass(
        self, groups: Groups, config: OptimizerConfig, learning_rate: float, factor: torch.Tensor, refused: torch.Tensor
    ) -> None:
        """One step by a compiled kernel, which multiplies the gradients by `factor`, fp64 scalar, itself, and
        rounds."""
        ...


_RULES: dict[str, UpdateRule] = {"adamw": adamw}


class ZeroOptimizer:
    """The optimizer of one rank: its parts of the flat parameters with their moments."""

    def __init__(
        self,
        flat: FlatParameters,
        config: OptimizerConfig,
        comm: Comm,
        reduction: GradientReduction,
        sums: StepSums,
        stage: int,
        one_pass: bool = False,
    ):
        """`stage`: 0 to 3. `one_pass`: update with a compiled kernel."""
        self.flat, self.config, self.comm, self.reduction, self.sums = flat, config, comm, reduction, sums
        self.owned = reduction.parts
        """Ranges of the flat buffer that this replica saves; together the replicas save each element once."""
        self.held = self.owned if stage else [(0, flat.size)]
        """Ranges of the flat buffer whose state this rank keeps: the vectors below have them one after the other."""
        self.length = sum(end - start for start, end in self.held)
        """Number of trained elements whose state this rank keeps."""
        self._holders = (comm.rank,) if stage else tuple(comm.grid.group("expert_holders", comm.rank))
        self.frozen_owned = flat.frozen_parts(comm.index(comm.grid.holders))
        """Ranges of the frozen parameters that this replica saves, possibly empty."""
        self.frozen_stored = self.frozen_owned if stage else flat.frozen_buckets
        """Ranges of the frozen parameters in the flat buffer whose values this rank keeps, possibly empty."""
        if flat.zero == 3:
            tail = flat.frozen_tail, flat.total_size
            self.frozen_stored = [*(part for part in self.frozen_owned if part[1] <= tail[0]), tail]
        self.frozen = [flat.values.of(start, end) for start, end in self.frozen_stored if start < end]
        """Frozen parameters whose values this rank keeps, in the precision of compute."""
        narrow = flat.parameters.dtype != flat.gradients.dtype
        self.has_masters = narrow or config.offload
        """Whether there are master weights in addition to the parameters."""
        self.one_pass = one_pass
        self.rounds_at_once = one_pass and narrow and self.stores_all_elements
        """Whether the update's kernel also rounds the parameters."""
        self.offloaded: OffloadedState | None = None
        """The state, if it is in host memory."""
        self._groups: dict[float, list[Piece]] = {}
        """The state otherwise, by weight decay."""
        self.parameters = [flat.values.of(start, end) for start, end in self.held]
        """The fp32 weights of the held ranges: views of the parameters, or of the master weights."""
        masters, moments = self._make_state()
        if masters is not None:
            self.parameters = list(masters.split([end - start for start, end in self.held]))
        self.moments = dict(zip(config.moments, moments, strict=True))
        """Moments of the held ranges, one after the other, by name."""
        self.arriving: ArrivingParameters | None = None
        """Set if the next forward waits for the parameters of other replicas, not the update."""
        self.updating = False
        """Whether an update has begun and was not declared complete."""
        self.set_step(0)
        self.limits = (math.inf, math.inf)
        """Loss and gradient norm above which a step updates nothing; the same on every rank."""

    def _cuts(self) -> Iterator[Cut]:
        """The held ranges, divided where weight decay begins or ends."""
        position = 0
        for start, end in self.held:
            for (first, last), decayed in self._cut(start, end):
                decay = self.config.weight_decay if decayed else 0.0
                yield Cut(position + first - start, first, last, decay)
            position += end - start

    def _make_state(self) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Master weights, if there are any, and the moments of the held ranges; also prepares their update."""
        cuts = list(self._cuts())
        if self.config.offload:
            self.offloaded = OffloadedState(self.flat, cuts, len(self.config.moments), self.rounds_at_once)
            masters, *moments = self.offloaded.host
            return masters, moments
        flat = self.flat
        kept = flat.gradients.new_zeros(self.length) if self.has_masters else None
        moments = [flat.gradients.new_zeros(self.length) for _ in self.config.moments]
        for cut in cuts:
            where = slice(cut.position, cut.position + cut.end - cut.start)
            values = flat.values.of(cut.start, cut.end) if kept is None else kept[where]
            steps = torch.zeros((), dtype=torch.float32, device=values.device)
            gradient = flat.sums.of(cut.start, cut.end)
            rounded = flat.values.of(cut.start, cut.end) if self.rounds_at_once else None
            piece = Piece(values, gradient, tuple(moment[where] for moment in moments), steps, rounded)
            self._groups.setdefault(cut.decay, []).append(piece)
        return kept, moments

    def _cut(self, start: int, end: int) -> Iterator[tuple[Range, bool]]:
        """The range divided into pieces with or without weight decay."""
        for decayed_range in self.flat.decayed:
            first, last = overlap((start, end), decayed_range)
            if first < last:
                if start < first:
                    yield (start, first), False
                yield (first, last), True
                start = last
        if start < end:
            yield (start, end), False

    @property
    def stores_all_elements(self) -> bool:
        """Whether this rank keeps the state of all parameters, so that nothing has to be gathered."""
        return len(self.held) == 1 and self.held[0] == (0, self.flat.size)

    def set_step(self, step: int) -> None:
        """Tell the optimizer that `step` steps are done."""
        if self.offloaded is not None:
            self.offloaded.set_step(step)
        for pieces in self._groups.values():
            for piece in pieces:
                piece.steps.fill_(step)

    def parts(self) -> list[StatePart]:
        """Weights and moments of the trained parameters, as far as this rank keeps them."""
        held, owned = tuple(self.held), tuple(self.owned)
        tensors = {MODEL: tuple(self.parameters)} | {name: (moment,) for name, moment in self.moments.items()}
        return [StatePart(name, each, True, self._holders, held, owned) for name, each in tensors.items()]

    def frozen_parts(self) -> list[StatePart]:
        """The frozen parameters, as far as this rank keeps them; nothing if there are none."""
        if not self.frozen:
            return []
        ranges = tuple(self.frozen_stored), tuple(self.frozen_owned)
        return [StatePart(FROZEN, tuple(self.frozen), False, self._holders, *ranges)]

    def step(
        self, learning_rate: float, loss: Loss, memory_bytes: int, before_update: Callable[[], object] = lambda: None
    ) -> StepStatistics:
        """Reduce the gradients, agree on the norm with all ranks, clip, update, gather.

        `before_update` is called before this rank agrees to the update: until then the state is certain to be
        unchanged. Every rank is inside this call when any of them updates its parameters. If the loss or the norm is
        not finite, or above its limit, nothing is updated on any rank; the device decides this.
        """
        step = self.comm.step
        with step.phase("reduction"):
            gradient = self.reduction.finish()
        before_update()
        with step.phase("agreement"):
            agreed = self.sums.agree(gradient, loss, memory_bytes)
            agreed_seconds = self.comm.step_seconds
        with step.phase("optimizer"):
            clipping = clip(agreed, loss.scale, self.config.clip_norm, self.limits)
            has_parts_alone = sum(map(len, gradient)) < self.length  # stage 0
            if has_parts_alone or not self.one_pass:
                torch._foreach_mul_(gradient, clipping.factor)
            if has_parts_alone:
                self.reduction.gather(gradient, self.flat.gradients)
            if self.offloaded is not None:
                self.wait_for_parameters()  # before they are rounded into
            self.updating = True
            self._update(learning_rate, clipping, has_parts_alone)
            with step.phase("gather"):
                if self.offloaded is not None:
                    self._gather_parameters()
                elif not self.rounds_at_once:
                    self.publish_parameters()
            statistics = _read(agreed, clipping, agreed_seconds, loss.z_losses_m is not None)
            self.comm.confirm()
            return statistics

    def _update(self, learning_rate: float, clipping: Clipping, scaled: bool) -> None:
        """Update the held ranges, whose gradients may have been `scaled`; changes nothing if the step is refused."""
        factor = torch.ones_like(clipping.factor) if scaled and self.one_pass else clipping.factor

        rule = _RULES[self.config.name]

        def run(groups: Groups) -> None:
            if self.one_pass:
                rule.update_in_one_pass(groups, self.config, learning_rate, factor, clipping.refused)
            else:
                rule.update(groups, self.config, learning_rate, clipping.refused)

        if self.offloaded is not None:
            self.offloaded.update(run)
        else:
            run(self._groups)

    def load_range(self, start: int, values: torch.Tensor) -> None:
        """Use `values`, fp32 [n], as the flat parameters from element `start` on."""
        end = start + len(values)
        for stored in self.flat.values.ranges:
            low, high = overlap((start, end), stored)
            self.flat.values.of(low, high).copy_(values[low - start : high - start])
        for part, (first, last) in zip(self.parameters, self.held, strict=True):
            low, high = overlap((start, end), (first, last))
            part[low - first : high - first].copy_(values[low - start : high - start])

    def forget(self) -> None:
        """Reset the moments to those before the first step."""
        for moment in self.moments.values():
            moment.zero_()

    def publish_frozen(self) -> None:
        """Gather the frozen parameters that are held by all replicas. Raises PeerLost."""
        if self.frozen_stored != self.flat.frozen_buckets and self.flat.zero < 3:
            for own, bucket in zip(self.frozen_owned, self.flat.frozen_buckets, strict=True):
                part, into = self.flat.values.of(*own).clone(), self.flat.values.of(*bucket)
                self.comm.start_all_gather(holders_of(self.flat, bucket, self.comm), part, into)[1].wait()

    def publish_parameters(self) -> None:
        """Copy the held weights of all replicas into the parameters, except for frozen ones. Waits first for parameters
        that are still arriving, since they are in the same memory."""
        self.wait_for_parameters()
        if self.has_masters and (self.stores_all_elements or self.offloaded is not None):
            for part, (start, end) in zip(self.parameters, self.held, strict=True):
                self.flat.values.of(start, end).copy_(part)
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        """Gather the parameters of other replicas, except for what ZeRO 3 gathers later."""
        if self.stores_all_elements:
            return
        if self.flat.zero == 3:
            for part, (start, end) in zip(self.parameters, self.held, strict=True):
                if self.has_masters and self.offloaded is None:
                    self.flat.values.of(start, end).copy_(part)
            own, tail = self.flat.values.of(*self.held[-1]).clone(), self.flat.values.of(*self.flat.buckets[-1])
            self.comm.start_all_gather(self.comm.grid.holders, own, tail)[1].wait()
            return
        if self.offloaded is not None:
            parts = [self.flat.values.of(start, end) for start, end in self.held]  # already rounded
        else:
            # They are copied even if no rounding is needed, since the parts are inside of the gathered buffer.
            parts = [part.to(self.flat.parameters.dtype, copy=True) for part in self.parameters]
        if self.arriving is None:
            self.reduction.gather(parts, self.flat.parameters)
        else:
            self.arriving.start(parts)

    def start_gather_with_forward(self) -> ArrivingParameters | None:
        """From now on the computation that uses the parameters waits for them, not the update. Returns None if nothing
        is gathered, or if the gathered parameters are the state itself, which snapshots read at that time."""
        if (
            self.has_masters
            and self.held == self.owned
            and self.flat.zero < 3
            and self.comm.size(self.comm.grid.holders) > 1
        ):
            self.arriving = ArrivingParameters(self.flat, self.comm)
        return self.arriving

    def forget_arriving(self) -> None:
        """A generation begins: parameters that were arriving in the last one will not come."""
        if self.arriving is not None:
            self.arriving.forget()

    def wait_for_parameters(self) -> None:
        """Return once all parameters are those of the last update. Raises PeerLost."""
        if self.arriving is not None:
            self.arriving.wait()


def _read(agreed: Agreement, clipping: Clipping, agreed_seconds: float, with_z_loss: bool) -> StepStatistics:
    """Copy a step's numbers to the host: the only place in a step where the host waits for the device."""
    refused_or_not = clipping.refused.to(agreed.loss.dtype)
    scalars = torch.stack([agreed.loss, agreed.z_loss, agreed.tokens, clipping.norm, refused_or_not])
    tokens_le = agreed.expert_tokens
    of_experts = [agreed.balance_losses] if tokens_le is None else [agreed.balance_losses, tokens_le.flatten().double()]
    vectors = [scalars, agreed.asked, agreed.memory_bytes, agreed.own_seconds]
    on_host = torch.cat([*vectors, *of_experts]).tolist()
    total, z_total, tokens, norm, refused, *other = on_host
    asked, each = Asked.of(other[:ASKED_LENGTH]), other[ASKED_LENGTH:]
    world = len(agreed.memory_bytes)
    balance = each[2 * world : 2 * world + len(agreed.balance_losses)]
    counts = [int(count) for count in each[2 * world + len(balance) :]]
    experts = 0 if tokens_le is None else tokens_le.shape[1]
    by_layer = tuple(tuple(counts[first : first + experts]) for first in range(0, len(counts), max(1, experts)))
    return StepStatistics(
        loss=total / max(tokens, 1.0),
        grad_norm=norm,
        memory_bytes=int(max(each[:world])),
        own_seconds=tuple(each[world : 2 * world]),
        agreed_seconds=agreed_seconds,
        memory_by_rank=tuple(each[:world]),
        updated=not refused,
        asked=asked,
        z_loss=z_total / max(tokens, 1.0) if with_z_loss else None,
        balance_loss=balance[0] if balance else None,
        expert_tokens=by_layer if experts else None,
    )


@dataclass(frozen=True)
class Clipping:
    """What happens to a step's gradients; fp64 scalars and a bool on the device."""

    norm: torch.Tensor
    """L2 norm of the mean loss's gradient, before clipping."""
    factor: torch.Tensor
    """Factor for the summed gradients: the mean over tokens, without the loss scale, clipped."""
    refused: torch.Tensor
    """Whether nothing may be updated: numbers are not finite, or above their limits. AdamW's `found_inf`."""


def clip(agreed: Agreement, loss_scale: float, clip_norm: float, limits: tuple[float, float]) -> Clipping:
    """Clipping by the global gradient norm (Pascanu et al., arXiv:1211.5063, section 3.2), on the device: gradients
    longer than `clip_norm` are scaled down to it (0: none are). `limits`: loss per token and gradient norm
    above which a step is refused."""
    total, tokens = agreed.loss, agreed.tokens
    divisor = tokens.clamp(min=1.0) * loss_scale
    norm = agreed.square.sqrt() / divisor
    if clip_norm:
        divisor = divisor * (norm + 1e-6).div(clip_norm).clamp(min=1.0)
    finite = torch.isfinite(norm) & torch.isfinite(total)
    refused = ~finite | (total / tokens.clamp(min=1.0) > limits[0]) | (norm > limits[1])
    # NaN would stay in the alignment between parameters, which nothing overwrites.
    return Clipping(norm, divisor.reciprocal().masked_fill(refused, 0.0), refused)


class ArrivingParameters:
    """Updated parameters that are still being gathered from the other replicas while the next step's forward begins: a
    computation waits only for the buckets of the parameters that it uses.

    Every replica starts the gathers in one order: the tail first, in which each layer has its norms and biases, then
    the head from the first layers on. Nothing about the numbers depends on when they are waited for.
    """

    def __init__(self, flat: FlatParameters, comm: Comm):
        self._flat, self._comm = flat, comm
        self._under_way: dict[int, Handle] = {}
        """Handles by bucket."""
        self._needed: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()

    def start(self, parts: Sequence[torch.Tensor]) -> None:
        """Begin to gather every replica's `parts`, one per bucket, which may be in the flat parameters already."""
        self.wait()
        for number in (len(parts) - 1, *self._flat.bucket_order):
            start, end = bucket = self._flat.buckets[number]
            full, axis = self._flat.parameters[start:end], holders_of(self._flat, bucket, self._comm)
            self._under_way[number] = self._comm.start_all_gather(axis, parts[number], full)[1]

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
