"""Elements cast without torch: the bits that torch gives them."""

from __future__ import annotations

import numpy
import pytest
import torch

from manta.workers.checkpoint.stored_rows import RAW
from manta.workers.weights.stream_out import CHUNK, TooLarge, cast

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), 1e-45, -1e-40, 3.4028235e38, 65504.0, 65000.0, 5.9e-8, 2.0**-14]
COUNT = 2 * CHUNK + 16


def numbers(dtype: torch.dtype, most: float) -> torch.Tensor:
    """Of all sizes; the special ones; and what lies on, or beside, the middle between two numbers of bfloat16 and
    float16."""
    bits = torch.randint(-(2**31), 2**31, (COUNT,), generator=torch.Generator().manual_seed(2)).int()
    bits[: COUNT // 2] &= ~0x1FFF  # middles between numbers of float16 among them
    bits[: COUNT // 4] = (bits[: COUNT // 4] & ~0xFFFF) | 0x8000  # and of bfloat16
    bits[10:20] += 1
    values = bits.view(torch.float32)
    values[20 : 20 + len(SPECIAL)] = torch.tensor(SPECIAL)
    values = torch.where(values.isnan() | ((values.abs() > most) & values.isfinite()), 0.1, values)
    return values.to(dtype)


def raw(tensor: torch.Tensor) -> numpy.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 8, COUNT])
def test_cast_has_the_bits_of_torchs(dtype, to, columns):
    most = 65000.0 if torch.float16 in (dtype, to) else 3e38
    values = numbers(dtype, most).view(-1, columns)
    into = numpy.empty(values.shape, RAW[name_of(to)])
    cast(raw(values), name_of(dtype), into, name_of(to))
    assert into.tobytes() == raw(values.to(to)).tobytes()


def test_cast_handles_columns_of_wider_arrays_and_odd_addresses():
    values = numbers(torch.float32, 3e38).view(-1, 16)
    odd = numpy.empty(values.numel() * 4 + 1, numpy.uint8)[1:].view("<f4").reshape(values.shape)
    odd[...] = values.numpy()
    into = numpy.zeros((len(values), 40), "<u2")
    cast(odd, "float32", into[:, 20:36], "bfloat16")
    assert numpy.array_equal(into[:, 20:36], raw(values.bfloat16()))
    assert not into[:, :20].any() and not into[:, 36:].any()


def test_nan_stays_nan_when_cast_to_bf16():
    values = numpy.array([[0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000]], numpy.uint32).view("<f4")
    into = numpy.empty((1, 4), "<u2")
    cast(values, "float32", into, "bfloat16")
    assert torch.from_numpy(into).view(torch.bfloat16).isnan().tolist() == [[True, True, True, False]]


def test_cast_refuses_numbers_too_large_for_float16_but_not_infinity():
    into = numpy.empty((1, 3), "<f2")
    cast(numpy.array([[numpy.inf, -numpy.inf, 65504.0]], "<f4"), "float32", into, "float16")
    assert into.tolist() == [[numpy.inf, -numpy.inf, 65504.0]]
    with pytest.raises(TooLarge, match=r"a value of 7e\+04"):
        cast(numpy.array([[1.0, -70000.0, 66000.0]], "<f4"), "float32", into, "float16")
