"""Arguments that the pipeline passes to the model for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.data.batches import Documents
from workers.parallel.recompute.policy import NOTHING, Recompute
from workers.parallel.tensor.key_value_cache import KeyValueCache


@dataclass(frozen=True)
class ForwardPass:
    """What a stage needs to know about one micro-batch besides its input."""

    keys_b: torch.Tensor | None = None
    """Dropout keys of the samples (workers/parallel/tensor/dropout.py); None: no dropout."""
    recompute: Recompute = NOTHING
    """What is dropped in forward and recomputed in backward."""
    batch_first: bool = False
    """Whether the residual stream is [b, s, h], so that a sample's tokens are contiguous for attention."""
    documents: Documents | None = None
    """Documents that attention does not cross; None: it crosses them."""
    cache: KeyValueCache | None = None
    """Keys and values of the tokens read before, for generation; only if one rank has the whole model, and without
    gradients. Logits are then those of the last token only."""
    logits: bool = True
    """Whether the output layer computes; if not, the last stage returns that layer's input."""
