"""Numbers that JSON does not know, as words and back."""

import json
import math

import pytest

from manta.workers.protocol.json_codec import number, spell, spell_series


def test_non_finite_numbers_are_spelled_as_words_at_any_depth():
    assert spell({"a": float("nan"), "b": [float("-inf"), 1.5], "c": {"d": (math.inf, 2, "x", None, True)}}) == {
        "a": "nan",
        "b": ["-inf", 1.5],
        "c": {"d": ["inf", 2, "x", None, True]},
    }


def test_spelled_words_become_numbers_again():
    values = [math.inf, -math.inf, 1.5, 2, None, "infinite"]
    assert [number(each) for each in json.loads(json.dumps(spell(values), allow_nan=False))] == values
    assert math.isnan(number(spell(math.nan)))


@pytest.mark.parametrize("numbers", [
    [], [1.5, None, -2.0], [0.0, None], [1.0, math.inf], [-math.inf, 2.0], [math.inf, -math.inf], [None, math.nan],
    [1e308, 1e308], [-1e308, -1e308, 3.0],
])  # fmt: skip
def test_series_with_non_finite_numbers_is_encoded_like_single_values(numbers):
    assert spell_series(list(numbers)) == spell(numbers)
