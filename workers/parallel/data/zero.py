"""The optimizer under ZeRO (arXiv:1910.02054, section 5.1). Stage 1: each replica keeps the optimizer state of its
parts of the flat buffer, updates them, and the updated parts are gathered again. Stage 0: every replica keeps and
updates everything; gradients are reduced the same way, so both stages give the same bits.

AdamW itself is torch's (fused), on flat ranges in fp32: decoupled weight decay on the decayed one, none on the other.
With 16-bit compute the parts are fp32 master weights, rounded into the parameters after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from workers.comm.comm import Comm
from workers.config import OptimizerConfig
from workers.parallel.data.flat import ALIGNMENT, FlatParameters, Slot, overlap
from workers.parallel.data.reduction import GradientReduction


@dataclass(frozen=True)
class Loss:
    """One rank's share of a step's loss: zero on ranks that do not know it."""

    losses_m: torch.Tensor
    """Sum over tokens of each micro-batch, fp64 [m]."""
    tokens: torch.Tensor
    """Tokens that have a target, fp64 scalar."""
    scale: float
    """Factor on the loss in backward."""


@dataclass(frozen=True)
class StepStatistics:
    """Numbers about one step, the same on every rank."""

    loss: float
    """Mean loss over the tokens of the global batch, in nats a token."""
    grad_norm: float
    """Global L2 norm of the mean loss's gradient before clipping."""
    memory_bytes: int
    """Largest memory use of any rank."""
    own_seconds: tuple[float, ...] = ()
    """Of each rank: time of the step, up to its agreement, that it did not wait for others; 0 where it cannot know."""
    updated: bool = True
    """Whether the step has updated anything: not where its numbers are not finite, or above the limits."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite; where they are not, nothing has been updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class _Piece:
    """A part of the held ranges with one rate of weight decay."""

    values: torch.Tensor
    where: slice
    """Its place in the held ranges, and so in the moments and in the gradient."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    steps: torch.Tensor
    """Steps done, fp32 scalar."""


