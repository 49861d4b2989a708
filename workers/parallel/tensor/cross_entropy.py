"""Cross-entropy over logits that are split along the vocabulary (arXiv:1909.08053, section 3): instead of the logits,
three numbers per token cross the tensor group. On request it also returns the square of log Z, with Z a token's sum of
exponentials, for the z-loss (arXiv:2204.02311, section 5); this needs no further communication. `HeadLoss` computes it
together with the output layer.

The logits' gradient reuses their memory, and 16-bit logits are converted to fp32 a block of rows at a time, or within
compiled kernels, so there is never a second tensor of their size. Shapes: s sequence, b micro-batch, h hidden, n = s b
tokens, m of them at once, v vocabulary padded to a multiple of the tensor-parallel size t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from manta.workers.comm.comm import Comm
from manta.workers.parallel.tensor.layers import VocabularyParallelOutput
from manta.workers.parallel.tensor.sequence_parallel import gather, start_sum

BLOCK_ROWS = 256
"""Fewest rows of 16-bit logits that are converted at once: on a CPU they stay in its caches."""
BLOCK_ELEMENTS = 2**24
"""Elements of a block on a GPU, 64 MB in fp32: otherwise a step would have thousands of small kernels."""
FP16_BITS = 14
"""Probabilities in fp16 are stored times 2^14, which uses its range: most are below 2^-14 if the vocabulary is large,
and would lose digits there before the loss scale lifts them."""


@dataclass(frozen=True)
class LossKernels:
    """What is computed for each 16-bit logit in fp32; memory traffic dominates its cost."""

    sums: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Sums the exponentials of logits [n, v/t] minus a number per row [n]: fp32 [n]."""
    exponentials: Callable[[torch.Tensor, torch.Tensor], object]
    """Replaces the logits by these exponentials."""
    scaled: Callable[[torch.Tensor, torch.Tensor], object]
    """Multiplies each row of 16-bit numbers, in place, by an fp32 number, and rounds once."""


Kept = tuple[torch.Tensor | None, ...]
"""What the logits' gradient is computed from: the logits' memory, and a few numbers per token."""


def token_losses(
    logits_nv: torch.Tensor,
    targets_n: torch.Tensor,
    vocabulary_size: int,
    comm: Comm,
    with_squares: bool,
    kernels: LossKernels,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, Kept]:
    """Losses [n], log Z [n] for their squares, and with `keeps`, what `logits_gradient` needs. Overwrites the logits;
    not differentiable by autograd."""
    columns = logits_nv.shape[1]
    start = comm.index("tensor") * columns
    real = max(0, min(columns, vocabulary_size - start))
    wide = torch.float32 if logits_nv.element_size() < 4 else logits_nv.dtype
    logits_nv[:, real:] = float("-inf")  # padding has no probability
    own_largest_n = logits_nv.amax(1).to(wide)
    largest_n = own_largest_n.clone()
    comm.all_reduce("tensor", largest_n, largest=True)

    local_n = targets_n - start
    mine_n = (local_n >= 0) & (local_n < real)
    local_n = local_n.masked_fill(~mine_n, 0).unsqueeze(1)
    target_n = logits_nv.gather(1, local_n).squeeze(1).to(wide) - largest_n
    own_n = _sums_of_exponentials(logits_nv, own_largest_n, largest_n, real, kernels)
    sums_2n = torch.stack([own_n, target_n.masked_fill(~mine_n, 0.0)])
    comm.all_reduce("tensor", sums_2n)
    ignored_n = targets_n < 0
    losses_n = (sums_2n[0].log() - sums_2n[1]).masked_fill(ignored_n, 0.0)
    log_z_n = (sums_2n[0].log() + largest_n).masked_fill(ignored_n, 0.0) if with_squares else None
    if not keeps:
        return losses_n, log_z_n, ()
    factor_n = _unscaled_probabilities(logits_nv, largest_n, own_n, sums_2n[0], kernels)
    # Kept separate: rounding p before subtracting it from 1 would lose the small difference.
    error_n = target_n.exp() / sums_2n[0] - 1.0
    return losses_n, log_z_n, (logits_nv, local_n, mine_n, error_n, factor_n, ignored_n, log_z_n)


