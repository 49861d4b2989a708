"""The properties of model families that the rules and the estimates of size and time need. Pure Python; the modules are
in workers/model/."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Properties of a family's layers."""

    gated_mlp: bool
    """SwiGLU: an MLP with three matrices (Shazeer 2020, arXiv:2002.05202); otherwise two, with GELU in between."""
    rms_norm: bool
    """RMS norms, which only scale (Zhang & Sennrich 2019, arXiv:1910.07467); otherwise layer norms."""
    rotary: bool
    """Queries and keys are rotated by their positions (Su et al. 2021, arXiv:2104.09864); otherwise positions are
    learned."""
    query_key_norm: bool
    """Queries and keys are normalized per head (Henry et al. 2020, arXiv:2010.04245)."""
    bias: bool
    """Default for biases of linear layers and layer norms."""
    tie_embeddings: bool
    """Default for sharing the token embedding's weight with the output layer."""


FAMILIES = {
    "gpt": Family(gated_mlp=False, rms_norm=False, rotary=False, query_key_norm=False, bias=True, tie_embeddings=True),
    "llama": Family(gated_mlp=True, rms_norm=True, rotary=True, query_key_norm=False, bias=False, tie_embeddings=False),
    "qwen": Family(gated_mlp=True, rms_norm=True, rotary=True, query_key_norm=True, bias=False, tie_embeddings=False),
    # The parts that a custom model may use; its layers are unknown.
    "custom": Family(
        gated_mlp=False, rms_norm=False, rotary=True, query_key_norm=False, bias=False, tie_embeddings=False
    ),
}
"""Supported families, by `model.family`."""
