"""The agreement of all ranks on a step: one sum over all ranks, after which the step is committed; what a rank knows
before it, and the step's statistics after it.

Each rank writes what it alone knows into its own elements of one vector and leaves the others zero, so the sum is an
exchange at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import torch

from manta.workers.comm.comm import Comm
from manta.workers.parallel.data.flat import ALIGNMENT, FlatParameters, Range
from manta.workers.protocol.requests import ASKED_LENGTH, NOTHING_ASKED, Asked


@dataclass(frozen=True)
class Loss:
    """One rank's share of a step's loss: zero on ranks that do not know it."""

    losses_m: torch.Tensor
    """Sum over tokens of each micro-batch, fp64 [m]."""
    tokens: torch.Tensor
    """Tokens with a target, fp64 scalar."""
    scale: float
    """Factor on the loss in backward."""
    z_losses_m: torch.Tensor | None = None
    """z-loss of each micro-batch, train.z_loss times log(Z)^2 summed over tokens, fp64 [m]; None without a z-loss."""
    balance_m: torch.Tensor | None = None
    """Each micro-batch's part of the routers' own losses, a mean over the sequences of the global batch, fp64 [m]; None
    if they have none."""
    expert_tokens: torch.Tensor | None = None
    """Tokens that went to each expert of each layer with experts of the model, int64; zero for layers of other stages,
    and on all but one tensor rank. None without experts."""


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
    """Time of each rank's step, up to its agreement, in which it did not wait for others; 0 if unknown."""
    agreed_seconds: float = 0.0
    """Time of the step up to its agreement, which all ranks leave together; the rest of it a rank has waited."""
    memory_by_rank: tuple[float, ...] = ()
    """Memory use of each rank, in bytes."""
    updated: bool = True
    """Whether the step has updated anything; false if its numbers are not finite, or above the limits."""
    asked: Asked = NOTHING_ASKED
    """What ranks were asked for, and do, after the step."""
    z_loss: float | None = None
    """Mean z-loss over the same tokens; None without."""
    balance_loss: float | None = None
    """Weighted balance loss, the mean over the sequences of the global batch of its sum over layers, with the z-loss of
    routers; None without."""
    expert_tokens: tuple[tuple[int, ...], ...] | None = None
    """Tokens of the global batch that went to each expert of each layer with experts; None without such."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite; if not, nothing has been updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


_LONG_ROW = 4096
"""Elements of a row on a GPU."""


class SquaredNorm(Protocol):
    """The squared norm of a rank's part of the step's summed gradient."""

    def square(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """fp64 scalar, of the gradient of the rank's `parts`, in their order."""
        ...


