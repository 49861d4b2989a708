"""The models that are measured on one GPU, and tiny ones of the same kinds for a rehearsal on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Size:
    """A model and its micro-batch."""

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    micro_batch_size: int
    micro_batches: int = 1
    ffn_hidden_size: int | None = None
    vocabulary_size: int = 50304
    recompute: str = "none"
    family: str = "gpt"
    kv_heads: int | None = None

    def document(self, seed: int, compiled: bool, **sections: Any) -> dict[str, Any]:
        """The job of this model; `sections` are merged into its own."""
        keys = ("family", "layers", "hidden_size", "heads", "kv_heads", "sequence_length", "ffn_hidden_size")
        document: dict[str, Any] = {
            "model": {key: getattr(self, key) for key in (*keys, "vocabulary_size")},
            "data": {"source": "python-stdlib"},
            "train": {
                "steps": 1000,
                "global_batch_size": self.micro_batch_size * self.micro_batches,
                "micro_batch_size": self.micro_batch_size,
                "precision": "bf16",
                "compile": compiled,
                "seed": seed,
            },
            "parallel": {"recompute": self.recompute},
        }
        for name, section in sections.items():
            document[name] = {**document.get(name, {}), **section}
        return document


SIZES = {
    "gpt_125m": Size(12, 768, 12, 1024, micro_batch_size=32),
    "gpt_1b3": Size(24, 2048, 16, 2048, micro_batch_size=8),
    "llama_1b5": Size(
        24, 2048, 16, 2048, micro_batch_size=8, family="llama", kv_heads=8, ffn_hidden_size=7168, vocabulary_size=32000
    ),
    "llama_8b_wide": Size(
        8, 4096, 32, 4096, micro_batch_size=2, family="llama", kv_heads=8, ffn_hidden_size=14336, vocabulary_size=32768
    ),
}
"""An 8 billion one's layers are cut to fit."""
WIDE_VOCABULARY = Size(
    16, 2048, 32, 4096, micro_batch_size=2, micro_batches=2, family="llama", kv_heads=8, ffn_hidden_size=8192,
    vocabulary_size=128256,
)  # fmt: skip
"""Llama 3.2 1B, but for its tied embedding."""
PAIRED = Size(4, 512, 8, 256, micro_batch_size=4, micro_batches=4, vocabulary_size=8192)
"""Of the jobs of two ranks."""
CURVES = replace(
    SIZES["llama_1b5"],
    layers=8,
    hidden_size=1024,
    ffn_hidden_size=2816,
    sequence_length=1024,
    vocabulary_size=512,
    micro_batches=2,
)
"""Whose losses in 8 and in 16 bits are compared, on bytes."""


def tiny(size: Size) -> Size:
    """One of the same kind that a CPU trains in no time."""
    return replace(
        size,
        layers=2,
        hidden_size=64,
        heads=4,
        kv_heads=2 if size.kv_heads else None,
        ffn_hidden_size=160 if size.ffn_hidden_size else None,
        sequence_length=32,
        micro_batch_size=2,
        vocabulary_size=512,
    )
