"""A GPT and its training loop as one writes them for a single device: what the engine is measured against.

Everything is torch's own. Only the names of parameters, and the order of rows in the fused projection (head, q/k/v,
d), are the engine's, so that initial weights can be copied. Shapes: b batch, s sequence, h hidden, v vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from manta.workers.config import JobSpec, ModelConfig
from manta.workers.data.batches import MicroBatch


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.heads, self.size = model.heads, model.head_size
        self.qkv = nn.Linear(model.hidden_size, 3 * model.hidden_size, bias=model.bias)
        self.output = nn.Linear(model.hidden_size, model.hidden_size, bias=model.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> the same."""
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, self.heads, 3, self.size).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(b, s, h))


class MLP(nn.Module):
    """Two layers and a GELU."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.up = nn.Linear(model.hidden_size, model.ffn_size, bias=model.bias)
        self.down = nn.Linear(model.ffn_size, model.hidden_size, bias=model.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> the same."""
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.hidden_size, bias=model.bias)
        self.attention = Attention(model)
        self.mlp_norm = nn.LayerNorm(model.hidden_size, bias=model.bias)
        self.mlp = MLP(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(self, spec: JobSpec):
        super().__init__()
        self.token = nn.Embedding(spec.vocabulary_size, spec.model.hidden_size)
        self.position = nn.Embedding(spec.model.sequence_length, spec.model.hidden_size)

    def forward(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s, h]."""
        return self.token(tokens_bs) + self.position(torch.arange(tokens_bs.shape[1]))


class PlainGPT(nn.Module):
    """The whole model of a spec, embeddings tied."""

    def __init__(self, spec: JobSpec):
        super().__init__()
        model = spec.model
        self.embedding = Embedding(spec)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.final_norm = nn.LayerNorm(model.hidden_size, bias=model.bias)
        self.output = nn.Linear(model.hidden_size, spec.vocabulary_size, bias=False)
        self.output.weight = self.embedding.token.weight

    def forward(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        """Logits: [b, s] -> [b, s, v]."""
        x = self.embedding(tokens_bs)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.final_norm(x))


class PlainLoop:
    """Model and optimizer; `step` is one iteration."""

    def __init__(self, spec: JobSpec, weights: dict[str, torch.Tensor], fused: bool = False):
        """`weights`: initial values of all parameters by name. `fused`: AdamW in one kernel."""
        self.model, self.clip = PlainGPT(spec), spec.train.optimizer.clip_norm
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        config = spec.train.optimizer
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=fused,
        )

    def step(self, batch: MicroBatch, learning_rate: float) -> float:
        """One iteration on one batch; its loss in nats a token."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        assert batch.inputs_sb is not None and batch.targets_sb is not None
        logits = self.model(batch.inputs_sb.t())
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_sb.t().flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()
