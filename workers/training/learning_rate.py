"""Learning rate by step: a pure function of the job's spec and the step, so a job that is resumed, resized or rolled
back continues with the right rate. Pure Python."""

from __future__ import annotations

import math

from manta.workers.config import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step `step` (1 to `steps`): a linear warm-up from 0, then what `optimizer.schedule` says. With
    high and low for the largest and the smallest rate, w warm-up steps, n steps in all, d of decay:

    - cosine: low + (high - low) (1 + cos(pi p)) / 2 with p = (step - w) / (n - w) (arXiv:1608.03983, eq. 5, one period)
    - linear: high + (low - high) p
    - wsd: high until step n - d, then the decay (arXiv:2404.06395; arXiv:2405.18392) to low + (high - low) f
      with p = (step - n + d) / d, and f = 1 - p (linear), (1 + cos(pi p)) / 2 (cosine) or 1 - sqrt(p) (1-sqrt)
    - inverse-sqrt: high sqrt(w / step), as fairseq has it: arXiv:1706.03762, section 5.3, with `learning_rate` in place
      of its factor d_model^-0.5 w^-0.5; never below low
    - constant: high
    """
    warmup, high, low = optimizer.warmup_steps, optimizer.learning_rate, optimizer.min_learning_rate
    if step <= warmup:
        return high * step / warmup
    if optimizer.schedule == "constant":
        return high
    if optimizer.schedule == "inverse-sqrt":
        return max(low, high * math.sqrt(max(1, warmup) / step))
    begin, shape = warmup, str(optimizer.schedule)
    if shape == "wsd":
        begin, shape = steps - decay_steps(optimizer, steps), optimizer.decay_shape
        if step <= begin:
            return high
    return low + (high - low) * _left(shape, (step - begin) / max(1, steps - begin))


def decay_steps(optimizer: OptimizerConfig, steps: int) -> int:
    """Steps of the decay of schedule wsd in a job of `steps`: from the spec, or by default a tenth of the job, or less
    if the warm-up leaves less."""
    if optimizer.decay_steps is not None:
        return optimizer.decay_steps
    if optimizer.decay_fraction is not None:
        return max(1, round(steps * optimizer.decay_fraction))
    return min(max(1, round(steps / 10)), steps - optimizer.warmup_steps)


def _left(shape: str, progress: float) -> float:
    """Remaining part of the difference between the largest and the smallest rate; `progress`: 0 to 1."""
    if shape == "linear":
        return 1.0 - progress
    if shape == "1-sqrt":
        return 1.0 - math.sqrt(progress)
    return 0.5 * (1.0 + math.cos(math.pi * progress))
