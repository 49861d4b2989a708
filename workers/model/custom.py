"""Custom models: `model.entrypoint` is a function of an installed package that takes the ModelConfig and returns
`parts.Parts`. It is only imported where ranks run (docs/custom_models.md)."""

from __future__ import annotations

import importlib

from workers.config import ModelConfig
from workers.errors import ModelError
from workers.model.parts import Parts

OFFERED = ("embedding", "layer", "norm")


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
    missing = [each for each in OFFERED if not callable(getattr(parts, each, None))]
    if missing:
        raise ModelError(f"what {model.entrypoint} returns has no {', '.join(missing)}: see docs/custom_models.md")
    return parts
