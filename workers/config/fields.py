"""Types of the fields of all sections: bounded numbers, names, and strings with a special meaning."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PositiveFloat = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(ge=1e-30, strict=True, allow_inf_nan=False)]
"""A number that prevents a division by zero: the computation is in fp32, where anything much smaller is 0."""
NonNegativeFloat = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)]
StrictBool = Annotated[bool, Field(strict=True)]

# Far above anything trainable, and small enough for exact arithmetic everywhere: a larger value is a typing mistake.
Layers = Annotated[int, Field(gt=0, le=10_000, strict=True)]
Width = Annotated[int, Field(gt=0, le=1_000_000, strict=True)]
Heads = Annotated[int, Field(gt=0, le=100_000, strict=True)]
Length = Annotated[int, Field(gt=0, le=10_000_000, strict=True)]
Vocabulary = Annotated[int, Field(gt=0, le=100_000_000, strict=True)]
AxisSize = Annotated[int, Field(gt=0, le=100_000, strict=True)]
ACCELERATOR_TYPE = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
AcceleratorType = Annotated[str, Field(pattern=ACCELERATOR_TYPE)]
Chunks = Annotated[int, Field(gt=0, le=1024, strict=True)]
Batch = Annotated[int, Field(gt=0, le=100_000_000, strict=True)]
Steps = Annotated[int, Field(gt=0, le=1_000_000_000, strict=True)]
StepsOrNever = Annotated[int, Field(ge=0, le=1_000_000_000, strict=True)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
LABEL_KEY = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
LabelKey = Annotated[str, Field(max_length=317, pattern=LABEL_KEY)]
"""As in Kubernetes: at most 63 letters, digits, `-`, `_` and `.`, optionally after a domain name and a `/`."""
LABEL_VALUE = r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$"
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]
"""At most 63 letters, digits, `-`, `_` and `.`; the first and the last are letters or digits; may be empty."""
MAX_LABELS = 64
JOB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._ -]*$"
MAX_CHARACTERS_OF_A_NAME = 100
JobName = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS_OF_A_NAME, pattern=JOB_NAME)]
ENTRYPOINT = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
Priority = Annotated[int, Field(ge=-1000, le=1000, strict=True)]
Threads = Annotated[int, Field(gt=0, le=1024, strict=True)]

T = TypeVar("T")

BYTE_VOCABULARY = 256
TRAINED_VOCABULARY = 8192
"""Default number of token ids of a trained tokenizer."""
BUILT_IN_TOKENIZERS = ("bytes", "bpe")
"""Tokenizers that need no file."""
NO_TOKEN = "none"
CHATML = "chatml"
"""The built-in chat template."""
END_OF_TEXT = "<|endoftext|>"
MIN_WINDOW = 5
PART_OF_A_NAME = r"^[A-Za-z0-9_]+$"

RecomputeModule = Literal["core_attention", "norm", "mlp_activation"]
Accelerator = Literal["auto", "gpu", "cpu"]
LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]
ParameterGroup = Literal["linear", "embedding", "norm", "bias"]
Source = Literal["python-stdlib", "text", "jsonl", "parquet", "chat", "megatron"]


FalseAsOff = BeforeValidator(lambda value: "off" if value is False else value)
"""For a string that may be `off`, which YAML reads as false unless it is quoted."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, and values do not change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FixedMapping(dict[str, T]):
    """A mapping that is never modified, so that it can be hashed and specs can be compared by their hashes."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))
