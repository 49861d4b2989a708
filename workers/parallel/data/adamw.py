"""AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2) on flat ranges in fp32: decoupled weight decay; the
gradient is multiplied by a factor (clipping, the loss scale); nothing changes if the step is refused.

It runs either torch's fused kernel, with one pass before it to scale the gradient and one after it to round 16-bit
parameters, or a single pass compiled by torch.compile, which moves 30 bytes of a GPU's memory per element instead of
42.

Its moments are the running means of the gradient and of its square. Shapes: n elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.optim.adamw import adamw

from manta.workers.config import OptimizerConfig
from manta.workers.parallel.data.state import Groups


def update(groups: Groups, config: OptimizerConfig, learning_rate: float, refused: torch.Tensor) -> None:
    """One step by torch's fused kernel, for gradients that were multiplied by the factor. Does not round."""
    for decay, pieces in groups.items():
        adamw(
            [piece.values for piece in pieces],
            [piece.gradient for piece in pieces],
            [piece.moments[0] for piece in pieces],
            [piece.moments[1] for piece in pieces],
            [],
            [piece.steps for piece in pieces],
            fused=True,
            found_inf=refused.to(torch.float32),
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=learning_rate,
            weight_decay=decay,
            eps=config.epsilon,
            maximize=False,
        )


def update_in_one_pass(
    groups: Groups, config: OptimizerConfig, learning_rate: float, factor: torch.Tensor, refused: torch.Tensor
) -> None:
    """One step by the compiled kernel, which leaves the gradients as they are."""
    all_steps = [piece.steps for pieces in groups.values() for piece in pieces]
    for steps in all_steps:
        steps.add_(~refused)
    done = all_steps[0].double()
    scales = factor, learning_rate / (1.0 - config.beta1**done), (1.0 - config.beta2**done).rsqrt()
    run = compiled_pass(config.beta1, config.beta2, config.epsilon)
    for decay, pieces in groups.items():
        # Numbers that differ between calls are tensors: Python numbers would cause recompilation.
        exact = *scales, torch.full_like(done, 1.0 - learning_rate * decay)
        numbers = [number.to(pieces[0].values.dtype) for number in exact]
        for piece in pieces:
            run(piece.values, piece.gradient, *piece.moments, piece.rounded, *numbers, refused)


def one_pass(beta1: float, beta2: float, epsilon: float) -> Callable[..., None]:
    """The function that `compiled_pass` compiles."""

    def run(
        values_n: torch.Tensor,
        gradient_n: torch.Tensor,
        exp_avg_n: torch.Tensor,
        exp_avg_sq_n: torch.Tensor,
        rounded_n: torch.Tensor | None,
        factor: torch.Tensor,
        mean_scale: torch.Tensor,
        root_scale: torch.Tensor,
        decay_factor: torch.Tensor,
        refused: torch.Tensor,
    ) -> None:
        scaled_n = gradient_n * factor
        mean_n = exp_avg_n + (1.0 - beta1) * (scaled_n - exp_avg_n)
        square_n = beta2 * exp_avg_sq_n + (1.0 - beta2) * scaled_n * scaled_n
        moved_n = values_n * decay_factor - mean_scale * mean_n / (square_n.sqrt() * root_scale + epsilon)
        new_n = torch.where(refused, values_n, moved_n)
        exp_avg_n.copy_(torch.where(refused, exp_avg_n, mean_n))
        exp_avg_sq_n.copy_(torch.where(refused, exp_avg_sq_n, square_n))
        if rounded_n is not None:
            rounded_n.copy_(new_n)
        values_n.copy_(new_n)

    return run


@cache
def compiled_pass(beta1: float, beta2: float, epsilon: float) -> Callable[..., None]:
    """One kernel for pieces of all lengths: values, gradient, both moments [n] and the 16-bit values or None; then
    scalars of the values' dtype: the gradient's factor, the learning rate over the bias correction of the mean, one
    over the root of that of the square, the factor that weight decay leaves; and a bool that says that nothing
    changes."""
    compiled: Callable[..., None] = torch.compile(one_pass(beta1, beta2, epsilon), dynamic=True)
    return compiled
