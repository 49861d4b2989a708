"""The parts of a model, by family: those of built-in families are functions of a module, those of a custom model come
from a function of an installed package (docs/custom_models.md), which is only imported where ranks run."""

from __future__ import annotations

import importlib
from typing import Protocol

from torch import nn

from manta.workers.config import ModelConfig
from manta.workers.errors import ModelError
from manta.workers.model import deepseek, gpt, llama, qwen
from manta.workers.model.layer import Embedding
from manta.workers.model.shared import Shared


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


_FILES: dict[str, Parts] = {"gpt": gpt, "llama": llama, "qwen": qwen, "deepseek": deepseek}


def parts_of(model: ModelConfig) -> Parts:
    """The parts of the model's family, or of a custom model. Raises ModelError."""
    return custom_parts(model) if model.entrypoint is not None else _FILES[model.family]


def custom_parts(model: ModelConfig) -> Parts:
    """The parts of a custom model. Raises ModelError with what is wrong with it."""
    assert model.entrypoint is not None
    module, _, name = model.entrypoint.partition(":")
    try:
        build = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ModelError(f"model.entrypoint {model.entrypoint} cannot be imported on this node: {error}") from error
    except AttributeError as error:
        raise ModelError(f"model.entrypoint {model.entrypoint}: {module} has no {name}") from error
    parts: Parts = build(model)
    missing = [each for each in ("embedding", "layer", "norm") if not callable(getattr(parts, each, None))]
    if missing:
        raise ModelError(f"what {model.entrypoint} returns has no {', '.join(missing)}: see docs/custom_models.md")
    return parts
