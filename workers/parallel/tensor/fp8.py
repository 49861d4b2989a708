"""Linear layers whose products take 8-bit matrices and sum in fp32, on kernels with twice the rate of those for 16
bits. Weights, tensors kept for backward and results of products have the same types as without: only the inputs of a
product are cast, with a scale that is computed each time (dynamic scaling), so there is no additional state.

An element has a sign, and either 4 bits of exponent and 3 of mantissa (e4m3, up to 448) or 5 and 2 (e5m2, up to 57,344;
arXiv:2209.05433). Each matrix, or each of its rows, is multiplied by a scale before rounding, so that its largest
element is close to the format's largest value. Scales are powers of two (decision 0027): they change exponents without
rounding, so the choice of scale only matters for elements that are so small relative to the largest that they
underflow. Inputs and weights are e4m3. With one scale per matrix, gradients are e5m2, since those of a batch's tokens
differ by many powers of two; with one scale per row they are e4m3 too, since each row has a range of its own.

Shapes: n tokens, i input width, o output width of this rank's part of W [o, i]; m rows, k columns along which a product
sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from manta.workers.errors import ModelError
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.spec.kernel_rules import UNIT

Kind = Literal["tensorwise", "rowwise"]
MIN_CAPABILITY = (8, 9)
"""Least compute capability of a GPU with 8-bit products."""


class _Weight:
    """A weight, and its 8-bit form from its first use in a step to the next step."""

    def __init__(self, weight: nn.Parameter):
        self.weight, self.is_trained = weight.detach(), weight.requires_grad
        self.cast: CastPair | None = None


class Fp8Products(TorchProducts):
    """8-bit products for registered weights, torch's own for all others."""

    def __init__(self, kind: Kind, device: torch.device, compiled: bool = False):
        """`compiled`: whether casts are compiled. Raises ModelError for a GPU without 8-bit products."""
        super().__init__()
        if device.type == "cuda":
            refuse_without_kernels(torch.cuda.get_device_capability(device))
        by_row = kind == "rowwise"
        casts = BY_ROW if by_row else BY_TENSOR
        self._casts = casts.compiled() if compiled else casts
        self._of_gradients = E4M3 if by_row else E5M2
        # Kernels with a scale per row only write 16 bits.
        self._wide = torch.bfloat16 if by_row else torch.float32
        self._weights: dict[int, _Weight] = {}
        """Registered weights by address."""
        self._totals: set[int] = set()
        """Addresses of the sums of their gradients."""
        self._gradients: list[tuple[torch.Tensor, Cast]] = []
        """Gradients used by the last product for an input, with their column casts for the product for a weight."""

    def take(self, name: str, weight: nn.Parameter) -> None:
        """Compute products of `weight`, which must stay there, in 8 bits. Raises ModelError for unsuitable widths."""
        outputs, inputs = weight.shape
        if outputs % UNIT or inputs % UNIT:
            raise ModelError(
                f"{name} is [{outputs}, {inputs}] on each tensor rank, and 8-bit products need multiples of {UNIT}: "
                "change the model's widths or parallel.tensor, or set train.fp8: off"
            )
        self._weights[weight.data_ptr()] = _Weight(weight)
        if weight.requires_grad:
            self._totals.add(weight.main_grad.data_ptr())  # type: ignore[attr-defined]

    def replace(self, weights: Sequence[nn.Parameter]) -> None:
        """Some of the weights are now where others were."""
        for weight in weights:
            self._weights[weight.data_ptr()] = _Weight(weight)

    def begin(self) -> None:
        """A step begins, possibly with other weights."""
        for weight in self._weights.values():
            weight.cast = None

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b."""
        return self.outputs(x, (weight,), (bias,))[0]

    def outputs(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        """x W^T + b for each of several layers with one input, which is cast once."""
        known = self._known(weights, x)
        if known is None:
            return tuple([super(Fp8Products, self).output(x, *each) for each in zip(weights, biases, strict=True)])
        cast = self._casts.rows(x.detach().reshape(-1, x.shape[-1]), E4M3)
        products = [
            product(cast, self._both(weight).rows, x.dtype, bias) for weight, bias in zip(known, biases, strict=True)
        ]
        return tuple([y_no.view(*x.shape[:-1], -1) for y_no in products])

    def output_added(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """x W^T + b + residual."""
        if self._known((weight,), x) is None:
            return super().output_added(x, weight, bias, residual)
        return self.output(x, weight, bias).add_(residual)

    def input_gradient(self, grads_no: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of grad W."""
        known = self._known(weights, grads_no[0])
        if known is None:
            return super().input_gradient(grads_no, weights)
        total_ni: torch.Tensor | None = None
        self._gradients = []
        for grad_no, weight in zip(grads_no, known, strict=True):
            if weight.is_trained:
                rows, columns = self._casts.pair(grad_no, self._of_gradients)
                self._gradients.append((grad_no, columns))
            else:
                rows = self._casts.rows(grad_no, self._of_gradients)
            product_ni = product(rows, self._both(weight).columns, grad_no.dtype)
            total_ni = product_ni if total_ni is None else total_ni.add_(product_ni)
        assert total_ni is not None
        return total_ni

    def add_weight_gradient(
        self, total_oi: torch.Tensor, grads_no: torch.Tensor, inputs_ni: torch.Tensor, keep: bool
    ) -> None:
        """Add grads^T inputs."""
        self.add_weight_gradients([total_oi], [grads_no], inputs_ni, [keep])

    def add_weight_gradients(
        self,
        totals_oi: Sequence[torch.Tensor],
        grads_no: Sequence[torch.Tensor],
        inputs_ni: torch.Tensor,
        keeps: Sequence[bool],
    ) -> None:
        """Add grads^T inputs to the total of each of several layers with one input, which is cast once. 8-bit kernels
        cannot add to a matrix, so the sum is a separate step."""
        if not len(inputs_ni) or any(total_oi.data_ptr() not in self._totals for total_oi in totals_oi):
            for total_oi, grad_no, keep in zip(totals_oi, grads_no, keeps, strict=True):
                super().add_weight_gradient(total_oi, grad_no, inputs_ni, keep)
            return
        right = self._casts.columns(inputs_ni, E4M3)
        for total_oi, grad_no, keep in zip(totals_oi, grads_no, keeps, strict=True):
            left = self._columns_of(grad_no)
            if keep or self._wide != total_oi.dtype:
                product_oi = product(left, right, self._wide)
                total_oi.add_(product_oi) if keep else total_oi.copy_(product_oi)
            else:
                product(left, right, self._wide, out=total_oi)

    def _columns_of(self, grad_no: torch.Tensor) -> Cast:
        """The column cast of a gradient; computed again if products for weights are deferred."""
        for number, (known_no, columns) in enumerate(self._gradients):
            if known_no is grad_no:
                self._gradients.pop(number)
                return columns
        return self._casts.columns(grad_no, self._of_gradients)

    def _known(self, weights: Sequence[torch.Tensor], rows: torch.Tensor) -> list[_Weight] | None:
        """The registered weights of layers with one input; None if they are not in 8 bits, or there are no rows to
        multiply, which kernels do not take."""
        if not rows.numel():
            return None
        known = [self._weights.get(weight.data_ptr()) for weight in weights]
        return [each for each in known if each is not None] if all(known) else None

    def _both(self, known: _Weight) -> CastPair:
        if known.cast is None:
            known.cast = self._casts.pair(known.weight, E4M3)
        return known.cast


