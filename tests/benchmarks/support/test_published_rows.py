"""What it takes for a number to agree with a printed one."""

from __future__ import annotations

import pytest

from benchmarks.support.published.arithmetic import from_inputs
from benchmarks.support.published.memory import evaluated, zero_bytes
from benchmarks.support.published.rows import Row, is_printed_as, last_digit, rank_correlation


@pytest.mark.parametrize(("printed", "unit"), [(126, 1.0), (39.15, 0.01), (1.16, 0.01), (90.0, 1.0), (0.2431, 0.0001)])
def test_last_digit_of_a_printed_number_is_its_unit(printed: float, unit: float) -> None:
    assert last_digit(printed) == pytest.approx(unit)


@pytest.mark.parametrize(
    ("value", "printed", "agrees"),
    [
        (41.25, 41.3, True),  # rounded
        (2218.75, 2218, True),  # cut
        (2217.4, 2218, False),
        (2219.0, 2218, False),
        (0.117, 0.12, True),
        (0.126, 0.12, True),
        (0.131, 0.12, False),
    ],
)
def test_published_number_matches_a_rounded_or_truncated_value(value: float, printed: float, agrees: bool) -> None:
    assert is_printed_as(value, printed) is agrees
    assert Row("table", "case", printed, value, "1").met is agrees


def test_published_row_allows_for_rounding_of_its_inputs() -> None:
    # 10 / 3 with an input of 2.5 to 3.5
    row = from_inputs("table", "case", 4, "1", lambda x: 10 / x, 3)
    assert row.met and not from_inputs("table", "case", 5, "1", lambda x: 10 / x, 3).met


def test_published_row_tolerance_is_relative_or_absolute() -> None:
    assert Row("t", "c", 60.1, 63.0, "s", "relative", 0.05).met
    assert not Row("t", "c", 60.1, 63.2, "s", "relative", 0.05).met
    assert not Row("t", "c", 0.1055, 0.1096, "1", "absolute", 0.004).met
    assert Row("t", "c", 1.0, 2.0, "s", "none").met is None


def test_rank_correlation_measures_order_only() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 2, 4], [1, 3, 2, 4]) < 1.0
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2], [1, 1, 3]) == pytest.approx(1)


def test_table_formulas_are_evaluated_without_arbitrary_code() -> None:
    assert evaluated("s*b*(10+24/t)", {"s": 2, "b": 3, "t": 8}) == 78
    with pytest.raises(ValueError, match="is not a formula"):
        evaluated("__import__('os')", {"s": 1})


def test_zero_bytes_follow_the_zero_stage() -> None:
    assert [zero_bytes(1.0, 4, stage) for stage in range(4)] == [16, 7, 5.5, 4]
