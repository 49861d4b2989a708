"""The MLP of a layer with experts: router, experts, shared experts.

What enters is gathered once, and all that the router, the experts and the shared experts compute is a part of the
tensor-parallel region: each expert, and the shared experts as one MLP, are split over tensor ranks by their inner
width, or tensor ranks have different whole experts, and their partial sums leave the region together. The router, and
the gate of the shared experts, are whole on every tensor rank, where they compute equal bits. A token's factor for an
expert gets its gradient from each rank's part of the inner width, or from the rank that has the expert, so the
gradients of router and gate are partial sums too; only tensor rank 0 adds the router's own losses.

Shapes: s sequence, b micro-batch, n = s b tokens, h hidden, E experts, k experts per token, m rows of the experts that
the rank has, f inner width on this rank, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from manta.workers.config import ModelConfig
from manta.workers.parallel.experts.balance import RouterLosses, RouterOutputs, TokenOrder, counts_sequences
from manta.workers.parallel.experts.choice import Choice, MicroBatchRouting
from manta.workers.parallel.experts.exchange import Exchange, LocalExchange, Plan
from manta.workers.parallel.experts.routing import (
    chosen_experts,
    logits_gradient,
    scores_gradient,
    scores_of,
    weights_of,
)
from manta.workers.parallel.experts.rows import ExpertWeights, add_to_trained, experts_backward, experts_forward
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.recompute.modules import Recomputation, in_backward
from manta.workers.parallel.tensor.sequence_parallel import Region, gather, start_gather, start_sum, sum_partial
from manta.workers.parallel.tensor.shards import ParameterShard, ShardedModule
from manta.workers.parallel.tensor.weight_gradients import WeightGradients


class Spreads(NamedTuple):
    """Standard deviations of initial weights."""

    of_inputs: float
    of_outputs: float
    """Of matrices that write into the residual stream."""


class _Matrix(ShardedModule):
    """One weight, [outputs, inputs], split over tensor ranks along a dimension or whole on each."""

    def __init__(self, shape: tuple[int, int], split_dim: int | None, region: Region, std: float):
        super().__init__()
        local, start = list(shape), 0
        if split_dim is not None:
            local[split_dim] //= region.tensor_size
            start = region.comm.index("tensor") * local[split_dim]
        # Of a single tensor rank it is like any other matrix, which ZeRO 2 and 3 divide.
        stored = 0 if split_dim is None and region.tensor_size == 1 else split_dim
        shard = ParameterShard(shape, stored, start, partial=split_dim is None, std=std)
        self.weight = self.add_parameter("weight", (local[0], local[1]), shard)

    def wide_output(self, rows_ni: torch.Tensor) -> torch.Tensor:
        """x W^T in fp32, or in the precision of compute if that is wider."""
        wide = torch.promote_types(rows_ni.dtype, torch.float32)
        if rows_ni.is_cuda and rows_ni.dtype != wide:
            return torch.mm(rows_ni, self.weight.t(), out_dtype=wide)
        return rows_ni.to(wide) @ self.weight.to(wide).t()

    def add_input_gradient(self, grads_ni: torch.Tensor, wide_grads_no: torch.Tensor) -> None:
        """Add the gradient of the input of `wide_output`."""
        if grads_ni.dtype == wide_grads_no.dtype:
            grads_ni.addmm_(wide_grads_no, self.weight)
        else:
            grads_ni.add_(wide_grads_no @ self.weight.to(wide_grads_no.dtype))

    def add_weight_gradient(
        self, store: WeightGradients, wide_grads_no: torch.Tensor, rows_ni: torch.Tensor | None
    ) -> None:
        """Add the gradient of the weight of `wide_output`, if it is trained."""
        if self.weight.requires_grad and rows_ni is not None:
            store.add_product(self.weight, wide_grads_no, rows_ni.to(wide_grads_no.dtype))


class SharedExperts(nn.Module):
    """The weights of the experts that every token goes to, which are one MLP."""

    def __init__(self, hidden: int, inner: int, region: Region, spreads: Spreads):
        super().__init__()
        self.gate, self.up = (_Matrix((inner, hidden), 0, region, spreads.of_inputs) for _ in range(2))
        self.down = _Matrix((hidden, inner), 1, region, spreads.of_outputs)

    @property
    def inputs(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The weights that read the layer's input."""
        return self.gate.weight, self.up.weight


