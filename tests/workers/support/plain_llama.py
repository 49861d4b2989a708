"""A Llama, a Qwen 3, and a DeepSeek V3, as one would write them on a single machine, as `plain_gpt.py` has GPT.

Positions are turned as complex numbers, not as the engine does it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from plain_gpt import Drop, PlainAttention, PlainGPT, keep_all
from torch import nn

from manta.workers.config import JobSpec


class PlainRMSNorm(nn.Module):
    """x over its root mean square."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] -> the same."""
        return x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * self.weight


class PlainRotaryAttention(PlainAttention):
    """Queries and keys are turned, and before that, where `head_norm`, normed."""

    def __init__(self, spec: JobSpec, index: int):
        model = spec.model
        super().__init__(
            model.hidden_size, model.heads, model.bias, model.kv_heads, model.head_dim, window(spec, index)
        )
        self.theta = model.rope.theta if model.rope else 10_000.0
        self.q_norm = self.k_norm = nn.Identity()
        if model.family == "qwen":
            self.q_norm, self.k_norm = (PlainRMSNorm(self.size, model.norm_epsilon) for _ in range(2))

    def projections(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, [b, s, a, d] each."""
        q, k, v = super().projections(x)
        return self.turned(self.q_norm(q)), self.turned(self.k_norm(k)), v

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated by positions."""
        return turned(x, self.theta)


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Element i and element i + d/2 as one complex number, times exp(i position theta^(-2i/d)): [b, s, a, d]."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequencies
    numbers = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1).to(x.dtype)


