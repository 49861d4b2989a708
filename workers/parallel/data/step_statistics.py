"""Statistics of a step: a rank's share of its loss before the agreement, the step's statistics after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


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
    asked_to_end: bool = False
    """Whether any rank was asked to save and end; all ranks then do so after the step."""
    asked_to_rest: bool = False
    """Whether any rank was asked to leave the generation; all ranks then do so after the step."""
    saving: bool = False
    """Whether any rank was writing a checkpoint."""
    trace: tuple[int, int] | None = None
    """Number of the trace that begins with the next step, and its number of steps; None: no trace begins."""
    z_loss: float | None = None
    """Mean z-loss over the same tokens; None without."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite; if not, nothing has been updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)
