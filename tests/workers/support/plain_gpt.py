"""A GPT as one would write it on a single machine, from torch's own parts: what the engine is measured against.

Nothing of the engine is used. Only the parameters' names, and the order of rows in the fused projection (head, q/k/v,
d), are the engine's, so that weights can be carried over. With fewer key-value heads than heads there are two
projections, of rows (head, d) and (key-value head, k/v, d).

Shapes: b batch, s sequence, h hidden, a heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from manta.workers.config import JobSpec

NO_TARGET = -1

Drop = Callable[[torch.Tensor, int], torch.Tensor]
"""Dropout of a tensor at a place in the model: 0 the embedding, then three a layer: attention weights, the attention's
output, the MLP's output."""


def keep_all(x: torch.Tensor, place: int) -> torch.Tensor:
    """No dropout."""
    return x


class PlainAttention(nn.Module):
    """Masked softmax, written out."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        bias: bool,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, head_dim or hidden // heads
        self.window, width = window, heads * self.size
        self.document: torch.Tensor | None = None
        """[b, s], the number of each token's document, where attention stays within."""
        if self.kv_heads == heads:
            self.qkv = nn.Linear(hidden, 3 * width, bias=bias)
        else:
            self.q = nn.Linear(hidden, width, bias=bias)
            self.kv = nn.Linear(hidden, 2 * self.kv_heads * self.size, bias=bias)
        self.output = nn.Linear(width, hidden, bias=bias)

    def projections(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, [b, s, a, d] each: neighbouring heads may have the same k and v."""
        b, s, _ = x.shape
        if self.kv_heads == self.heads:
            qkv = self.qkv(x).view(b, s, self.heads, 3, self.size)
            return qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2]
        q = self.q(x).view(b, s, self.heads, self.size)
        kv = self.kv(x).view(b, s, self.kv_heads, 2, self.size)
        of_head = torch.arange(self.heads) // (self.heads // self.kv_heads)
        return q, kv[:, :, of_head, 0], kv[:, :, of_head, 1]

    def forward(self, x: torch.Tensor, drop: Drop = keep_all, place: int = 0) -> torch.Tensor:
        """[b, s, h] -> the same."""
        b, s, _ = x.shape
        q, k, v = self.projections(x)
        scores = torch.einsum("bqad,bkad->baqk", q, k) / math.sqrt(self.size)
        before = torch.arange(s)[:, None] - torch.arange(s)
        hidden = ((before < 0) | (before >= (self.window or s))).expand(b, 1, s, s)
        if self.document is not None:
            hidden = hidden | (self.document[:, None, :, None] != self.document[:, None, None, :])
        weights = drop(scores.masked_fill(hidden, float("-inf")).softmax(-1), place)
        return self.output(torch.einsum("baqk,bkad->bqad", weights, v).reshape(b, s, -1))


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

    def __init__(
        self, hidden: int, heads: int, inner: int, bias: bool, kv_heads: int | None = None, head_dim: int | None = None
    ):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, bias=bias)
        self.attention = PlainAttention(hidden, heads, bias, kv_heads, head_dim)
        self.mlp_norm = nn.LayerNorm(hidden, bias=bias)
        self.mlp = PlainMLP(hidden, inner, bias)

    def forward(self, x: torch.Tensor, drop: Drop = keep_all, index: int = 0) -> torch.Tensor:
        """[b, s, h] -> the same, as layer `index` of the model."""
        place = 1 + 3 * index
        x = x + drop(self.attention(self.attention_norm(x), drop, place), place + 1)
        return x + drop(self.mlp(self.mlp_norm(x)), place + 2)


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
        self.layers = nn.ModuleList(
            PlainLayer(hidden, model.heads, inner, model.bias, model.kv_heads, model.head_dim)
            for _ in range(model.layers)
        )
        self.final_norm = nn.LayerNorm(hidden, bias=model.bias)
        self.output = nn.Linear(hidden, spec.vocabulary_size, bias=False)
        if model.tie_embeddings:
            self.output.weight = self.embedding.token.weight

    def forward(self, tokens: torch.Tensor, drop: Drop = keep_all) -> torch.Tensor:
        """Logits: [b, s] -> [b, s, v]."""
        x = drop(self.embedding(tokens), 0)
        for index, layer in enumerate(self.layers):
            x = layer(x, drop, index)
        return self.output(self.final_norm(x))

    def loss(
        self,
        windows: torch.Tensor,
        drop: Drop = keep_all,
        end: int | None = None,
        chats: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Mean loss of windows [b, s + 1] in nats a token. Where a window holds NO_TARGET there is nothing to predict,
        and the model reads token 1. With `end`, documents that end with this token are apart. `chats`: which tokens are
        learned [b, s + 1], and the number of each one's conversation [b, s]."""
        tokens, targets = windows[:, :-1].abs(), windows[:, 1:]
        if end is not None:
            ends = tokens == end
            for layer in self.layers:
                layer.attention.document = ends.cumsum(1) - ends.long()
            targets = targets.masked_fill(ends, NO_TARGET)
        if chats is not None:
            for layer in self.layers:
                layer.attention.document = chats[1]
            targets = targets.masked_fill(~chats[0][:, 1:], NO_TARGET)
        logits = self(tokens, drop)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)

    @property
    def routers(self) -> list[nn.Module]:
        """The MLPs that are experts."""
        return [layer.mlp for layer in self.layers if hasattr(layer.mlp, "router")]

    def balance_loss(self) -> torch.Tensor:
        """The routers' own losses of the last batch, the mean over its sequences."""
        return sum((mlp.losses.mean() for mlp in self.routers), torch.zeros(()))

    def margin(self) -> float:
        """By how much at least a token of the last batch preferred the last expert that it chose to the next one."""
        return min((mlp.margin for mlp in self.routers), default=math.inf)

    def load(self, weights: dict[str, torch.Tensor]) -> PlainGPT:
        """Take `weights` by name; every parameter must be there."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])
        return self


class PlainStage(nn.Module):
    """Some consecutive layers of a PlainGPT, whose modules it shares, with the embedding before the first of all layers
    and the output behind the last one."""

    def __init__(self, whole: PlainGPT, layers: range):
        super().__init__()
        self.embedding = whole.embedding if layers.start == 0 else None
        self.layers = nn.ModuleList(whole.layers[index] for index in layers)
        at_the_end = layers.stop == len(whole.layers)
        self.final_norm = whole.final_norm if at_the_end else None
        self.output = whole.output if at_the_end else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [b, s] in the first stage, else [b, s, h]; logits [b, s, v] in the last stage, else [b, s, h]."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.output is None else self.output(self.final_norm(x))


def random_weights(
    spec: JobSpec, seed: int = 0, spread: float = 0.2, model: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """Weights by name (fp64, exact in fp32) in which nothing is zero or one, so that no term of a gradient hides, of
    `model` (default: the GPT of the spec)."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in (model or PlainGPT(spec)).named_parameters():
        middle = 1.0 if "norm.weight" in name else 0.0
        values = torch.empty(parameter.shape).normal_(middle, spread, generator=generator)
        weights[name] = values.double()
    return weights
