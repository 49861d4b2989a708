"""How the next token is chosen. Shapes: b sequences, v vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits."""

    temperature: float = 0.0
    """Divisor of the logits; 0: always the most likely token."""
    top_k: int = 0
    """Draw from this many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens that together have this probability (nucleus sampling,
    arXiv:1904.09751)."""
    seed: int = 0
    """Seed of the draws; the same seed gives the same text, whatever else is in the batch."""


class Sampler:
    """Draws for some sequences, each with its own generator."""

    def __init__(self, sampling: Sampling, sequences: range):
        """`sequences`: their numbers among all requested ones, on which their draws depend."""
        self._sampling = sampling
        seeds = [(sampling.seed * 1_000_003 + n) % 2**64 for n in sequences]
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, logits_bv: torch.Tensor, wanted: Sequence[bool]) -> list[int | None]:
        """A token for each sequence that is `wanted`: a generator advances only when its sequence does."""
        if self._sampling.temperature == 0.0:
            rows = logits_bv.argmax(-1, keepdim=True).tolist()
        else:
            probabilities = self._probabilities(logits_bv).double().cpu()
            both = zip(probabilities, self._generators, wanted, strict=True)
            rows = [torch.multinomial(row, 1, generator=each).tolist() if want else [0] for row, each, want in both]
        return [row[0] if want else None for row, want in zip(rows, wanted, strict=True)]

    def _probabilities(self, logits_bv: torch.Tensor) -> torch.Tensor:
        scaled = logits_bv / self._sampling.temperature
        in_order, tokens = scaled.sort(-1, descending=True)
        probabilities = in_order.softmax(-1)
        left_out = probabilities.cumsum(-1) - probabilities >= self._sampling.top_p
        if self._sampling.top_k:
            left_out[:, self._sampling.top_k :] = True
        left_out[:, 0] = False
        kept = probabilities.masked_fill(left_out, 0.0)
        kept /= kept.sum(-1, keepdim=True)
        return torch.zeros_like(kept).scatter_(-1, tokens, kept)
