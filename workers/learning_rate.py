"""Learning rate by step. Pure Python."""

from __future__ import annotations

import math

from workers.config import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step `step` (1 to `steps`): linear warm-up, then cosine decay to min_learning_rate at the
    last step (Loshchilov & Hutter, arXiv:1608.03983, eq. 5, one period)."""
    warmup = optimizer.warmup_steps
    if step <= warmup:
        return optimizer.learning_rate * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    low, high = optimizer.min_learning_rate, optimizer.learning_rate
    return low + 0.5 * (high - low) * (1.0 + math.cos(math.pi * progress))
