"""The squared norm of a gradient as a GPU sums it up, in rows of its own length."""

from __future__ import annotations

import pytest
import torch

from workers.parallel.data import gradient_norm


@pytest.mark.parametrize("length", [64, gradient_norm._LONG_ROW, 3 * gradient_norm._LONG_ROW + 640])
def test_long_rows_and_what_is_left_of_them_give_every_elements_square(length: int) -> None:
    part = torch.randn(length, generator=torch.Generator().manual_seed(1))
    square = gradient_norm._square_by_long_rows(part)
    assert square.dtype == torch.float64 and square.shape == ()
    torch.testing.assert_close(square, part.double().square().sum(), rtol=1e-6, atol=0.0)
