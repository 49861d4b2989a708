"""Matrices in 8 bits (arXiv:2209.05433): an element is a sign, and either 4 bits of exponent and 3 of mantissa (e4m3,
up to 448) or 5 and 2 (e5m2, up to 57,344). Each matrix, or each of its rows, is multiplied by a scale before rounding,
so that its largest element is close to the format's largest value.

Scales are powers of two (decision 0027): they change exponents without rounding, so the choice of scale only matters
for elements that are so small relative to the largest that they underflow.

Shapes: m rows, k columns along which a product sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 2.0**-100
"""Lower bound for the largest element, for a matrix of zeros."""
EXPONENT_BITS = 0x7F800000
"""The exponent bits of an fp32 number."""


class Cast(NamedTuple):
    """A matrix in 8 bits, which represents `values * inverse`."""

    values: torch.Tensor
    """[m, k], row by row in memory."""
    inverse: torch.Tensor
    """1 / scale, fp32: a scalar, or [m, 1] where each row has its own."""


class Both(NamedTuple):
    """A matrix cast for products that sum along its rows, and for those that sum along its columns."""

    rows: Cast
    """[m, k]."""
    columns: Cast
    """The transposed matrix, [k, m]."""


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest power of two, fp32, with which elements up to `largest` stay within `dtype`. If `largest` is not
    finite, the scale makes all elements NaN, as they would be after any step with them."""
    room = torch.finfo(dtype).max / largest.float().clamp_min(LEAST)
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


def tensor_both(x_mk: torch.Tensor, dtype: torch.dtype) -> Both:
    """Both casts, with one scale."""
    rows = tensor_rows(x_mk, dtype)
    return Both(rows, Cast(rows.values.t().contiguous(), rows.inverse))


def row_rows(x_mk: torch.Tensor, dtype: torch.dtype) -> Cast:
    """A cast with a scale for each row."""
    scale_m1 = scale_of(torch.linalg.vector_norm(x_mk, math.inf, dim=1, keepdim=True), dtype)
    return Cast(_rounded(x_mk, scale_m1, dtype), 1.0 / scale_m1)


def row_columns(x_mk: torch.Tensor, dtype: torch.dtype) -> Cast:
    """A cast of the transposed matrix [k, m] with a scale for each of its rows."""
    scale_1k = scale_of(torch.linalg.vector_norm(x_mk, math.inf, dim=0, keepdim=True), dtype)
    return Cast(_rounded(x_mk, scale_1k, dtype).t().contiguous(), (1.0 / scale_1k).view(-1, 1))


def row_both(x_mk: torch.Tensor, dtype: torch.dtype) -> Both:
    """Both casts, each with a scale for each of its own rows."""
    return Both(row_rows(x_mk, dtype), row_columns(x_mk, dtype))


class Casts(NamedTuple):
    """How matrices are cast: functions of (matrix [m, k], 8-bit type)."""

    rows: Callable[[torch.Tensor, torch.dtype], Cast]
    columns: Callable[[torch.Tensor, torch.dtype], Cast]
    both: Callable[[torch.Tensor, torch.dtype], Both]

    def compiled(self) -> Casts:
        """Each function compiled to as few passes over the matrix as torch.compile finds."""
        compile_ = partial(torch.compile, dynamic=False)
        return Casts(compile_(self.rows), compile_(self.columns), compile_(self.both))


BY_TENSOR = Casts(tensor_rows, tensor_columns, tensor_both)
BY_ROW = Casts(row_rows, row_columns, row_both)
