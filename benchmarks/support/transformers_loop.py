"""A causal language model of `transformers` and the loop that trains it, as one writes them for a single device: AdamW
of torch with weight decay on matrices, torch's clipping, a warm-up and a cosine, the mean of torch's cross-entropy.

Shapes: b batch, s sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from workers.config import OptimizerConfig


class TransformersLoop:
    """A model and its optimizer."""

    def __init__(self, model: Any, config: OptimizerConfig, steps: int):
        """`config`: numbers of the optimizer, whose schedule is a cosine over `steps` steps."""
        self.model, self._config, self._steps = model, config, steps
        parameters = list(model.parameters())
        groups = [
            {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon)
        self._step = 0

    def step(self, tokens_bs: torch.Tensor) -> float:
        """Learn the next token at each position of a batch; returns its mean loss in nats."""
        self._step += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        self._optimizer.zero_grad()
        loss = self._loss(tokens_bs, "mean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_norm)
        self._optimizer.step()
        return loss.item()

    def _rate(self) -> float:
        low, high, warmup = self._config.min_learning_rate, self._config.learning_rate, self._config.warmup_steps
        if self._step <= warmup:
            return high * self._step / warmup
        done = (self._step - warmup) / (self._steps - warmup)
        return low + (high - low) * (1.0 + math.cos(math.pi * done)) / 2

    def _loss(self, tokens_bs: torch.Tensor, reduction: str) -> torch.Tensor:
        logits_bsv = self.model(tokens_bs[:, :-1]).logits
        return F.cross_entropy(logits_bsv.flatten(0, 1), tokens_bs[:, 1:].flatten(), reduction=reduction)

    @torch.no_grad()
    def mean_loss(self, batches: Iterable[torch.Tensor]) -> float:
        """Over all positions of some batches of tokens [b, s + 1], in nats a token."""
        total, count = 0.0, 0
        for tokens_bs in batches:
            total += self._loss(tokens_bs, "sum").item()
            count += tokens_bs[:, 1:].numel()
        return total / count
