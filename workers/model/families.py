"""The module with the parts of each family."""

from __future__ import annotations

from workers.config import ModelConfig
from workers.model import gpt, llama, qwen
from workers.model.custom import custom_parts
from workers.model.parts import Parts

_FILES: dict[str, Parts] = {"gpt": gpt, "llama": llama, "qwen": qwen}


def parts_of(model: ModelConfig) -> Parts:
    """The parts of the model's family, or of a custom model. Raises ModelError."""
    return custom_parts(model) if model.entrypoint is not None else _FILES[model.family]
