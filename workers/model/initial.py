"""Standard deviations of initial weights, for all families."""

from __future__ import annotations

import math

from manta.workers.config import ModelConfig

INIT_STD = 0.02


def residual_std(model: ModelConfig) -> float:
    """Scaled initialisation of layers that write into the residual stream: std / sqrt(2 L) (Radford et al. 2019)."""
    return INIT_STD / math.sqrt(2 * model.layers)
