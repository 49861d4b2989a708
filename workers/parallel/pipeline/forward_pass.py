"""Arguments that the pipeline passes to the model for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.data.packed_documents import Documents
from workers.parallel.recompute.policy import NOTHING, Recompute
from workers.parallel.tensor.key_value_cache import KeyValueCache


@dataclass(frozen=True)
class ForwardPass:
    """What a stage needs to know about one micro-batch besides its input."""

    keys_b: torch.Tensor | None = None
    """Dropout keys of the samples (workers/parallel/tensor/dropout.py); None: no dropout."""
    recompute: Recompute = NOTHING
    """What is dropped, and recomputed in backward."""
    batch_first: bool = False
    """Whether the residual stream is [b, s, h]: then attention finds the tokens of a sample side by side."""
    documents: Documents | None = None
    """Documents that attention stays within; None: it looks across."""
    cache: KeyValueCache | None = None
    """What the model has read before, where it continues with it; only where one rank has the whole model, and without
    gradients. Then there are logits of the last token alone."""
    logits: bool = True
    """Whether the output layer computes; without, the last stage gives what that is to take."""
