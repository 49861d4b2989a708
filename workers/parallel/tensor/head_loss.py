"""Output layer and cross-entropy of a few tokens at a time, so that the logits of a whole micro-batch are never in
memory, nor their gradient. The computation is that of the two layers, with the same bits for a micro-batch with at most
as many tokens as are processed at once.

In training all of it runs in the backward pass, forward and gradients of a few tokens together: nothing is computed
twice, no logits are stored, and the weight's gradient is added at the point of the schedule where a backward adds the
gradients of its micro-batch. Schedules that defer products for weights do not defer this one, which would have to keep
logits.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary padded to a multiple of the tensor-parallel size t; n = s b
tokens, m of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from workers.parallel.tensor.cross_entropy import LossKernels, logits_gradient, token_losses
from workers.parallel.tensor.layers import VocabularyParallelOutput
from workers.parallel.tensor.sequence_parallel import gather, start_sum


@dataclass(frozen=True)
class Losses:
    """Losses of a micro-batch."""

    losses_n: torch.Tensor
    """Cross-entropy of each token, in nats; 0 without a target."""
    squares_n: torch.Tensor | None
    """Squares of log Z, for the z-loss."""
    grad_x: torch.Tensor | None
    """The gradient of the output layer's input, [s or s/t, b, h]."""


@dataclass(frozen=True)
class Gradients:
    """Which gradients of the sum of losses and z-loss are computed."""

    scale: torch.Tensor
    """Gradient of the sum, a scalar in the precision of losses."""
    of_input: bool
    """Whether the gradient of the output layer's input is computed; that of the weight is if it is trained."""


class HeadLoss:
    """The loss on one rank with the output layer."""

    def __init__(self, output: VocabularyParallelOutput, vocabulary_size: int, at_once: int, kernels: LossKernels):
        """`at_once`: tokens whose logits are in memory."""
        self.output, self.region, self.vocabulary_size = output, output.region, vocabulary_size
        self.at_once, self.kernels = at_once, kernels

    @property
    def weight(self) -> nn.Parameter:
        """Weight of the output layer, [v/t, h]."""
        return self.output.weight

    @torch.no_grad()
    def __call__(
        self, x: torch.Tensor, targets_n: torch.Tensor, z_weight: float = 0.0, gradients: Gradients | None = None
    ) -> Losses:
        """Losses of x [s or s/t, b, h], contiguous, with targets in the order of its tokens; with `z_weight`, squares
        of log Z too. With `gradients` also the gradient of x, and the weight's gradient is added to its sum."""
        region = self.region
        whole = gather(x, region)
        x_nh = whole.reshape(-1, whole.shape[-1])
        wide = torch.float32 if x.element_size() < 4 else x.dtype
        results_2n = torch.empty(2 if z_weight else 1, len(x_nh), dtype=wide, device=x.device)
        grad = torch.empty_like(whole) if gradients is not None and gradients.of_input else None
        reducing = None
        for tokens, is_last in self._parts(len(x_nh)):
            grad_mv = self._losses(x_nh[tokens], targets_n[tokens], z_weight, results_2n[:, tokens], gradients)
            if grad_mv is None:
                continue
            if grad is not None:
                grad.view(-1, grad.shape[-1])[tokens] = region.products.input_gradient([grad_mv], [self.weight])
                if is_last:
                    grad, reducing = start_sum(grad, region)  # overlaps with the last product for the weight
            if self.weight.requires_grad:
                region.weight_gradients.add_product(self.weight, grad_mv, x_nh[tokens], is_last)
            del grad_mv  # before the next logits are computed
        if reducing is not None:
            reducing.wait()
        return Losses(results_2n[0], results_2n[1].square() if z_weight else None, grad)

    def _parts(self, count: int) -> Iterator[tuple[slice, bool]]:
        """Slices of tokens that are processed at once, and whether each is the last."""
        for first in range(0, count, self.at_once):
            yield slice(first, first + self.at_once), first + self.at_once >= count

    def _losses(
        self,
        x_mh: torch.Tensor,
        targets_m: torch.Tensor,
        z_weight: float,
        results_2m: torch.Tensor,
        gradients: Gradients | None,
    ) -> torch.Tensor | None:
        """Losses, and log Z if needed, into `results_2m`; returns the gradient of logits if one is computed."""
        logits_mv = self.region.products.output(x_mh, self.weight)
        losses_m, log_z_m, kept = token_losses(
            logits_mv,
            targets_m,
            self.vocabulary_size,
            self.region.comm,
            z_weight > 0,
            self.kernels,
            gradients is not None,
        )
        results_2m[0] = losses_m
        if log_z_m is not None:
            results_2m[1] = log_z_m
        if gradients is None:
            return None
        grad_m = gradients.scale.expand(len(x_mh))
        return logits_gradient(kept, self.kernels, grad_m, grad_m * z_weight if z_weight else None)
