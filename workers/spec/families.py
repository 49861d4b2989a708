"""What arithmetic and rules need to know about a model family. Pure Python; the modules themselves: workers/model/."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """How the layers of a family differ from those of the others."""

    gated_mlp: bool
    """SwiGLU: an MLP of three matrices (Shazeer 2020, arXiv:2002.05202); else of two, with GELU between them."""
    rms_norm: bool
    """Norms that only scale (Zhang & Sennrich 2019, arXiv:1910.07467); else layer norms."""
    rotary: bool
    """Queries and keys are turned by their positions (Su et al. 2021, arXiv:2104.09864); else positions are learned."""
    query_key_norm: bool
    """Queries and keys are normed, each head by itself (Henry et al. 2020, arXiv:2010.04245)."""
    bias: bool
    """Whether linear layers, and layer norms, have biases where the spec does not say."""
    tie_embeddings: bool
    """Whether the output layer shares the token embedding's weight where the spec does not say."""


FAMILIES = {
    "gpt": Family(gated_mlp=False, rms_norm=False, rotary=False, query_key_norm=False, bias=True, tie_embeddings=True),
    "llama": Family(gated_mlp=True, rms_norm=True, rotary=True, query_key_norm=False, bias=False, tie_embeddings=False),
    "qwen": Family(gated_mlp=True, rms_norm=True, rotary=True, query_key_norm=True, bias=False, tie_embeddings=False),
    # What a user's model may use of ours; what its layers consist of is not known.
    "custom": Family(
        gated_mlp=False, rms_norm=False, rotary=True, query_key_norm=False, bias=False, tie_embeddings=False
    ),
}
"""Those that are built, by `model.family`."""