def logits_gradient(
    kept: Kept, kernels: LossKernels, grad_n: torch.Tensor, grad_square_n: torch.Tensor | None
) -> torch.Tensor:
    """The logits' gradient [n, v/t], in their memory, from those of losses and of squares of log Z: p - 1 at the
    target and p elsewhere of the loss, 2 log(Z) p of the square."""
    logits_nv, local_n, mine_n, error_n, factor_n, ignored_n, log_z_n = kept
    assert logits_nv is not None and local_n is not None and mine_n is not None
    assert error_n is not None and factor_n is not None and ignored_n is not None
    grad_nv = logits_nv.detach()  # whoever keeps the gradient must not keep the graph that the logits came from
    grad_n = grad_n.masked_fill(ignored_n, 0.0)
    every_n, target_n = grad_n, grad_n * error_n
    if log_z_n is not None and grad_square_n is not None:  # zero where there is no target
        of_square_n = 2.0 * log_z_n * grad_square_n
        every_n, target_n = grad_n + of_square_n, target_n + of_square_n * (error_n + 1.0)
    # In fp32 and rounded once: the scale is the same for all tokens, and so would be its rounding error in 16 bits.
    scaled = kernels.scaled if grad_nv.dtype != factor_n.dtype else _scaled_rows
    scaled(grad_nv, every_n * factor_n)
    targets_n = target_n.unsqueeze(1).to(grad_nv.dtype)
    return grad_nv.scatter_(1, local_n, torch.where(mine_n.unsqueeze(1), targets_n, grad_nv.gather(1, local_n)))


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_nv: torch.Tensor,
        targets_n: torch.Tensor,
        vocabulary_size: int,
        comm: Comm,
        with_squares: bool,
        kernels: LossKernels,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        keeps = ctx.needs_input_grad[0]
        losses_n, log_z_n, kept = token_losses(
            logits_nv, targets_n, vocabulary_size, comm, with_squares, kernels, keeps
        )
        if keeps:
            ctx.kernels = kernels
            ctx.save_for_backward(*kept)
        return losses_n, None if log_z_n is None else log_z_n.square()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        return logits_gradient(ctx.saved_tensors, ctx.kernels, *grads), None, None, None, None, None


def _sums_of_exponentials(
    logits_nv: torch.Tensor, own_largest_n: torch.Tensor, largest_n: torch.Tensor, real: int, kernels: LossKernels
) -> torch.Tensor:
    """This rank's part of each token's sum of exponentials, relative to the largest. fp32 logits become this rank's own
    softmax, by torch's fused kernel."""
    if logits_nv.dtype == largest_n.dtype:
        if real == 0:
            logits_nv.zero_()
            return torch.zeros_like(largest_n)
        torch.softmax(logits_nv, 1, out=logits_nv)
        # The largest logit's exponential is 1 before a softmax divides it by the sum.
        return (own_largest_n - largest_n).exp_().div_(logits_nv.amax(1))
    return kernels.sums(logits_nv, largest_n)


def _unscaled_probabilities(
    logits_nv: torch.Tensor, largest_n: torch.Tensor, own_n: torch.Tensor, sums_n: torch.Tensor, kernels: LossKernels
) -> torch.Tensor:
    """Turn 16-bit logits into the probabilities up to a factor [n], which is returned; fp32 ones already are that."""
    if logits_nv.dtype == largest_n.dtype:
        return own_n / sums_n
    bits = FP16_BITS if logits_nv.dtype == torch.float16 else 0
    kernels.exponentials(logits_nv, sums_n.log() + largest_n - bits * math.log(2.0))
    return torch.full_like(sums_n, 2.0**-bits)


def _sums_by_blocks(logits_nv: torch.Tensor, less_n: torch.Tensor) -> torch.Tensor:
    sums_n = torch.empty_like(less_n)
    for rows in _blocks(logits_nv):
        sums_n[rows] = logits_nv[rows].to(less_n.dtype).sub_(less_n[rows].unsqueeze(1)).exp_().sum(1)
    return sums_n


