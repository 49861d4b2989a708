"""The interface of a model family, built-in or custom."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from workers.config import ModelConfig
from workers.model.layer import Embedding
from workers.model.shared import Shared


class Parts(Protocol):
    """The functions that the file of a family provides."""

    def embedding(self, shared: Shared) -> Embedding:
        """Tokens [s, b] -> the residual stream."""
        ...

    def layer(self, shared: Shared, index: int) -> nn.Module:
        """Layer `index` of the model: (residual stream, ForwardPass) -> residual stream."""
        ...

    def norm(self, model: ModelConfig) -> nn.Module:
        """The final norm."""
        ...