def product(
    left: Cast, right: Cast, dtype: torch.dtype, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """left right^T + b: [m, k] [n, k] -> [m, n], summed in fp32. Hopper's tensor cores also offer sums with fewer bits,
    which would gain 2%."""
    options: dict[str, Any] = {} if out is None else {"out": out}
    # Scales per row form a column on the left and a row on the right.
    inverse = right.inverse.view(1, -1) if right.inverse.dim() else right.inverse
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.inverse,
        scale_b=inverse,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=False,
        **options,
    )


def refuse_without_kernels(capability: tuple[int, int]) -> None:
    """Raises ModelError for a GPU with this compute capability if it has no 8-bit products."""
    if capability < MIN_CAPABILITY:
        raise ModelError(
            f"train.fp8 needs a GPU of compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or above (Ada, "
            f"Hopper, Blackwell), and this one has {capability[0]}.{capability[1]}: set train.fp8: off"
        )


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_SCALED = 2.0**-100
"""Lower bound for the largest element, for a matrix of zeros."""
EXPONENT_BITS = 0x7F800000
"""The exponent bits of an fp32 number."""


class Cast(NamedTuple):
    """A matrix in 8 bits, which represents `values * inverse`."""

    values: torch.Tensor
    """[m, k], row by row in memory."""
    inverse: torch.Tensor
    """1 / scale, fp32: a scalar, or [m, 1] where each row has its own."""


