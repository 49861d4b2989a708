"""Which experts each token goes to, and with which weights: pure functions of the router's outputs.

Shapes: n tokens, E experts, k experts per token. All but the choice is in fp32, or in the precision of compute if that
is wider.
"""

from __future__ import annotations

import torch

from manta.workers.config import MoeConfig

_TINY = 1e-20
"""Added to the sum of chosen scores, which may all round to zero (DeepSeek-V3's model adds the same)."""


def scores_of(logits_ne: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """The experts' scores for each token [n, E]."""
    return logits_ne.softmax(-1) if moe.score == "softmax" else logits_ne.sigmoid()


def logits_gradient(grads_ne: torch.Tensor, scores_ne: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """The gradient of the router's outputs from that of the scores."""
    if moe.score == "softmax":
        return scores_ne * (grads_ne - (grads_ne * scores_ne).sum(-1, keepdim=True))
    return grads_ne * scores_ne * (1.0 - scores_ne)


def chosen_experts(scores_ne: torch.Tensor, bias_e: torch.Tensor | None, moe: MoeConfig) -> torch.Tensor:
    """The numbers of the k experts that each token goes to, int32 [n, k], ascending: those with the highest scores, to
    which the bias is added, and of equal ones those with the lowest numbers. With groups of experts, only those of each
    token's best groups. Numbers that are not finite count as the highest."""
    if bias_e is not None:
        scores_ne = scores_ne + bias_e
    scores_ne = torch.nan_to_num(scores_ne, nan=torch.inf)
    if moe.groups > 1:
        by_group = scores_ne.unflatten(-1, (moe.groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        outside = ~_highest(best, moe.groups_per_token)
        scores_ne = by_group.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = scores_ne.shape[-1]
    falling = torch.arange(experts, 0, -1, dtype=torch.int32, device=scores_ne.device)
    return experts - (_highest(scores_ne, moe.per_token) * falling).topk(moe.per_token, dim=-1).values


def _highest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Which `count` of the last dimension's values are the highest, of equal ones the first. A sort that keeps the
    order of equal ones takes ten times as long."""
    least = values.topk(count, dim=-1).values[..., -1:]
    above, equal = values > least, values == least
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def weights_of(scores_ne: torch.Tensor, choice_nk: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """The factors of the chosen experts' results [n, k]."""
    chosen_nk = scores_ne.gather(-1, choice_nk.long())
    if moe.normalise:
        chosen_nk = chosen_nk / (chosen_nk.sum(-1, keepdim=True) + _TINY)
    return chosen_nk * moe.scale


def scores_gradient(
    grads_nk: torch.Tensor, scores_ne: torch.Tensor, choice_nk: torch.Tensor, moe: MoeConfig
) -> torch.Tensor:
    """The gradient of the scores [n, E] from that of the factors."""
    index_nk, grads_nk = choice_nk.long(), grads_nk * moe.scale
    if moe.normalise:
        chosen_nk = scores_ne.gather(-1, index_nk)
        total_n1 = chosen_nk.sum(-1, keepdim=True) + _TINY
        grads_nk = (grads_nk - (grads_nk * chosen_nk).sum(-1, keepdim=True) / total_n1) / total_n1
    return torch.zeros_like(scores_ne).scatter_(-1, index_nk, grads_nk)
