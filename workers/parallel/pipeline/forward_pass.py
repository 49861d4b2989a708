"""Arguments that the pipeline, or generation, passes to the model for one micro-batch.

Shapes: b sequences, s tokens, g key-value heads of this rank, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.workers.data.batches import Documents
from manta.workers.parallel.experts.choice import MicroBatchRouting
from manta.workers.parallel.recompute import NOTHING, Recompute
from manta.workers.parallel.tensor.adapters import InputDropout
from manta.workers.parallel.tensor.positions import Positions


class KeyValueCache:
    """Keys and values of all layers. `first` is the position of the next token to be read."""

    def __init__(self, length: int):
        """`length`: most tokens of a sequence."""
        self.length, self.first = length, 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def extended(self, layer: int, k_bsgd: torch.Tensor, v_bsgd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of the tokens read now; returns those of all tokens so far, [b, first + s, g, d]."""
        batch, count, *rest = k_bsgd.shape
        if layer not in self._keys:
            self._keys[layer] = k_bsgd.new_empty(batch, self.length, *rest)
            self._values[layer] = v_bsgd.new_empty(batch, self.length, *rest)
        end = self.first + count
        self._keys[layer][:, self.first : end] = k_bsgd
        self._values[layer][:, self.first : end] = v_bsgd
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def advance(self, count: int) -> None:
        """All layers have read `count` tokens."""
        self.first += count


@dataclass(frozen=True)
class ForwardPass:
    """What a stage needs to know about one micro-batch besides its input."""

    positions: Positions
    """Positions of the tokens in the sequence, of all tensor ranks together."""
    keys_b: torch.Tensor | None = None
    """Dropout keys of the samples (workers/parallel/tensor/dropout.py); None: no dropout of the model."""
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
    adapter_keys_b: torch.Tensor | None = None
    """Dropout keys of the samples for inputs of adapters; None: no dropout of these."""
    routing: MicroBatchRouting | None = None
    """Where layers with experts keep what tokens have chosen, and count it; None: nowhere, without gradients."""

    most_samples: int = 0
    """With expert parallelism, samples of this micro-batch on the rank of the expert-parallel group that has most."""

    @property
    def adapter_dropout(self) -> InputDropout | None:
        """Dropout of the inputs of adapters."""
        keys_b = self.adapter_keys_b
        return None if keys_b is None else InputDropout(keys_b, self.positions, self.batch_first)