def _exponentials_by_blocks(logits_nv: torch.Tensor, less_n: torch.Tensor) -> None:
    for rows in _blocks(logits_nv):
        logits_nv[rows] = logits_nv[rows].to(less_n.dtype).sub_(less_n[rows].unsqueeze(1)).exp_()


def _blocks(logits_nv: torch.Tensor) -> Iterator[slice]:
    rows = max(BLOCK_ROWS, BLOCK_ELEMENTS // logits_nv.shape[1]) if logits_nv.is_cuda else BLOCK_ROWS
    for first in range(0, len(logits_nv), rows):
        yield slice(first, first + rows)


def _scaled_rows(grad_nv: torch.Tensor, factor_n: torch.Tensor) -> None:
    grad_nv.mul_(factor_n.unsqueeze(1))


BY_BLOCKS = LossKernels(_sums_by_blocks, _exponentials_by_blocks, _scaled_rows)
"""Kernels made of separate torch operators."""


def _full_sums(logits_nv: torch.Tensor, less_n: torch.Tensor) -> torch.Tensor:
    return (logits_nv.to(less_n.dtype) - less_n.unsqueeze(1)).exp().sum(1)


def _full_exponentials(logits_nv: torch.Tensor, less_n: torch.Tensor) -> None:
    logits_nv.copy_((logits_nv.to(less_n.dtype) - less_n.unsqueeze(1)).exp())


def _full_scaled(grad_nv: torch.Tensor, factor_n: torch.Tensor) -> None:
    grad_nv.copy_(grad_nv.to(factor_n.dtype) * factor_n.unsqueeze(1))


@cache
def compiled_kernels() -> LossKernels:
    """Kernels made by torch.compile: each logit is read once, and nothing is stored in between. Sums are rounded
    differently from those by blocks."""
    return LossKernels(
        torch.compile(_full_sums, dynamic=True),
        torch.compile(_full_exponentials, dynamic=True),
        torch.compile(_full_scaled, dynamic=True),
    )


def vocabulary_parallel_cross_entropy(
    logits_nv: torch.Tensor, targets_n: torch.Tensor, vocabulary_size: int, comm: Comm, kernels: LossKernels = BY_BLOCKS
) -> torch.Tensor:
    """Loss of each token, in nats: logits [n, v/t], targets [n] -> [n], the same on every tensor rank.

    Overwrites the logits. `vocabulary_size` is the number of real token ids; columns past it are padding. A negative
    target has no loss.
    """
    return _VocabularyParallelCrossEntropy.apply(logits_nv, targets_n, vocabulary_size, comm, False, kernels)[0]


def cross_entropy_and_log_z(
    logits_nv: torch.Tensor, targets_n: torch.Tensor, vocabulary_size: int, comm: Comm, kernels: LossKernels = BY_BLOCKS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token as from `vocabulary_parallel_cross_entropy`, and the square of each token's log Z [n], the
    natural logarithm of its sum of exponentials; 0 if there is no target. Both have gradients. Keeps one more number
    per token for backward."""
    return _VocabularyParallelCrossEntropy.apply(logits_nv, targets_n, vocabulary_size, comm, True, kernels)


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
    """Output layer and cross-entropy of a few tokens at a time, so that the logits of a whole micro-batch are never in
    memory, nor their gradient. The computation is that of the two layers, with the same bits for a micro-batch with at
    most as many tokens as are processed at once.

    In training all of it runs in the backward pass, forward and gradients of a few tokens together: nothing is computed
    twice, no logits are stored, and the weight's gradient is added at the point of the schedule where a backward adds
    the gradients of its micro-batch. Schedules that defer products for weights do not defer this one, which would have
    to keep logits.
    """

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
        gathered = gather(x, region)
        x_nh = gathered.reshape(-1, gathered.shape[-1])
        wide = torch.float32 if x.element_size() < 4 else x.dtype
        results_2n = torch.empty(2 if z_weight else 1, len(x_nh), dtype=wide, device=x.device)
        grad = torch.empty_like(gathered) if gradients is not None and gradients.of_input else None
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
        """Slices of tokens that are processed at once, and whether each is the last; one even if there are none."""
        for first in range(0, max(count, 1), self.at_once):
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
