"""Numbers that JSON does not know, spelled as words. Pure Python."""

from __future__ import annotations

import math
from typing import Any

NON_FINITE = ("nan", "inf", "-inf")
"""Spelling of numbers that JSON does not have, everywhere in Manta."""


def spell_series(numbers: list[float | None]) -> list[Any]:
    """`spell` for many numbers at once; each is checked only if their sum is not finite."""
    return numbers if math.isfinite(sum(filter(None, numbers))) else [spell(each) for each in numbers]


def spell(value: Any) -> Any:
    """`value` with every non-finite number in it, at any depth, as one of "nan", "inf", "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): spell(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [spell(entry) for entry in value]
    return value


def number(value: Any) -> Any:
    """The float that `spell` has spelled; anything else unchanged."""
    return float(value) if isinstance(value, str) and value in NON_FINITE else value