class CastPair(NamedTuple):
    """A matrix cast for products that sum along its rows, and for those that sum along its columns."""

    rows: Cast
    """[m, k]."""
    columns: Cast
    """The transposed matrix, [k, m]."""


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest power of two, fp32, with which elements up to `largest` stay within `dtype`. If `largest` is not
    finite, the scale makes all elements NaN, as they would be after any step with them."""
    room = torch.finfo(dtype).max / largest.float().clamp_min(SMALLEST_SCALED)
    return (room.view(torch.int32) & EXPONENT_BITS).view(torch.float32)


def _rounded(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Exact in 16 bits too, up to the final rounding.
    return (x * scale.to(x.dtype)).to(dtype).contiguous()


def tensor_rows(x_mk: torch.Tensor, dtype: torch.dtype) -> Cast:
    """A cast with one scale."""
    scale = scale_of(torch.linalg.vector_norm(x_mk, math.inf), dtype)
    return Cast(_rounded(x_mk, scale, dtype), 1.0 / scale)


def tensor_columns(x_mk: torch.Tensor, dtype: torch.dtype) -> Cast:
    """A cast of the transposed matrix [k, m] with one scale."""
    values, inverse = tensor_rows(x_mk, dtype)
    return Cast(values.t().contiguous(), inverse)


def tensor_cast_pair(x_mk: torch.Tensor, dtype: torch.dtype) -> CastPair:
    """Both casts, with one scale."""
    rows = tensor_rows(x_mk, dtype)
    return CastPair(rows, Cast(rows.values.t().contiguous(), rows.inverse))


def row_rows(x_mk: torch.Tensor, dtype: torch.dtype) -> Cast:
    """A cast with a scale for each row."""
    scale_m1 = scale_of(torch.linalg.vector_norm(x_mk, math.inf, dim=1, keepdim=True), dtype)
    return Cast(_rounded(x_mk, scale_m1, dtype), 1.0 / scale_m1)


def row_columns(x_mk: torch.Tensor, dtype: torch.dtype) -> Cast:
    """A cast of the transposed matrix [k, m] with a scale for each of its rows."""
    scale_1k = scale_of(torch.linalg.vector_norm(x_mk, math.inf, dim=0, keepdim=True), dtype)
    return Cast(_rounded(x_mk, scale_1k, dtype).t().contiguous(), (1.0 / scale_1k).view(-1, 1))


def row_cast_pair(x_mk: torch.Tensor, dtype: torch.dtype) -> CastPair:
    """Both casts, each with a scale for each of its own rows."""
    return CastPair(row_rows(x_mk, dtype), row_columns(x_mk, dtype))


class Casts(NamedTuple):
    """How matrices are cast: functions of (matrix [m, k], 8-bit type)."""

    rows: Callable[[torch.Tensor, torch.dtype], Cast]
    columns: Callable[[torch.Tensor, torch.dtype], Cast]
    pair: Callable[[torch.Tensor, torch.dtype], CastPair]

    def compiled(self) -> Casts:
        """Each function compiled to as few passes over the matrix as torch.compile finds."""
        compile_ = partial(torch.compile, dynamic=False)
        return Casts(compile_(self.rows), compile_(self.columns), compile_(self.pair))


BY_TENSOR = Casts(tensor_rows, tensor_columns, tensor_cast_pair)
BY_ROW = Casts(row_rows, row_columns, row_cast_pair)
