"""Clipping by the global gradient norm (Pascanu et al., arXiv:1211.5063, section 3.2), and the decision whether a step
updates anything. All of it stays on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.parallel.data.agreement import Agreement


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
    """Gradients longer than `clip_norm` are scaled down to it (0: none are). `limits`: loss per token and gradient norm
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
