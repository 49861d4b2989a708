"""Casts to 8 bits: what comes out stands for what went in, up to the format's rounding, with scales that round nothing
themselves. The formats are written out here, apart from torch's."""

from __future__ import annotations

import math

import pytest
import torch

from manta.workers.parallel.tensor.fp8 import BY_ROW, BY_TENSOR, E4M3, E5M2, Cast, scale_of

FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}
"""Bits of the mantissa, least exponent of a number with all of them, largest number."""


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number of the format, of two as near the one whose last bit is 0."""
    bits, least, largest = FORMATS[dtype]
    if value == 0.0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, least)
    step = 2.0 ** (exponent - bits)
    assert abs(round(value / step) * step) <= largest
    return round(value / step) * step


def matrix(*shape: int) -> torch.Tensor:
    """Normal numbers whose rows and columns lie many powers of two apart."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=generator)
    rows, columns = (torch.randint(-9, 10, (size,), generator=generator) for size in shape)
    return torch.ldexp(torch.ldexp(x, rows.unsqueeze(1)), columns).bfloat16()


def stands_for(cast: Cast) -> torch.Tensor:
    return cast.values.float() * cast.inverse


@pytest.mark.parametrize("dtype", FORMATS)
def test_tensorwise_fp8_scale_brings_the_largest_element_into_the_upper_half(dtype):
    x = matrix(16, 48)
    both = BY_TENSOR.pair(x, dtype)
    scale = 1 / both.rows.inverse.item()
    assert math.log2(scale) % 1 == 0, "a power of two"
    assert FORMATS[dtype][2] / 2 < x.abs().max().item() * scale <= FORMATS[dtype][2]
    expected = [[rounded(value * scale, dtype) / scale for value in row] for row in x.tolist()]
    assert stands_for(both.rows).tolist() == expected
    assert torch.equal(stands_for(both.columns), stands_for(both.rows).t())


@pytest.mark.parametrize("dtype", FORMATS)
def test_each_row_has_its_own_scale_and_each_column_too(dtype):
    x = matrix(16, 48)
    for cast, wanted in zip(BY_ROW.pair(x, dtype), (x, x.t()), strict=True):
        assert cast.inverse.shape == (len(wanted), 1)
        for values, inverse, row in zip(cast.values, cast.inverse, wanted, strict=True):
            alone = BY_TENSOR.rows(row.unsqueeze(0), dtype)
            assert torch.equal(alone.values[0].float(), values.float()) and alone.inverse == inverse


@pytest.mark.parametrize("casts", [BY_TENSOR, BY_ROW])
def test_fp8_casts_of_rows_and_columns_match_the_joint_cast(casts):
    x = matrix(32, 16)
    for given in (x, x.t().contiguous().t()):
        both = casts.pair(given, E4M3)
        for cast, wanted in zip((casts.rows(given, E4M3), casts.columns(given, E4M3)), both, strict=True):
            assert torch.equal(cast.values.float(), wanted.values.float()) and torch.equal(cast.inverse, wanted.inverse)
            assert cast.values.is_contiguous() and wanted.values.is_contiguous()


def test_fp8_values_do_not_depend_on_the_scale_unless_they_underflow():
    """Which is why ranks need not agree on one, but for elements that fall out of the format."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    alone = stands_for(BY_TENSOR.rows(x, E4M3))
    beside = torch.cat([x, torch.full((1, 64), 40.0)])
    shared = stands_for(BY_TENSOR.rows(beside, E4M3))[:-1]
    large = x.abs() > 40.0 * 2.0**-14
    assert torch.equal(shared[large], alone[large]) and large.float().mean() > 0.9
    assert not torch.equal(shared, alone), "some do fall out"


@pytest.mark.parametrize("casts", [BY_TENSOR, BY_ROW])
@pytest.mark.parametrize("dtype", FORMATS)
def test_fp8_casts_keep_zeros_and_non_finite_numbers(casts, dtype):
    zeros = casts.rows(torch.zeros(16, 16, dtype=torch.bfloat16), dtype)
    assert not stands_for(zeros).any()
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(16, 16, dtype=torch.bfloat16)
        x[3, 5] = bad
        for cast, place in zip(casts.pair(x, dtype), ((3, 5), (5, 3)), strict=True):
            assert not math.isfinite(stands_for(cast)[place])


def test_scales_of_numbers_next_to_a_power_of_two():
    for exponent in (-90, -20, 0, 20, 100):
        for mantissa, expected in ((1.75, 0), (1.76, -1), (1.0, 0), (1.74, 0), (0.87, 1)):
            largest = torch.tensor(math.ldexp(mantissa, exponent))
            assert math.log2(scale_of(largest, E4M3).item()) == 8 + expected - exponent
