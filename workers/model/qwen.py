"""Qwen 3 (arXiv:2505.09388, section 2): Llama's parts, with an RMS norm of each head's queries and keys."""

from __future__ import annotations

from manta.workers.model.attention import Attention
from manta.workers.model.layer import Layer
from manta.workers.model.llama import embedding, mlp, norm
from manta.workers.model.shared import Shared
from manta.workers.parallel.tensor.rms_norm import RMSNorm

__all__ = ["embedding", "layer", "norm"]


def layer(shared: Shared, index: int) -> Layer:
    """Layer `index` of the model."""
    model = shared.spec.model
    # Each tensor rank norms heads of its own with the whole weight.
    head_norms = tuple(RMSNorm(model.head_size, model.norm_epsilon, partial=True) for _ in range(2))
    attention = Attention(shared, index, rotary=shared.rotary, head_norms=(head_norms[0], head_norms[1]))
    return Layer(shared, index, attention, mlp(shared, index), (norm(model), norm(model)))