class PlainLatentAttention(PlainAttention):
    """Queries, keys and values from short vectors, one head after the other (arXiv:2405.04434, eq. 9 to 19)."""

    def __init__(self, spec: JobSpec, index: int):
        nn.Module.__init__(self)
        model, shape = spec.model, spec.model.latent_attention
        assert shape is not None
        self.shape, self.theta = shape, model.rope.theta if model.rope else 10_000.0
        self.heads, self.window, self.document = model.heads, window(spec, index), None
        h, own = model.hidden_size, shape.nope_size + shape.rope_size
        self.size = own / model.score_factor**2  # what scores are divided by is its root
        if shape.q_rank is not None:
            self.q_down = nn.Linear(h, shape.q_rank, bias=False)
            self.q_norm = PlainRMSNorm(shape.q_rank, 1e-6)
        self.q_up = nn.Linear(shape.q_rank or h, self.heads * own, bias=False)
        self.kv_down = nn.Linear(h, shape.kv_rank + shape.rope_size, bias=False)
        self.kv_norm = PlainRMSNorm(shape.kv_rank, 1e-6)
        self.kv_up = nn.Linear(shape.kv_rank, self.heads * (shape.nope_size + shape.value_size), bias=False)
        self.output = nn.Linear(self.heads * shape.value_size, h, bias=False)

    def projections(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, [b, s, a, d] each."""
        shape = self.shape
        short, rotated = self.kv_down(x).split([shape.kv_rank, shape.rope_size], -1)
        rotated = turned(rotated.unsqueeze(2), self.theta)
        q = self.q_up(x if shape.q_rank is None else self.q_norm(self.q_down(x)))
        queries, keys, values = [], [], []
        for q_head, kv_head in zip(
            q.chunk(self.heads, -1), self.kv_up(self.kv_norm(short)).chunk(self.heads, -1), strict=True
        ):
            nope, rope = q_head.unsqueeze(2).split([shape.nope_size, shape.rope_size], -1)
            queries.append(torch.cat([nope, turned(rope, self.theta)], -1))
            key, value = kv_head.unsqueeze(2).split([shape.nope_size, shape.value_size], -1)
            keys.append(torch.cat([key, rotated], -1))
            values.append(value)
        return torch.cat(queries, 2), torch.cat(keys, 2), torch.cat(values, 2)


class PlainSwiGLU(nn.Module):
    """Three layers."""

    def __init__(self, hidden: int, inner: int, bias: bool):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inner, bias=bias), nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PlainExperts(nn.Module):
    """Every expert computes every token; those that a token has not chosen have no weight."""

    def __init__(self, spec: JobSpec):
        super().__init__()
        self.moe, h = spec.model.moe, spec.model.hidden_size
        self.router = nn.Linear(h, self.moe.experts, bias=False)
        self.experts = nn.ModuleList(PlainSwiGLU(h, self.moe.ffn_hidden_size, False) for _ in range(self.moe.experts))
        self.shared = PlainSwiGLU(h, self.moe.shared_size, False) if self.moe.shared else None
        self.shared_gate = nn.Linear(h, 1, bias=False) if self.moe.shared and self.moe.shared_gate else None
        self.bias = [0.0] * self.moe.experts
        self.margin = math.inf
        """Least distance of the last batch's scores of a token's last expert, or group, to the next one's."""
        self.losses = torch.zeros(0)
        """Of each sequence: weighted balance loss, and z-loss of the router."""
        self.counts: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> the same."""
        moe, logits, self.margin = self.moe, self.router(x), math.inf
        scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
        chosen = torch.tensor([[self.choice(token) for token in sequence] for sequence in scores.tolist()])
        weights = scores * chosen
        if moe.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        results = torch.stack([expert(x) for expert in self.experts], -1)
        y = moe.scale * (results * weights.unsqueeze(2)).sum(-1)
        if self.shared is not None:
            factor = 1.0 if self.shared_gate is None else self.shared_gate(x).sigmoid()
            y = y + factor * self.shared(x)
        self.counts = chosen.sum((0, 1)).tolist()
        often = chosen.sum(1) * moe.experts / (moe.per_token * x.shape[1])
        balance = (often * (scores / scores.sum(-1, keepdim=True)).mean(1)).sum(-1)
        weight = moe.balance.weight if moe.balance.loss == "sequence" else 0.0
        self.losses = weight * balance + moe.router_z_loss * logits.exp().sum(-1).log().square().mean(1)
        return y

    def choice(self, scores: list[float]) -> list[bool]:
        """Which experts a token chooses."""
        moe, size = self.moe, self.moe.experts // self.moe.groups
        biased = [score + bias for score, bias in zip(scores, self.bias, strict=True)]
        groups = [sum(sorted(biased[first : first + size])[-2:]) for first in range(0, moe.experts, size)]
        best = self.best(groups, moe.groups_per_token)
        within = [score if number // size in best else -math.inf for number, score in enumerate(biased)]
        chosen = self.best(within, moe.per_token)
        return [number in chosen for number in range(moe.experts)]

    def best(self, scores: list[float], count: int) -> list[int]:
        """The numbers of the highest ones, of equal ones the first."""
        order = sorted(range(len(scores)), key=lambda number: -scores[number])
        if count < len(scores):
            self.margin = min(self.margin, scores[order[count - 1]] - scores[order[count]])
        return order[:count]


class PlainLlamaLayer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, spec: JobSpec, index: int):
        super().__init__()
        model = spec.model
        self.attention_norm = PlainRMSNorm(model.hidden_size, model.norm_epsilon)
        self.attention = (PlainRotaryAttention if model.family != "deepseek" else PlainLatentAttention)(spec, index)
        self.mlp_norm = PlainRMSNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = PlainSwiGLU(model.hidden_size, model.ffn_size, model.bias)
        if model.has_experts(index):
            self.mlp = PlainExperts(spec)

    def forward(self, x: torch.Tensor, drop: Drop = keep_all, index: int = 0) -> torch.Tensor:
        """[b, s, h] -> the same, as layer `index` of the model."""
        place = 1 + 3 * index
        x = x + drop(self.attention(self.attention_norm(x), drop, place), place + 1)
        return x + drop(self.mlp(self.mlp_norm(x)), place + 2)


class PlainTokens(nn.Module):
    """Tokens without positions."""

    def __init__(self, vocabulary: int, hidden: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s, h]."""
        return self.token(tokens)


class PlainLlama(PlainGPT):
    """The whole model of a spec."""

    def __init__(self, spec: JobSpec):
        nn.Module.__init__(self)
        model = spec.model
        self.embedding = PlainTokens(spec.vocabulary_size, model.hidden_size)
        self.layers = nn.ModuleList(PlainLlamaLayer(spec, index) for index in range(model.layers))
        self.final_norm = PlainRMSNorm(model.hidden_size, model.norm_epsilon)
        self.output = nn.Linear(model.hidden_size, spec.vocabulary_size, bias=False)
        if model.tie_embeddings:
            self.output.weight = self.embedding.token.weight


def window(spec: JobSpec, index: int) -> int | None:
    """Tokens that a token of layer `index` attends to."""
    model, every = spec.model, spec.model.full_attention_every
    return None if every is not None and index % every == every - 1 else model.sliding_window


def plain_model(spec: JobSpec) -> PlainGPT:
    """That of the spec's family."""
    if spec.model.family != "gpt":
        return PlainLlama(spec)
    model = PlainGPT(spec)
    for index, layer in enumerate(model.layers):
        layer.attention.window = window(spec, index)
    return model
