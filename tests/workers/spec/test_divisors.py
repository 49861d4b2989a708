"""Sizes that divide, nearest to those that were asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manta.workers.spec.divisors import nearest_divisor, nearest_multiple


@given(st.integers(1, 400), st.integers(1, 500))
def test_nearest_divisor_of_a_number_is_found(of, to):
    expected = min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: (abs(d - to), d))
    assert nearest_divisor(of, to) == expected


def test_nearest_divisor_of_a_large_number_is_found_at_once():
    assert nearest_divisor(10**12, 999_983) == 10**6
    assert nearest_divisor(999_999_999_989, 1000) == 1  # a prime


@given(st.integers(1, 50), st.integers(1, 10**30))
def test_nearest_multiple_of_a_number_is_found(of, to):
    near = nearest_multiple(of, to)
    assert near > 0
    assert near % of == 0
    assert abs(near - to) * 2 <= of or near == of