class ExpertMLP(nn.Module):
    """The MLP of a layer with experts."""

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        region: Region,
        spreads: Spreads,
        bias_e: torch.Tensor | None = None,
        exchange: Exchange | None = None,
        numbers: range | None = None,
        whole: bool = False,
    ):
        """`bias_e`: what is added to the scores for the choice, fp32 [E]; it may change between steps. `numbers`: those
        of the experts that the rank has, to which `exchange` brings tokens; default: all. `whole`: they are not split
        over tensor ranks."""
        super().__init__()
        moe, hidden = model.moe, model.hidden_size
        assert moe is not None
        self.moe, self.layer, self.region, self.bias_e = moe, layer, region, bias_e
        self.exchange: Exchange = exchange or LocalExchange()
        self.losses = RouterLosses(model)
        self.router = _Matrix((moe.experts, hidden), None, region, spreads.of_inputs)
        ranks = (1, 0) if whole else (region.tensor_size, region.comm.index("tensor"))
        own = numbers or range(moe.experts)
        self.experts = ExpertWeights(hidden, moe.ffn_hidden_size, own, ranks, *spreads)
        self.shared_mlp: _SharedMLP | None = None
        """Not a module, unlike its matrices, which are `shared` and `shared_gate`."""
        if moe.shared_size:
            self.shared = SharedExperts(hidden, moe.shared_size, region, spreads)
            self.shared_gate = _Matrix((1, hidden), None, region, spreads.of_inputs) if moe.shared_gate else None
            self.shared_mlp = _SharedMLP(self.shared, self.shared_gate, region)

    def forward(
        self, x: torch.Tensor, run: ForwardPass, recompute_norm: Recomputation | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """[s or s/t, b, h] -> the same, added to the residual if one is given."""
        return _ExpertMLP.apply(x, residual, self, run, recompute_norm)

    @property
    def reads_input(self) -> bool:
        """Whether backward needs the input: something that reads it is trained."""
        others = [self.router.weight]
        if self.shared_mlp is not None:
            others += self.shared_mlp.matrices.inputs
            others += [] if self.shared_mlp.factor is None else [self.shared_mlp.factor.weight]
        return self.experts.reads_input or any(each.requires_grad for each in others)

    def know_frozen(self, names: Collection[str]) -> None:
        """Parameters of these names, in the whole model, are not trained: all ranks that share this layer's experts
        must communicate alike, whichever of them each one has."""
        first = f"layers.{self.layer}.mlp.experts"
        inputs = (
            f"{first}.{number}.{matrix}.weight" for number in range(self.moe.experts) for matrix in ("gate", "up")
        )
        self.experts.reads_input = any(name not in names for name in inputs)

    def start_choosing(self, scores_ne: torch.Tensor, order: TokenOrder, run: ForwardPass) -> Choice | _Choosing:
        """The choice of the micro-batch's first forward, or else begin to choose."""
        if run.routing is not None and self.layer in run.routing.choices:
            return run.routing.choices[self.layer]
        experts_nk = chosen_experts(scores_ne, self.bias_e, self.moe)
        counts_be = _counts(experts_nk, order, self.moe.experts)
        most = max(order.sequences, run.most_samples) * order.length
        return _Choosing(experts_nk, counts_be, self.exchange.start(experts_nk, counts_be.sum(0), most))

    def chosen(self, choosing: _Choosing, router: RouterOutputs, run: ForwardPass) -> Choice:
        """The choice, whose numbers the host waits for. In a step it is kept, and it and the router's losses are
        counted: this is the micro-batch's first forward."""
        experts_nk, counts_be, planning = choosing
        routing, plan = run.routing, planning()
        if routing is None:
            return Choice(experts_nk, None, plan)
        routing.count(self.layer, counts_be.sum(0))
        of_sequences: torch.Tensor | None = None
        if routing.step.loss_scale is not None:
            if counts_sequences(self.moe):
                self.region.comm.all_reduce("context", counts_be)
                of_sequences = counts_be
            routing.add_loss(self.losses.value(router, of_sequences))
        choice = routing.choices[self.layer] = Choice(experts_nk, of_sequences, plan)
        return choice

    def logits_gradient(
        self, factor_grads_nk: torch.Tensor, router: RouterOutputs, choice: Choice, routing: MicroBatchRouting | None
    ) -> torch.Tensor:
        """The gradient of the router's outputs [n, E], with those of its own losses if this rank adds them."""
        grads_ne, of_z_loss = scores_gradient(factor_grads_nk, router.scores_ne, choice.experts_nk, self.moe), None
        if routing is not None and routing.loss_scale is not None:
            of_z_loss = self.losses.add_gradients(grads_ne, router, choice.counts_be, routing.loss_scale)
        grads_ne = logits_gradient(grads_ne, router.scores_ne, self.moe)
        return grads_ne if of_z_loss is None else grads_ne.add_(of_z_loss)


class _Choosing(NamedTuple):
    experts_nk: torch.Tensor
    counts_be: torch.Tensor
    planning: Callable[[], Plan]


def _counts(experts_nk: torch.Tensor, order: TokenOrder, experts: int) -> torch.Tensor:
    """How many tokens of each sequence have chosen each expert, int64 [b, E]."""
    first = torch.arange(0, order.sequences * experts, experts, device=experts_nk.device)
    places = experts_nk.unflatten(0, order.shape) + first.view(-1, *(1,) * (1 + order.position_dim))
    counts = first.new_zeros(order.sequences * experts)
    return counts.scatter_add_(0, places.flatten(), counts.new_ones(places.numel())).view(-1, experts)


class _SharedMLP(NamedTuple):
    """The shared experts' matrices, the gate of their output, and what computes them."""

    matrices: SharedExperts
    factor: _Matrix | None
    region: Region

    def outputs(self, rows_nh: torch.Tensor) -> _SharedOutputs:
        """Outputs of the matrices that read the layer's input, and of the gate."""
        gate_nf, up_nf = self.region.products.outputs(rows_nh, self.matrices.inputs, (None, None))
        return _SharedOutputs(gate_nf, up_nf, None if self.factor is None else self.factor.wide_output(rows_nh))

    def gradients(
        self, outputs: _SharedOutputs, active_nf: torch.Tensor | None, grads_nh: torch.Tensor
    ) -> _SharedGradients:
        """Gradients of these outputs. `active_nf`: the activation, if it was kept; `grads_nh`: the gradient of the
        layer's output."""
        products, (gate_nf, up_nf, logits_n1) = self.region.products, outputs
        if active_nf is None:
            active_nf = in_backward(lambda: products.swiglu(gate_nf, up_nf), self.region.comm)
        grad_nf, of_logits = products.input_gradient([grads_nh], [self.matrices.down.weight]), None
        if logits_n1 is not None:
            factor_n1 = logits_n1.sigmoid()
            of_factor = (grad_nf.to(factor_n1.dtype) * active_nf).sum(-1, keepdim=True)
            of_logits = of_factor * factor_n1 * (1.0 - factor_n1)
            grad_nf.mul_(factor_n1)
        down_input_nf = outputs.down_input(active_nf)
        return _SharedGradients(self, products.swiglu_gradients(grad_nf, gate_nf, up_nf), of_logits, down_input_nf)


class _SharedOutputs(NamedTuple):
    """Outputs of the matrices that read the shared experts' input, and of their gate."""

    gate_nf: torch.Tensor
    up_nf: torch.Tensor
    factor_logits_n1: torch.Tensor | None

    def down_input(self, active_nf: torch.Tensor) -> torch.Tensor:
        """What the down product reads, from the activation."""
        if self.factor_logits_n1 is None:
            return active_nf
        return active_nf * self.factor_logits_n1.sigmoid().to(active_nf.dtype)


class _SharedGradients(NamedTuple):
    """Gradients of `_SharedOutputs`, and the down product's input."""

    shared: _SharedMLP
    inputs_nf: tuple[torch.Tensor, torch.Tensor]
    factor_logits_n1: torch.Tensor | None
    down_input_nf: torch.Tensor

    def add_input_gradient(self, grads_nh: torch.Tensor) -> None:
        """Add the gradient of the layer's input."""
        matrices, factor, region = self.shared
        grads_nh.add_(region.products.input_gradient(self.inputs_nf, matrices.inputs))
        if factor is not None and self.factor_logits_n1 is not None:
            factor.add_input_gradient(grads_nh, self.factor_logits_n1)

    def add_weight_gradients(self, rows_nh: torch.Tensor | None, grads_nh: torch.Tensor) -> None:
        """Add the gradients of what is trained; `rows_nh`: the layer's input, if they need it."""
        matrices, factor, region = self.shared
        store = region.weight_gradients
        if matrices.down.weight.requires_grad:
            store.add_product(matrices.down.weight, grads_nh, self.down_input_nf)
        if rows_nh is None:
            return
        add_to_trained(store, matrices.inputs, self.inputs_nf, rows_nh)
        if factor is not None and self.factor_logits_n1 is not None:
            factor.add_weight_gradient(store, self.factor_logits_n1, rows_nh)


class _ExpertMLP(torch.autograd.Function):
    """The whole layer. How many tensors it keeps does not depend on data."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        mlp: ExpertMLP,
        run: ForwardPass,
        recompute_norm: Recomputation | None,
    ) -> torch.Tensor:
        region, products = mlp.region, mlp.region.products
        full = gather(x, region)
        rows_nh = full.reshape(-1, full.shape[-1])
        order = TokenOrder((full.shape[0], full.shape[1]), int(run.batch_first))
        logits_ne = mlp.router.wide_output(rows_nh)
        router = RouterOutputs(logits_ne, scores_of(logits_ne, mlp.moe), order)
        choosing = mlp.start_choosing(router.scores_ne, order, run)
        shared = None if mlp.shared_mlp is None else mlp.shared_mlp.outputs(rows_nh)
        choice = choosing if isinstance(choosing, Choice) else mlp.chosen(choosing, router, run)
        plan, factors_nk = choice.plan, weights_of(router.scores_ne, choice.experts_nk, mlp.moe)
        results_rh, *kept_mf = experts_forward(
            plan.outward(rows_nh), plan.weights_outward(factors_nk), mlp.experts, plan, products
        )
        y_nh, active_nf = plan.back(results_rh), None
        if shared is not None:
            active_nf = products.swiglu(shared.gate_nf, shared.up_nf)
            y_nh.add_(products.output(shared.down_input(active_nf), mlp.shared.down.weight))
        ctx.mlp, ctx.order, ctx.choice, ctx.added = mlp, order, choice, residual is not None
        ctx.routing, ctx.recompute_norm = run.routing, recompute_norm if mlp.reads_input else None
        ctx.save_for_backward(
            x if mlp.reads_input and recompute_norm is None else None,
            *(logits_ne, *kept_mf),
            None if run.recompute.mlp_activation else active_nf,
            *(shared or ()),
        )
        y = sum_partial(y_nh.view(full.shape), region)
        return y if residual is None else y.add_(residual)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mlp: ExpertMLP = ctx.mlp
        choice: Choice = ctx.choice
        region, store, plan = mlp.region, mlp.region.weight_gradients, choice.plan
        x, logits_ne, gates_mf, ups_mf, active_nf, *outputs = ctx.saved_tensors  # which may be recomputed, once
        if ctx.recompute_norm is not None:
            x, ctx.recompute_norm = in_backward(ctx.recompute_norm, region.comm), None
        grad = gather(grads[0].contiguous(), region)
        grads_nh = grad.view(-1, grad.shape[-1])
        # Deferred work must not refer to the graph, which would keep more.
        needed = None if x is None else x.detach()
        gathered = None if store.keeping or needed is None else start_gather(needed, region)
        router = RouterOutputs(logits_ne, scores_of(logits_ne, mlp.moe), ctx.order)
        factors_nk = weights_of(router.scores_ne, choice.experts_nk, mlp.moe)
        grads_rh = plan.outward(grads_nh)
        of_shared: _SharedGradients | None = None
        if mlp.shared_mlp is not None:
            of_shared = mlp.shared_mlp.gradients(_SharedOutputs(*outputs), active_nf, grads_nh)
        if gathered is not None and gathered[1] is not None:
            gathered[1].wait()
        at_once = None if gathered is None else gathered[0].reshape(-1, grad.shape[-1])

        def rows_for_experts(rows_nh: torch.Tensor | None) -> torch.Tensor | None:
            return plan.outward(rows_nh) if mlp.experts.reads_input and rows_nh is not None else None

        factors_m = plan.weights_outward(factors_nk)
        of_rows, deferred = experts_backward(
            *(grads_rh, rows_for_experts(at_once), (gates_mf, ups_mf), factors_m, mlp.experts, plan),
            *(region.products, store),
        )
        grad_x_nh = plan.back(of_rows.rows_rh)
        of_logits_ne = mlp.logits_gradient(plan.weights_back(of_rows.factors_m), router, choice, ctx.routing)
        mlp.router.add_input_gradient(grad_x_nh, of_logits_ne)
        if of_shared is not None:
            of_shared.add_input_gradient(grad_x_nh)
        grad_x, reducing = start_sum(grad_x_nh.view(grad.shape), region)

        def add_weight_gradients() -> None:
            rows_nh = at_once
            if rows_nh is None and needed is not None:
                rows_nh = gather(needed, region).reshape(-1, needed.shape[-1])
            if deferred is not None:
                deferred.add(store, rows_for_experts(rows_nh))
            if of_shared is not None:
                of_shared.add_weight_gradients(rows_nh, grads_nh)
            mlp.router.add_weight_gradient(store, of_logits_ne, rows_nh)

        store.submit(add_weight_gradients)
        if reducing is not None:
            reducing.wait()
        return grad_x, grads[0] if ctx.added else None, None, None, None
