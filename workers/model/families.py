"""Which file has the parts of which family."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from workers.config import ModelConfig
from workers.model import gpt, llama, qwen
from workers.model.layer import Embedding, Layer
from workers.model.shared import Shared


class Parts(Protocol):
    """What the file of a family offers."""

    def embedding(self, shared: Shared) -> Embedding:
        """Tokens [s, b] -> the residual stream."""
        ...

    def layer(self, shared: Shared, index: int) -> Layer:
        """Layer `index` of the model."""
        ...

    def norm(self, model: ModelConfig) -> nn.Module:
        """The final norm."""
        ...


_FILES: dict[str, Parts] = {"gpt": gpt, "llama": llama, "qwen": qwen}


def parts_of(model: ModelConfig) -> Parts:
    """Those of the model's family."""
    return _FILES[model.family]
