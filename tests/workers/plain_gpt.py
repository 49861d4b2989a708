"""A GPT as one would write it on a single machine, from torch's own parts: what the engine is measured against.

Nothing of the engine is used. Only the parameters' names, and the order of rows in the fused projection (head, q/k/v,
d), are the engine's, so that weights can be carried over. Shapes: b batch, s sequence, h hidden, a heads, d head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from workers.config import JobSpec


class PlainAttention(nn.Module):
    """Masked softmax, written out."""

    def __init__(self, hidden: int, heads: int, bias: bool):
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.output = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> the same."""
        b, s, h = x.shape
        qkv = self.qkv(x).view(b, s, self.heads, 3, self.size)
        q, k, v = qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2]
        scores = torch.einsum("bqad,bkad->baqk", q, k) / math.sqrt(self.size)
        future = torch.ones(s, s, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.output(torch.einsum("baqk,bkad->bqad", weights, v).reshape(b, s, h))


class PlainMLP(nn.Module):
    """Two layers and a GELU."""

    def __init__(self, hidden: int, inner: int, bias: bool):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner, bias=bias), nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> the same."""
        return self.down(F.gelu(self.up(x)))


class PlainLayer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int, inner: int, bias: bool):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, bias=bias)
        self.attention = PlainAttention(hidden, heads, bias)
        self.mlp_norm = nn.LayerNorm(hidden, bias=bias)
        self.mlp = PlainMLP(hidden, inner, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainEmbedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, vocabulary: int, length: int, hidden: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s, h]."""
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1]))


class PlainGPT(nn.Module):
    """The whole model of a spec."""

    def __init__(self, spec: JobSpec):
        super().__init__()
        model = spec.model
        hidden, inner = model.hidden_size, model.ffn_hidden_size or 4 * model.hidden_size
        self.embedding = PlainEmbedding(spec.vocabulary_size, model.sequence_length, hidden)
        self.layers = nn.ModuleList(PlainLayer(hidden, model.heads, inner, model.bias) for _ in range(model.layers))
        self.final_norm = nn.LayerNorm(hidden, bias=model.bias)
        self.output = nn.Linear(hidden, spec.vocabulary_size, bias=False)
        if model.tie_embeddings:
            self.output.weight = self.embedding.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits: [b, s] -> [b, s, v]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.final_norm(x))

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean loss of windows [b, s + 1] in nats a token."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def load(self, weights: dict[str, torch.Tensor]) -> PlainGPT:
        """Take `weights` by name; every parameter must be there."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])
        return self


def random_weights(spec: JobSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by name (fp64, exact in fp32) in which nothing is zero or one, so that no term of a gradient hides."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in PlainGPT(spec).named_parameters():
        middle = 1.0 if "norm.weight" in name else 0.0
        values = torch.empty(parameter.shape).normal_(middle, 0.2, generator=generator)
        weights[name] = values.double()
    return weights
