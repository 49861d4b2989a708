"""The experts of one rank, forward and backward, one after the other: down(w silu(gate(x)) up(x)), w the token's factor
for the expert.

The factor is on the input of the down product, so that its gradient is a dot product with the activation, and the down
product's result is not kept. The activation is computed again in backward. Weight gradients are added as soon as an
expert's are known, or in a pass of their own (`WeightGradients`); those of experts without tokens too, so that it does
not depend on data when a gradient is complete.

Shapes: r rows that came, m rows of the experts, h hidden, f inner width of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from manta.workers.parallel.experts.exchange import Plan
from manta.workers.parallel.tensor.products import Products
from manta.workers.parallel.tensor.shards import ParameterShard, ShardedModule
from manta.workers.parallel.tensor.weight_gradients import WeightGradients


class ExpertWeights(ShardedModule):
    """Gates and ups [f, h], and downs [h, f], of the experts of a rank. All gates lie one after the other in the flat
    buffer, then all ups, then all downs."""

    def __init__(
        self, hidden: int, inner: int, numbers: range, tensor: tuple[int, int], std: float, residual_std: float
    ):
        """`inner`: whole inner width; `numbers`: those of the rank's experts within the layer; `tensor`: number of the
        tensor ranks that share each expert, and this one's index among them; `residual_std`: standard deviation of the
        downs."""
        super().__init__()
        self.numbers = numbers
        size, start = inner // tensor[0], tensor[1] * (inner // tensor[0])

        def matrices(name: str, local: tuple[int, int], shard: ParameterShard) -> list[nn.Parameter]:
            return [
                self.add_parameter(f"{name}_{number}", local, replace(shard, beside=f"experts.{number}.{name}.weight"))
                for number in numbers
            ]

        rows = ParameterShard((inner, hidden), 0, start, of_expert=True, std=std)
        self.gates, self.ups = (matrices(name, (size, hidden), rows) for name in ("gate", "up"))
        columns = ParameterShard((hidden, inner), 1, start, of_expert=True, std=residual_std)
        self.downs = matrices("down", (hidden, size), columns)
        self.inner = size
        self.reads_input = True
        """Whether gates or ups of the layer are trained, on any rank, so that their gradients need the experts'
        input."""


class _Expert(NamedTuple):
    """One expert in a micro-batch."""

    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    rows: slice
    """Where the expert's rows are among those of all experts."""
    came_from: torch.Tensor
    """Which of the rows that came they are."""


def _experts(weights: ExpertWeights, plan: Plan) -> Iterator[_Expert]:
    start, parts = 0, plan.index_m.split(plan.counts)
    for gate, up, down, index in zip(weights.gates, weights.ups, weights.downs, parts, strict=True):
        yield _Expert(gate, up, down, slice(start, start + len(index)), index)
        start += len(index)


