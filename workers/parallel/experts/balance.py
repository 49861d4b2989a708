"""Losses that keep a router's work spread evenly, and their gradients.

The balance loss of a sequence of T tokens is the sum over experts of f P (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20):
f is E/(k T) times the number of tokens that have chosen the expert, P the mean over tokens of its score, divided by the
sum of the token's scores. The gradient passes through P alone. The router's z-loss is log(sum of exp)^2 of its outputs,
the mean over tokens (arXiv:2202.08906, eq. 5). Both depend neither on the layout nor on micro-batches: with context
parallelism f counts the whole sequence, and each rank adds its own tokens' part of P.

Shapes: n = s b tokens, b sequences, E experts, k experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from manta.workers.config import ModelConfig, MoeConfig


class TokenOrder(NamedTuple):
    """How the tokens of a micro-batch lie in memory."""

    shape: tuple[int, int]
    """(s, b), or (b, s)."""
    position_dim: int
    """Which of them is s."""

    @property
    def length(self) -> int:
        """Tokens of a sequence that this rank has (s)."""
        return self.shape[self.position_dim]

    @property
    def sequences(self) -> int:
        """Number of sequences (b)."""
        return self.shape[1 - self.position_dim]


class RouterOutputs(NamedTuple):
    """What a router makes of the tokens of a micro-batch."""

    logits_ne: torch.Tensor
    scores_ne: torch.Tensor
    order: TokenOrder


def has_losses(model: ModelConfig) -> bool:
    """Whether the router's outputs have a loss of their own."""
    moe = model.moe
    return moe is not None and (counts_sequences(moe) or moe.router_z_loss > 0)


def counts_sequences(moe: MoeConfig) -> bool:
    """Whether there is a balance loss, for which each sequence's choices are counted."""
    return moe.balance.loss == "sequence" and moe.balance.weight > 0


class RouterLosses:
    """The losses of one layer's router."""

    def __init__(self, model: ModelConfig):
        assert model.moe is not None
        self._moe, self._length = model.moe, model.sequence_length

    def value(self, router: RouterOutputs, counts_be: torch.Tensor | None) -> torch.Tensor:
        """The weighted sum of the losses over the sequences of a micro-batch, of this rank's tokens, scalar."""
        (logits_ne, scores_ne, order), moe = router, self._moe
        total = logits_ne.new_zeros(())
        if counts_be is not None:
            shares = scores_ne if moe.score == "softmax" else scores_ne / scores_ne.sum(-1, keepdim=True)
            by_sequence = shares.unflatten(0, order.shape).sum(order.position_dim)
            total = total + (self._factors(counts_be, shares.dtype) * by_sequence).sum()
        if moe.router_z_loss:
            total = total + moe.router_z_loss / self._length * logits_ne.logsumexp(-1).square().sum()
        return total

    def add_gradients(
        self, grads_ne: torch.Tensor, router: RouterOutputs, counts_be: torch.Tensor | None, scale: torch.Tensor
    ) -> torch.Tensor | None:
        """Add the balance loss's gradient to that of the scores. Returns the z-loss's of the router's outputs, if there
        is one. `scale`: factor on the losses."""
        logits_ne, scores_ne, order = router
        if counts_be is not None:
            factors = (self._factors(counts_be, grads_ne.dtype) * scale).unsqueeze(order.position_dim)
            if self._moe.score == "sigmoid":
                sums = scores_ne.sum(-1, keepdim=True)
                shares = (scores_ne / sums).unflatten(0, order.shape)
                factors = (factors - (factors * shares).sum(-1, keepdim=True)) / sums.unflatten(0, order.shape)
            grads_ne.unflatten(0, order.shape).add_(factors)
        if not self._moe.router_z_loss:
            return None
        z_n1 = logits_ne.logsumexp(-1, keepdim=True)
        return (2.0 * self._moe.router_z_loss / self._length * scale) * z_n1 * (logits_ne - z_n1).exp()

    def _factors(self, counts_be: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What each token's share of each expert is multiplied by: the weight times f over T."""
        moe = self._moe
        return counts_be.to(dtype) * (moe.balance.weight * moe.experts / (moe.per_token * self._length**2))
