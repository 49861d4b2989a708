"""Programs of ranks over which experts are spread."""

from __future__ import annotations

from typing import Any

import torch

from manta.workers.comm.comm import Comm
from manta.workers.config import MoeConfig, ParallelConfig
from manta.workers.parallel.experts.dispatch import exchange_of, own_experts

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows [n, h], choice [n, k] and factors [n, k] of one rank."""
Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]
"""Results [n, h], gradients of rows and factors, and rows of each of the rank's experts."""


def exchanged(comm: Comm, layout: ParallelConfig, experts: int, given: list[list[Given]]) -> list[Made]:
    """For each case what this rank's tokens get from experts of which number i multiplies by i + 1, and the gradients
    of the sum of their results' cubes."""
    made = []
    for of_ranks in given:
        most = max(len(rows) for rows, _, _ in of_ranks)
        moe = MoeConfig(experts=experts, per_token=of_ranks[0][1].shape[1], ffn_hidden_size=1)
        exchange = exchange_of(comm, layout, moe)
        numbers = own_experts(comm, layout, experts)
        made.append(through_experts(exchange, of_ranks[comm.index("expert")], experts, numbers, most))
    return made


def through_experts(exchange: Any, given: Given, experts: int, numbers: range, most: int) -> Made:
    """What `exchanged` computes of one case, through any exchange, for a rank that has experts of these `numbers`."""
    rows_nh, choice_nk, factors_nk = given
    counts = torch.bincount(choice_nk.flatten(), minlength=experts)
    plan = exchange.start(choice_nk, counts, most)()
    came, factors_m = plan.outward(rows_nh), plan.weights_outward(factors_nk)
    scales_m = torch.tensor([number + 1.0 for number in numbers], dtype=came.dtype)
    scales_m = scales_m.repeat_interleave(torch.tensor(plan.counts))
    mine = came[plan.index_m]
    results = torch.zeros_like(came).index_add_(0, plan.index_m, (factors_m * scales_m).unsqueeze(1) * mine)
    results_nh = plan.back(results)
    grads = plan.outward(3 * results_nh.square())[plan.index_m]
    grad_rows = torch.zeros_like(came).index_add_(0, plan.index_m, (factors_m * scales_m).unsqueeze(1) * grads)
    grad_factors_m = scales_m * (grads * mine).sum(1)
    return results_nh, plan.back(grad_rows), plan.weights_back(grad_factors_m), plan.counts
