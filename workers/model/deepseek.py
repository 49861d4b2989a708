"""DeepSeek V3 (arXiv:2412.19437, section 2.1): Llama's parts, with latent attention."""

from __future__ import annotations

from manta.workers.model.latent_attention import LatentAttention
from manta.workers.model.layer import Layer
from manta.workers.model.llama import embedding, mlp, norm
from manta.workers.model.shared import Shared

__all__ = ["embedding", "layer", "norm"]


def layer(shared: Shared, index: int) -> Layer:
    """Layer `index` of the model."""
    model = shared.spec.model
    assert shared.rotary is not None
    attention = LatentAttention(shared, index, shared.rotary)
    return Layer(shared, index, attention, mlp(shared, index), (norm(model), norm(model)))
