"""One published number next to ours, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

Measure = Literal["printed", "inputs", "relative", "absolute", "none"]
"""How two numbers are held against each other. printed: equal to the last printed digit, rounded or cut; inputs: the
published one is reached for some values of its inputs that are printed as they are; relative, absolute: closer than the
tolerance; none: shown only."""


@dataclass(frozen=True)
class Row:
    """A published number and ours."""

    reference: str
    """Name of the table, as its file is called."""
    case: str
    """Which of its numbers."""
    published: float
    predicted: float
    unit: str
    measure: Measure = "printed"
    tolerance: float = 0.0
    """Most that the error may be; with `inputs` half the width of what their rounding leaves open."""

    @property
    def error(self) -> float:
        """Predicted less published: a ratio to it, or with absolute the difference."""
        difference = self.predicted - self.published
        if self.measure == "absolute":
            return difference
        return difference / self.published if self.published else difference

    @property
    def met(self) -> bool | None:
        """Whether they agree; None where the row is shown only."""
        if self.measure == "none":
            return None
        if self.measure == "printed":
            return is_printed_as(self.predicted, self.published)
        if self.measure == "inputs":
            return abs(self.predicted - self.published) <= self.tolerance + last_digit(self.published) / 2
        return abs(self.error) <= self.tolerance + 1e-12

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "reference": self.reference,
            "case": self.case,
            "published": self.published,
            "predicted": float(f"{self.predicted:.6g}"),
            "unit": self.unit,
            "error": float(f"{self.error:.3g}"),
            "measure": self.measure,
            "tolerance": float(f"{self.tolerance:.3g}"),
            "met": self.met,
        }


def last_digit(printed: float) -> float:
    """What one unit of the last printed digit of a number is worth."""
    exponent = Decimal(repr(printed)).as_tuple().exponent
    assert isinstance(exponent, int)
    # A float without decimals is written with one.
    return 1.0 if float(printed).is_integer() else 10.0**exponent


def is_printed_as(value: float, printed: float) -> bool:
    """Whether `value` rounded, or cut, to the digits of `printed` is that number."""
    unit, slack = last_digit(printed), 1e-9 * max(1.0, abs(printed))
    rounded = abs(value - printed) <= unit / 2 + slack
    cut = math.isclose(math.floor(value / unit + slack) * unit, printed, rel_tol=1e-9)
    return rounded or cut


def printed_range(printed: float) -> tuple[float, float]:
    """The values that are rounded to this number."""
    half = last_digit(printed) / 2
    return printed - half, printed + half


def ranks_of(values: Sequence[float]) -> list[float]:
    """The place of each value among all, equal ones sharing the mean of theirs."""
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the places of two lists; 1 for lists without differences."""
    places = ranks_of(first), ranks_of(second)
    means = [sum(each) / len(each) for each in places]
    spread = [sum((place - mean) ** 2 for place in each) for each, mean in zip(places, means, strict=True)]
    if 0 in spread:
        return 1.0
    shared = sum((a - means[0]) * (b - means[1]) for a, b in zip(*places, strict=True))
    return shared / math.sqrt(spread[0] * spread[1])
