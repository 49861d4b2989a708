"""Keys and values of the tokens that a model has read, so that each further token costs one row.

Shapes: b sequences, s tokens, g key-value heads of this rank, d head size.
"""

from __future__ import annotations

import torch


class KeyValueCache:
    """Keys and values of all layers. `first` is the position of the next token to be read."""

    def __init__(self, length: int):
        """`length`: most tokens of a sequence."""
        self.length, self.first = length, 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def extended(self, layer: int, k_bsgd: torch.Tensor, v_bsgd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of the tokens that are read now; returns those of all tokens up to the last of them,
        [b, first + s, g, d]."""
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

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with only these sequences."""
        for stored in (self._keys, self._values):
            stored.update({layer: tensor[rows] for layer, tensor in stored.items()})