class CountedNorm:
    """A norm that counts each global parameter once over all ranks."""

    def __init__(self, flat: FlatParameters, owned: list[Range], tensor_index: int):
        """`owned`: the ranges of the flat buffer whose reduced gradients this rank has."""
        self._elsewhere: torch.Tensor | None = None
        """bool: which rows of ALIGNMENT elements of the owned ranges are counted by another rank of the replica."""
        others = flat.not_answered_for(tensor_index)
        if others:
            rows = torch.zeros(flat.size // ALIGNMENT, dtype=torch.bool)
            for start, end in others:
                rows[start // ALIGNMENT : end // ALIGNMENT] = True
            mine = [rows[start // ALIGNMENT : end // ALIGNMENT] for start, end in owned]
            self._elsewhere = torch.cat(mine).to(flat.gradients.device)

    def square(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """fp64 scalar, of the owned ranges' gradient."""
        if self._elsewhere is None and all(part.is_cuda for part in parts):
            return torch.stack([_square_by_long_rows(part) for part in parts]).sum()
        # Short rows, summed in fp64: as exact as squaring in fp64, and forty times as fast on a CPU.
        norms = [torch.linalg.vector_norm(part.view(-1, ALIGNMENT), dim=1) for part in parts]
        rows = torch.cat(norms).double().square()
        return rows.sum() if self._elsewhere is None else rows.masked_fill(self._elsewhere, 0.0).sum()


def _square_by_long_rows(part: torch.Tensor) -> torch.Tensor:
    """fp64 scalar. On a GPU the threads of a block sum one row, and short rows keep few of them busy."""
    end = len(part) // _LONG_ROW * _LONG_ROW
    whole, rest = part[:end].view(-1, _LONG_ROW), part[end:].view(1, -1)
    return torch.stack([torch.linalg.vector_norm(rows, dim=1).double().square().sum() for rows in (whole, rest)]).sum()


class Agreement:
    """One fp64 vector, and named views of its slices."""

    def __init__(
        self,
        comm: Comm,
        replica_ranks: int = 0,
        micro_batches: int = 0,
        z_losses: int = 0,
        balance_losses: int = 0,
        expert_tokens: torch.Tensor | None = None,
    ):
        """`replica_ranks`, `micro_batches` and, with a z-loss, `z_losses`: lengths of slices for elastic sums only;
        `balance_losses`: 1 if routers have losses of their own, with elastic sums one for each micro-batch;
        `expert_tokens`: this rank's, of a model with experts."""
        self._comm, world = comm, comm.size("world")
        self.expert_tokens = expert_tokens
        sizes = (world, world, replica_ranks, micro_batches, z_losses, balance_losses)
        self._values = torch.zeros(4 + ASKED_LENGTH + sum(sizes), dtype=torch.float64, device=comm.device)
        self.loss, self.z_loss, self.tokens, self.square = self._values[:4]
        """Scalars: loss and z-loss summed over tokens, tokens with a target, squared norm of the summed gradients."""
        self.asked = self._values[4 : 4 + ASKED_LENGTH]
        """The numbers of `Asked`."""
        slices = self._values[4 + ASKED_LENGTH :].split(sizes)
        self.memory_bytes, self.own_seconds, self.rank_squares, self.micro_batch_losses, self.micro_batch_z = slices[:5]
        """[world]: each rank's memory in use, and the time of its step in which it did not wait for others. [p t]:
        squared norm by pipeline and tensor rank. [micro-batches of the global batch, c]: loss and z-loss of each, by
        context rank."""
        self.balance_losses = slices[5]
        """Routers' own losses: [micro-batches of the global batch, c] with elastic sums, else [1]; [0] if there are
        none."""

    def sum(self) -> None:
        """Sum over all ranks, the vector last: who has its sum knows that all ranks came so far. Raises PeerLost."""
        if self.expert_tokens is not None:
            self._comm.all_reduce("world", self.expert_tokens)
        self._comm.all_reduce("world", self._values)


class StepSums:
    """Performs a step's agreement."""

    def __init__(self, comm: Comm, norm: SquaredNorm):
        self.comm, self.norm = comm, norm

    def agree(self, gradient: Sequence[torch.Tensor], loss: Loss, memory_bytes: int) -> Agreement:
        """The sums over all ranks, of this rank's reduced `gradient`, its part of each bucket, among others."""
        has_balance = loss.balance_m is not None
        agreed = Agreement(self.comm, balance_losses=int(has_balance), expert_tokens=loss.expert_tokens)
        self._write_own(agreed, loss, memory_bytes)
        if loss.balance_m is not None:
            agreed.balance_losses.copy_(loss.balance_m.sum())
        agreed.loss.copy_(loss.losses_m.sum())
        if loss.z_losses_m is not None:
            agreed.z_loss.copy_(loss.z_losses_m.sum())
        agreed.square.copy_(self.norm.square(gradient))
        agreed.sum()
        return agreed

    def _write_own(self, agreed: Agreement, loss: Loss, memory_bytes: int) -> None:
        """All elements except losses and norm."""
        index = self.comm.index("world")
        agreed.tokens.copy_(loss.tokens)
        agreed.memory_bytes[index] = memory_bytes
        agreed.own_seconds[index] = self.comm.own_seconds
        recorder = self.comm.step.recorder
        may_begin_trace = self.comm.rank == 0 and (recorder is None or recorder.in_last_step)
        next_step = self.comm.progress.step + 1 if may_begin_trace else None
        asked = self.comm.requests.of(self.comm.generation, next_step)
        for element, number in zip(agreed.asked, astuple(asked), strict=True):
            if number:  # without a copy to the device, which the host would wait for
                element.fill_(float(number))
