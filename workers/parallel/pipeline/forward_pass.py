"""What the pipeline tells the model about one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ForwardPass:
    """What a stage needs to know about one micro-batch beside its input."""

    keys_b: torch.Tensor | None = None
    """Dropout keys of the samples (workers/parallel/tensor/dropout.py); None: no dropout."""
    recompute: frozenset[str] = frozenset()
    """Modules that are recomputed in backward: core_attention, norm, mlp_activation."""
    recompute_layers: int = 0
    """k: every k-th layer is recomputed as a whole; 0: none is."""
    batch_first: bool = False
    """Whether the residual stream is [b, s, h]: then attention finds the tokens of a sample side by side."""