def experts_forward(
    rows_rh: torch.Tensor, factors_m: torch.Tensor, weights: ExpertWeights, plan: Plan, products: Products
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the experts' results for each row that came [r, h], and the outputs of gates and ups [m, f], which
    backward needs."""
    shape = len(factors_m), weights.inner
    gates_mf, ups_mf = rows_rh.new_empty(shape), rows_rh.new_empty(shape)
    results_rh, factors_m1 = torch.zeros_like(rows_rh), factors_m.unsqueeze(-1)
    for expert in _experts(weights, plan):
        if not len(expert.came_from):
            continue
        gate_f, up_f = gates_mf[expert.rows], ups_mf[expert.rows]
        x_h = rows_rh.index_select(0, expert.came_from)
        products.output_into(gate_f.unsqueeze(0), x_h.unsqueeze(0), expert.gate)
        products.output_into(up_f.unsqueeze(0), x_h.unsqueeze(0), expert.up)
        active_f = products.swiglu(gate_f, up_f).mul_(factors_m1[expert.rows])
        results_rh.index_add_(0, expert.came_from, products.output(active_f, expert.down))
    return results_rh, gates_mf, ups_mf


class ExpertGradients(NamedTuple):
    """Gradients of what the experts were given."""

    rows_rh: torch.Tensor
    factors_m: torch.Tensor


def experts_backward(
    grads_rh: torch.Tensor,
    rows_rh: torch.Tensor | None,
    kept: tuple[torch.Tensor, torch.Tensor],
    factors_m: torch.Tensor,
    weights: ExpertWeights,
    plan: Plan,
    products: Products,
    store: WeightGradients,
) -> tuple[ExpertGradients, DeferredExperts | None]:
    """The gradients of the rows that came and of the factors, from those of the results. `kept`: outputs of gates and
    ups, whose memory is used for something else. Weight gradients are added at once, for which `rows_rh` is needed if
    gates or ups are trained; or, while they are deferred, what is needed for them is returned."""
    gates_mf, ups_mf = kept
    deferred = DeferredExperts(weights, plan, grads_rh, gates_mf, ups_mf) if store.keeping else None
    grad_rows_rh, grad_factors_m = torch.zeros_like(grads_rh), torch.empty_like(factors_m)
    factors_m1 = factors_m.unsqueeze(-1)
    for expert in _experts(weights, plan):
        gate_f, up_f, factors_1 = gates_mf[expert.rows], ups_mf[expert.rows], factors_m1[expert.rows]
        grad_h = grads_rh.index_select(0, expert.came_from)
        active_f = products.swiglu(gate_f, up_f)
        grad_f = products.input_gradient([grad_h], [expert.down])
        torch.sum(grad_f.to(factors_m.dtype) * active_f, -1, out=grad_factors_m[expert.rows])
        active_f.mul_(factors_1)
        if deferred is None and expert.down.requires_grad:
            store.add_product(expert.down, grad_h, active_f)
        grads_f = products.swiglu_gradients(grad_f.mul_(factors_1), gate_f, up_f)
        pair = [expert.gate, expert.up]
        grad_rows_rh.index_add_(0, expert.came_from, products.input_gradient(grads_f, pair))
        if deferred is not None:
            deferred.keep(expert.rows, active_f, grads_f)
        elif rows_rh is not None:
            add_to_trained(store, pair, grads_f, rows_rh.index_select(0, expert.came_from))
    return ExpertGradients(grad_rows_rh, grad_factors_m), deferred


def add_to_trained(
    store: WeightGradients,
    weights: Sequence[nn.Parameter],
    grads_no: Sequence[torch.Tensor],
    inputs_ni: torch.Tensor,
) -> None:
    """Add to the gradients of those of the weights, which have one input, that are trained."""
    trained = [pair for pair in zip(weights, grads_no, strict=True) if pair[0].requires_grad]
    if trained:
        store.add_products([weight for weight, _ in trained], [grad_no for _, grad_no in trained], inputs_ni)


class DeferredExperts:
    """What the weight gradients of a micro-batch's experts are computed from later."""

    def __init__(
        self,
        weights: ExpertWeights,
        plan: Plan,
        grads_rh: torch.Tensor,
        gates_mf: torch.Tensor,
        ups_mf: torch.Tensor,
    ):
        """The gradients of `gates_mf` and `ups_mf` take their place."""
        self._weights, self._plan, self._grads_rh = weights, plan, grads_rh
        self._grads_mf = gates_mf, ups_mf
        self._active_mf = torch.empty_like(gates_mf)

    def keep(self, rows: slice, active_f: torch.Tensor, grads_f: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep the input of an expert's down product, and the gradients of its gate's and up's outputs."""
        self._active_mf[rows] = active_f
        for grads_mf, grad_f in zip(self._grads_mf, grads_f, strict=True):
            grads_mf[rows] = grad_f

    def add(self, store: WeightGradients, rows_rh: torch.Tensor | None) -> None:
        """Add the gradients; `rows_rh`: the rows that came, if gates or ups are trained."""
        grad_gates_mf, grad_ups_mf = self._grads_mf
        for expert in _experts(self._weights, self._plan):
            if expert.down.requires_grad:
                grad_h = self._grads_rh.index_select(0, expert.came_from)
                store.add_product(expert.down, grad_h, self._active_mf[expert.rows])
            if rows_rh is not None:
                grads_f = grad_gates_mf[expert.rows], grad_ups_mf[expert.rows]
                add_to_trained(store, [expert.gate, expert.up], grads_f, rows_rh.index_select(0, expert.came_from))
