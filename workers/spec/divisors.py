"""Divisors and multiples nearest to a number. Pure Python."""

from __future__ import annotations

import math


def nearest_divisor(of: int, to: int) -> int:
    """The divisor of `of` nearest to `to` (the smaller of two equally near)."""
    return min(divisors(of), key=lambda d: (abs(d - to), d))


def divisors(of: int) -> list[int]:
    """All divisors of `of`, in ascending order."""
    small = [d for d in range(1, math.isqrt(of) + 1) if of % d == 0]
    return sorted({*small, *(of // d for d in small)})


def nearest_multiple(of: int, to: int) -> int:
    """The positive multiple of `of` nearest to `to` (the smaller of two equally near)."""
    below = to // of * of
    return max(of, below if to - below <= of // 2 else below + of)
