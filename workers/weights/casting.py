"""Converts elements of one dtype to another, bit for bit as torch casts them, without torch: numpy has no bfloat16."""

from __future__ import annotations

import numpy

from workers.checkpoint.stored_rows import RAW

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtypes in which weights are written: their names in a job, and in torch."""
CHUNK = 2**16
"""Number of elements that are cast at once, which fit into a core's cache together with intermediate results."""
_NOT_A_NUMBER = 0x7FC0
"""Of bfloat16."""


class TooLarge(ValueError):
    """A finite number is beyond the largest of the dtype, and would become infinite."""

    def __init__(self, value: float):
        super().__init__(f"a value of {value:.4g}")
        self.value = value


def cast(values: numpy.ndarray, dtype: str, into: numpy.ndarray, to: str) -> None:
    """Put `values` of `dtype` into `into`, of `to`; both [rows, columns], as `stored_rows.RAW` says. Rounds to the
    nearest number, ties to even; fp64 becomes fp32 first, as in torch. Raises TooLarge for a finite number that fp16
    cannot represent."""
    if dtype == to:
        into[...] = values
        return
    if into.flags.c_contiguous and values.flags.c_contiguous:
        values, into = values.reshape(1, -1), into.reshape(1, -1)
    rows, columns = values.shape
    height, width = max(1, CHUNK // max(1, columns)), min(columns, CHUNK)
    room = numpy.empty(height * width, numpy.uint32)
    for row in range(0, rows, height):
        for column in range(0, columns, CHUNK):
            where = slice(row, row + height), slice(column, column + CHUNK)
            _cast(values[where], dtype, into[where], to, room)


def _cast(values: numpy.ndarray, dtype: str, into: numpy.ndarray, to: str, room: numpy.ndarray) -> None:
    single = _single(values if values.flags.aligned else values.copy(), dtype)
    if to == "float32":
        into[...] = single
    elif to == "bfloat16":
        _to_bfloat16(single, into, room[: single.size].reshape(single.shape))
    else:
        with numpy.errstate(over="ignore"):
            into[...] = single.astype(RAW[to])
        infinite = numpy.isinf(into) & numpy.isfinite(single)
        if infinite.any():
            raise TooLarge(float(numpy.abs(single[infinite]).max()))


def _single(values: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """As float32."""
    if dtype == "bfloat16":
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)
    return values.astype(numpy.float32, copy=False)


def _to_bfloat16(single: numpy.ndarray, into: numpy.ndarray, room: numpy.ndarray) -> None:
    """The upper half of each number's bits, after adding half a unit of its last place, minus one bit if that place is
    even. `room`: uint32, of the same shape."""
    bits = single.view(numpy.uint32)
    numpy.right_shift(bits, 16, out=room)
    numpy.bitwise_and(room, 1, out=room)
    numpy.add(room, bits, out=room)
    numpy.add(room, 0x7FFF, out=room)
    numpy.right_shift(room, 16, out=room)
    numpy.copyto(into, room, casting="unsafe")
    if numpy.isnan(single.max()):  # the addition may have turned it into another number
        into[numpy.isnan(single)] = _NOT_A_NUMBER
