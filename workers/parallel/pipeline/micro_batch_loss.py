"""The loss of a micro-batch on the last stage, added to the sums of the step. It is computed from logits, or together
with the output layer a few tokens at a time (`train.head_tokens`).

Shapes: s sequence, b micro-batch, h hidden, v vocabulary of the rank, n = s b tokens; t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from workers.comm.comm import Comm
from workers.config import JobSpec
from workers.data.batches import NO_TARGET
from workers.parallel.pipeline.step_state import Step
from workers.parallel.tensor.cross_entropy import (
    BY_BLOCKS,
    LossKernels,
    compiled_kernels,
    cross_entropy_and_log_z,
    vocabulary_parallel_cross_entropy,
)
from workers.parallel.tensor.head_loss import Gradients, HeadLoss
from workers.parallel.tensor.layers import VocabularyParallelOutput


class MicroBatchLoss:
    """Computes losses for one rank's pipeline."""

    def __init__(self, spec: JobSpec, comm: Comm, chunks: Iterable[nn.Module]):
        self._spec, self._comm = spec, comm
        self.head = self._head(chunks)
        """Output layer and loss combined, if they process a few tokens at a time."""

    def _head(self, chunks: Iterable[nn.Module]) -> HeadLoss | None:
        at_once, size = self._spec.train.head_tokens, self._spec.vocabulary_size
        if at_once:
            for chunk in chunks:
                if isinstance(chunk.output, VocabularyParallelOutput):
                    return HeadLoss(chunk.output, size, at_once, self._kernels)
        return None

    @property
    def _kernels(self) -> LossKernels:
        return compiled_kernels() if self._spec.train.compile else BY_BLOCKS

    def of_logits(self, logits: torch.Tensor, micro_batch: int, held: Step) -> torch.Tensor:
        """Sum of the micro-batch's losses, z-loss included, for backward, from logits [s, b, v]; adds both to the sums
        of `held`. Raises PeerLost."""
        logits, targets_n = _with_targets(logits, micro_batch, held)
        given = (logits.flatten(0, 1), targets_n, self._spec.vocabulary_size, self._comm, self._kernels)
        weight = self._spec.train.z_loss
        if weight and torch.is_grad_enabled():
            losses_n, squares_n = cross_entropy_and_log_z(*given)
            self._count(micro_batch, targets_n, losses_n, squares_n, held)
            return losses_n.sum() + weight * squares_n.sum()
        losses_n = vocabulary_parallel_cross_entropy(*given)
        self._count(micro_batch, targets_n, losses_n, None, held)
        return losses_n.sum()

    def of_head_input(
        self, x: torch.Tensor, micro_batch: int, held: Step, gradients: Gradients | None
    ) -> torch.Tensor | None:
        """Adds the losses to the sums of `held` like `of_logits`, from the output layer's input x [s or s/t, b, h].
        With `gradients` the weight's gradient is added to its sum, and that of x is returned if it is wanted. Raises
        PeerLost."""
        rows, targets_n = _with_targets(x, micro_batch, held)
        assert self.head is not None
        weight = self._spec.train.z_loss if gradients is not None else 0.0
        losses = self.head(rows, targets_n, weight, gradients)
        self._count(micro_batch, targets_n, losses.losses_n, losses.squares_n, held)
        return losses.grad_x if losses.grad_x is None or rows is x else losses.grad_x.transpose(0, 1)

    def _count(
        self,
        micro_batch: int,
        targets_n: torch.Tensor,
        losses_n: torch.Tensor,
        squares_n: torch.Tensor | None,
        held: Step,
    ) -> None:
        if self._comm.index("tensor") == 0:
            if squares_n is not None:
                squares = squares_n.detach().sum(dtype=torch.float64)
                held.z_losses_m[micro_batch] = self._spec.train.z_loss * squares
            held.losses_m[micro_batch] = losses_n.detach().sum(dtype=torch.float64)
            held.valid_tokens += (targets_n != NO_TARGET).sum()


def _with_targets(x: torch.Tensor, micro_batch: int, held: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's output for each token, in memory order, and the targets [n] in the same order."""
    targets_sb = held.batch[micro_batch].targets_sb
    assert targets_sb is not None
    if not x.is_contiguous():  # a sample's tokens are contiguous
        x, targets_sb = x.transpose(0, 1), targets_sb.t()
    return x, targets_sb.flatten()
