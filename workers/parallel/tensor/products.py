"""The matrix products of a linear layer, behind one interface: other kernels (fp8, fused, of a library) replace
`TorchProducts` by implementing `Products`, of which an engine has one (`Engine(..., products=...)`). Communication,
autograd and the time at which a gradient is computed are not their concern.

Shapes: n tokens, i input width, o output width of this rank's part of W [o, i]; if n is not mentioned, inputs may have
several leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

Gelu = Literal["gelu", "gelu_tanh"]
"""Exact by erf, or approximated by tanh."""
ADDS_WIDER = torch.__version__ >= "2.13"  # compared as a version
"""Whether a GPU's tensor cores can add a product of 16-bit matrices to an fp32 matrix directly."""
APPROXIMATION = {"gelu": "none", "gelu_tanh": "tanh"}
"""Names of the kinds in torch."""


class Products(Protocol):
    """What a linear layer computes, forward and backward."""

    def begin(self) -> None:
        """A step or an evaluation begins; weights may differ from the last one's, and do not change within it."""
        ...

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b: [..., i] -> [..., o], a tensor of its own."""
        ...

    def outputs(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        """x W^T + b for each of several layers that share their input: [..., i] -> [..., o], tensors of their own."""
        ...

    def output_into(
        self, out_rno: torch.Tensor, x_rni: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """x W^T + b, written to `out_rno`. Both are r blocks of rows, which may not be contiguous with each other."""
        ...

    def output_added(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """x W^T + b + residual [..., o]; the residual is not changed."""
        ...

    def input_gradient(self, grads_no: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of grad W over layers with the same input: [n, i]."""
        ...

    def add_weight_gradient(
        self, total_oi: torch.Tensor, grads_no: torch.Tensor, inputs_ni: torch.Tensor, keep: bool
    ) -> None:
        """Add grads^T inputs to `total_oi`, which may have a wider type; without `keep`, overwrite it."""
        ...

    def add_weight_gradients(
        self,
        totals_oi: Sequence[torch.Tensor],
        grads_no: Sequence[torch.Tensor],
        inputs_ni: torch.Tensor,
        keeps: Sequence[bool],
    ) -> None:
        """Add grads^T inputs to the total of each of several layers that share their input; without its `keep`,
        overwrite it. Totals may have a wider type."""
        ...

    def add_bias_gradient(self, total_o: torch.Tensor, grads_no: torch.Tensor, keep: bool) -> None:
        """Add the sum of the gradients over tokens to `total_o`; without `keep`, overwrite it."""
        ...

    def gelu(self, x: torch.Tensor, kind: Gelu) -> torch.Tensor:
        """GELU, for the input of a product."""
        ...

    def gelu_gradient(self, grad: torch.Tensor, x: torch.Tensor, kind: Gelu) -> torch.Tensor:
        """The gradient of GELU's input x from that of its output, whose memory may be reused."""
        ...

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) up, with silu(x) = x sigmoid(x), for the input of a product."""
        ...

    def swiglu_gradients(
        self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of gate and up from that of their result, whose memory may be reused."""
        ...


class TorchProducts:
    """torch's own kernels."""

    def __init__(self) -> None:
        self._ones: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def begin(self) -> None:
        """Nothing depends on the weights."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b."""
        return F.linear(x, weight, bias)

    def outputs(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        """One after the other."""
        return tuple([self.output(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)])

    def output_into(
        self, out_rno: torch.Tensor, x_rni: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """x W^T + b, with no copy of either."""
        if len(x_rni) > 1 and x_rni.is_cuda:
            # One kernel: the product of a single block may be too small to fill a GPU.
            torch.bmm(x_rni, weight.t().expand(len(x_rni), -1, -1), out=out_rno)
            if bias is not None:
                out_rno.add_(bias)
            return
        for x_ni, out_no in zip(x_rni, out_rno, strict=True):
            if bias is None:
                torch.mm(x_ni, weight.t(), out=out_no)
            else:
                torch.addmm(bias, x_ni, weight.t(), out=out_no)

    def output_added(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """x W^T + b + residual."""
        # The product is added in place: one pass less over the result.
        y = (residual.clone() if bias is None else residual + bias).contiguous()
        y.view(-1, y.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        return y

    def input_gradient(self, grads_no: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of grad W."""
        total_ni = grads_no[0] @ weights[0]
        for number in range(1, len(weights)):
            total_ni.addmm_(grads_no[number], weights[number])
        return total_ni

    def add_weight_gradient(
        self, total_oi: torch.Tensor, grads_no: torch.Tensor, inputs_ni: torch.Tensor, keep: bool
    ) -> None:
        """Add grads^T inputs."""
        left, beta = grads_no.t(), int(keep)
        if total_oi.dtype == grads_no.dtype:
            total_oi.addmm_(left, inputs_ni, beta=beta)
        elif total_oi.is_cuda and ADDS_WIDER:
            torch.addmm(total_oi, left, inputs_ni, beta=beta, out_dtype=total_oi.dtype, out=total_oi)
        elif total_oi.is_cuda and not keep:
            torch.mm(left, inputs_ni, out_dtype=total_oi.dtype, out=total_oi)
        else:
            product_oi = _wide_product(left, inputs_ni, total_oi.dtype)
            total_oi.add_(product_oi) if keep else total_oi.copy_(product_oi)

    def add_weight_gradients(
        self,
        totals_oi: Sequence[torch.Tensor],
        grads_no: Sequence[torch.Tensor],
        inputs_ni: torch.Tensor,
        keeps: Sequence[bool],
    ) -> None:
        """One after the other."""
        for total_oi, grad_no, keep in zip(totals_oi, grads_no, keeps, strict=True):
            self.add_weight_gradient(total_oi, grad_no, inputs_ni, keep)

    def add_bias_gradient(self, total_o: torch.Tensor, grads_no: torch.Tensor, keep: bool) -> None:
        """Add the sum over tokens."""
        if total_o.is_cuda or total_o.dtype != grads_no.dtype:
            sum_o = grads_no.sum(0, dtype=total_o.dtype)
            total_o.add_(sum_o) if keep else total_o.copy_(sum_o)
        else:
            # On a CPU a product with ones reads the rows twice as fast as a sum over dimension 0.
            total_o.addmv_(grads_no.t(), self._ones_like_rows(grads_no), beta=int(keep))

    def _ones_like_rows(self, grads_no: torch.Tensor) -> torch.Tensor:
        key = (len(grads_no), grads_no.dtype)
        if key not in self._ones:
            self._ones[key] = grads_no.new_ones(len(grads_no))
        return self._ones[key]

    def gelu(self, x: torch.Tensor, kind: Gelu) -> torch.Tensor:
        """GELU."""
        return F.gelu(x, approximate=APPROXIMATION[kind])

    def gelu_gradient(self, grad: torch.Tensor, x: torch.Tensor, kind: Gelu) -> torch.Tensor:
        """In the memory of `grad`."""
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=APPROXIMATION[kind], grad_input=grad)
        return grad

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) up."""
        return F.silu(gate).mul_(up)

    def swiglu_gradients(
        self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of up is in the memory of `grad`."""
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad.mul_(F.silu(gate))


def _wide_product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product of 16-bit matrices, to be added in `dtype`, in which a GPU's tensor cores return it unrounded."""
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else left @ right