class ZeroOptimizer:
    """The optimizer of one rank: its parts of the flat parameters with their moments."""

    def __init__(
        self,
        flat: FlatParameters,
        config: OptimizerConfig,
        comm: Comm,
        reduction: GradientReduction,
        sequence_parallel: bool,
        stage: int,
    ):
        """`stage`: 0 or 1. `sequence_parallel`: tensor ranks saw different parts of the sequence."""
        self.flat, self.config, self.comm, self.reduction = flat, config, comm, reduction
        self.sequence_parallel = sequence_parallel
        self.owned = flat.parts(comm.index("data"))
        """Ranges of the flat buffer that this replica saves; between them the replicas save each element once."""
        self.held = self.owned if stage == 1 and comm.size("data") > 1 else [(0, flat.size)]
        """Ranges of the flat buffer whose state this rank keeps: all that follow speak of them one after the other."""
        length = sum(end - start for start, end in self.held)
        self.parameters = [flat.parameters[start:end] for start, end in self.held]
        """The fp32 weights of the held ranges: views of the parameters, or of the master weights."""
        self.has_masters = flat.parameters.dtype != flat.gradients.dtype
        """Whether these are kept beside the parameters."""
        if self.has_masters:
            masters = flat.gradients.new_zeros(length)
            self.parameters = list(masters.split([end - start for start, end in self.held]))
        self.exp_avg = flat.gradients.new_zeros(length)
        self.exp_avg_sq = flat.gradients.new_zeros(length)
        self._groups = self._decay_groups()
        self.updating = False
        """Whether an update has begun that nobody has declared complete."""
        self.set_step(0)
        self._elsewhere = self._rows_answered_for_elsewhere()
        self.limits = (math.inf, math.inf)
        """Loss and gradient norm above which a step updates nothing; the same on every rank."""

    def _rows_answered_for_elsewhere(self) -> torch.Tensor | None:
        """Which rows of ALIGNMENT elements of the owned ranges another rank of the replica counts: bool, or None."""
        others = self.flat.not_answered_for(self.comm.index("tensor"))
        if not others:
            return None
        rows = torch.zeros(self.flat.size // ALIGNMENT, dtype=torch.bool)
        for start, end in others:
            rows[start // ALIGNMENT : end // ALIGNMENT] = True
        mine = [rows[start // ALIGNMENT : end // ALIGNMENT] for start, end in self.owned]
        return torch.cat(mine).to(self.flat.gradients.device)

    def _decay_groups(self) -> dict[float, list[_Piece]]:
        """The held ranges cut where weight decay begins or ends, by the rate of their decay."""
        groups: dict[float, list[_Piece]] = {}
        position = 0
        for (start, end), values in zip(self.held, self.parameters, strict=True):
            decayed = overlap((start, end), self.flat.decayed)
            pieces = [((start, decayed[0]), 0.0), (decayed, self.config.weight_decay), ((decayed[1], end), 0.0)]
            if decayed[0] == decayed[1]:
                pieces = [((start, end), 0.0)]
            for (first, last), decay in pieces:
                if last > first:
                    where = slice(position + first - start, position + last - start)
                    moments = self.exp_avg[where], self.exp_avg_sq[where]
                    steps = torch.zeros((), dtype=torch.float32, device=values.device)
                    piece = _Piece(values[first - start : last - start], where, *moments, steps)
                    groups.setdefault(decay, []).append(piece)
            position += end - start
        return groups

    def set_step(self, step: int) -> None:
        """Tell AdamW that `step` steps are done."""
        for pieces in self._groups.values():
            for piece in pieces:
                piece.steps.fill_(step)

    def state(self) -> list[torch.Tensor]:
        """Everything that makes up this rank's state, as 1-D tensors."""
        return [*self.parameters, self.exp_avg, self.exp_avg_sq]

    def step(
        self,
        learning_rate: float,
        loss: Loss,
        memory_bytes: int,
        before_update: Callable[[], object] = lambda: None,
    ) -> StepStatistics:
        """Reduce the gradients, agree on the norm with all ranks, clip, update, gather.

        `before_update` is called before this rank agrees to the update: the last moment at which the state is sure to
        be what it was. Every rank is inside this call when any of them updates its parameters. Where the loss or the
        norm is not finite, or above its limit, nothing is updated on any rank, which is decided on the device.
        """
        step = self.comm.step
        with step.phase("reduction"):
            gradient = self.reduction.finish(self._finish_tail)
        before_update()
        with step.phase("agreement"):
            agreed = self._agree(gradient, loss, memory_bytes)
        with step.phase("optimizer"):
            norm, factor, bad = self._norm_and_factor(agreed, loss.scale)
            gradient.mul_(factor)
            if len(gradient) < len(self.exp_avg):  # stage 0
                self.reduction.gather(self._by_bucket(gradient), self.flat.gradients)
                gradient = self.flat.gradients
            self.updating = True
            self._update(gradient, learning_rate, bad)
            self.publish_parameters()
            # The one place of a step where the host waits for the device.
            told = [agreed[:2], norm.view(1), bad.view(1).to(agreed.dtype), agreed[3:]]
            total, tokens, found, refused, *each = torch.cat(told).tolist()
        world, memory = self.comm.size("world"), int(max(each[: self.comm.size("world")]))
        return StepStatistics(total / max(tokens, 1.0), found, memory, tuple(each[world:]), not refused)

    def _norm_and_factor(
        self, agreed: torch.Tensor, loss_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient's norm, what the sums in the buffer are multiplied by, clipping included, and whether the step
        must not update anything, which AdamW is told."""
        total, tokens, square = agreed[0], agreed[1], agreed[2]
        divisor = tokens.clamp(min=1.0) * loss_scale
        norm = square.sqrt() / divisor
        if self.config.clip_norm:
            divisor = divisor * (norm + 1e-6).div(self.config.clip_norm).clamp(min=1.0)
        finite = torch.isfinite(norm) & torch.isfinite(total)
        bad = ~finite | (total / tokens.clamp(min=1.0) > self.limits[0]) | (norm > self.limits[1])
        # Not a number would stay in the alignment between parameters, where nothing is written.
        return norm, divisor.reciprocal().masked_fill(bad, 0.0), bad

    def _update(self, gradient: torch.Tensor, learning_rate: float, bad: torch.Tensor) -> None:
        """AdamW on the held ranges, which does nothing where `bad`."""
        for decay, pieces in self._groups.items():
            adamw(
                [piece.values for piece in pieces],
                [gradient[piece.where] for piece in pieces],
                [piece.exp_avg for piece in pieces],
                [piece.exp_avg_sq for piece in pieces],
                [],
                [piece.steps for piece in pieces],
                fused=True,
                found_inf=bad.to(torch.float32),
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=learning_rate,
                weight_decay=decay,
                eps=self.config.epsilon,
                maximize=False,
            )

    def load_parameters(self, values: torch.Tensor) -> None:
        """Take over the flat parameters `values`, fp32 [flat.size]."""
        for part, (start, end) in zip(self.parameters, self.held, strict=True):
            part.copy_(values[start:end])
        self.flat.parameters.copy_(values)

    def forget(self) -> None:
        """Moments as before the first step."""
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()

    def publish_parameters(self) -> None:
        """Bring the held weights, of all replicas, into the parameters."""
        everything = len(self.held) == 1 and self.held[0] == (0, self.flat.size)
        if everything and self.has_masters:
            self.flat.parameters.copy_(self.parameters[0])
        elif not everything:
            # A copy also where no rounding is needed: the parts lie inside of what is gathered into.
            parts = [part.to(self.flat.parameters.dtype, copy=True) for part in self.parameters]
            self.reduction.gather(parts, self.flat.parameters)

    def _by_bucket(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        return list(gradient.split([end - start for start, end in self.owned]))

    def _finish_tail(self) -> None:
        """Complete the gradients that were computed in parts elsewhere in the replica."""
        if self.sequence_parallel:
            # A tensor rank saw only its part of the sequence (arXiv:2205.05198, section 4.2.2).
            self._sum_over_tensor(self.flat.replicated())
        self._sum_copied(self.flat.copied())
        tied = self.flat.range_of("embedding.token.weight") if self.flat.sharing.tied_across_stages else None
        if tied is not None:
            # The tied embedding has two uses, on the first and on the last stage.
            self.comm.all_reduce("embedding", self.flat.gradients[tied[0] : tied[1]])

    def _sum_over_tensor(self, slots: list[Slot]) -> None:
        if slots:
            # The replicated parameters lie side by side: one message for all.
            together = torch.cat([self.flat.gradients[slot.start : slot.end] for slot in slots])
            self.comm.all_reduce("tensor", together)
            for slot, total in zip(slots, together.split([s.end - s.start for s in slots]), strict=True):
                self.flat.gradients[slot.start : slot.end] = total

    def _sum_copied(self, slots: list[Slot]) -> None:
        """Sum over the tensor ranks that hold the same part: each adds its own in that part's place, in one message."""
        if not slots:
            return
        index, size = self.comm.index("tensor"), self.comm.size("tensor")
        copies = slots[0].entry.shard.copies  # of key-value heads, the only ones there are
        mine = torch.cat([self.flat.gradients[slot.start : slot.end] for slot in slots])
        places = mine.new_zeros(size // copies, len(mine))
        places[index // copies] = mine
        self.comm.all_reduce("tensor", places)
        for slot, total in zip(slots, places[index // copies].split([s.end - s.start for s in slots]), strict=True):
            self.flat.gradients[slot.start : slot.end] = total

    def _agree(self, gradient: torch.Tensor, loss: Loss, memory_bytes: int) -> torch.Tensor:
        """One reduction over all ranks: loss, tokens, squared norm, and each rank's memory and own time in places of
        their own."""
        square = self._counted_square(gradient)
        shared = self._numbers(loss, memory_bytes)
        shared[0], shared[2] = loss.losses_m.sum(), square
        self.comm.all_reduce("world", shared)
        return shared

    def _numbers(self, loss: Loss, memory_bytes: int, more: int = 0) -> torch.Tensor:
        """What this rank puts into the agreement, without loss and norm; `more` places behind it."""
        world, index = self.comm.size("world"), self.comm.index("world")
        shared = torch.zeros(3 + 2 * world + more, dtype=torch.float64, device=self.flat.gradients.device)
        shared[1] = loss.tokens
        shared[3 + index] = memory_bytes
        shared[3 + world + index] = self.comm.own_seconds
        return shared

    def _counted_square(self, gradient: torch.Tensor) -> torch.Tensor:
        """Squared norm of the parameters that this rank answers for: each global parameter is counted once."""
        # Short rows, summed in fp64: as exact as squaring in fp64, and forty times as fast on a CPU.
        rows = torch.linalg.vector_norm(gradient.view(-1, ALIGNMENT), dim=1).double().square()
        return rows.sum() if self._elsewhere is None else rows.masked_fill(self._elsewhere, 0.0).sum()
