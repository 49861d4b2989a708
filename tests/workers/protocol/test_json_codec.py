"""Values as JSON, numbers that are not finite included."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from manta.workers.protocol.json_codec import (
    JsonObject,
    MalformedMessage,
    codec_of,
    from_json,
    number,
    spell,
    spell_series,
    to_json,
)


@dataclass(frozen=True)
class Inner:
    x: float
    name: str = "n"


@dataclass(frozen=True)
class Message:
    number: int
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    by_name: dict[str, float] = field(default_factory=dict)
    word: Literal["a", "b"] = "a"
    flag: bool = False
    open: JsonObject = field(default_factory=dict)


FULL = Message(3, Inner(1.5), (Inner(0.1), Inner(2.0, "m")), {"a": 0.25}, "b", True, {"any": [1, {"x": None}]})


@pytest.mark.parametrize("message", [FULL, Message(0)])
def test_message_survives_a_json_round_trip(message):
    assert from_json(Message, json.loads(json.dumps(to_json(message)))) == message


def test_decoding_ignores_unknown_keys_and_defaults_missing_ones():
    assert from_json(Message, {"number": 1, "inner": {"x": 2.0, "new": 1}, "newer": []}) == Message(1, Inner(2.0))


def test_json_codec_keeps_all_bits_of_floats_and_accepts_integers():
    assert from_json(Inner, json.loads(json.dumps(to_json(Inner(0.1 + 0.2))))).x == 0.1 + 0.2
    read = from_json(Inner, {"x": 2}).x
    assert (read, type(read)) == (2.0, float)


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ([1], "Message is a JSON object"),
        ({}, "Message without number"),
        ({"number": "1"}, "Message.number: must be int"),
        ({"number": True}, "Message.number: must be int"),
        ({"number": 1, "inner": {}}, "Message.inner: Inner without x"),
        ({"number": 1, "many": {}}, "Message.many: must be a list"),
        ({"number": 1, "many": [{"x": "1"}]}, "Message.many: Inner.x: must be float"),
        ({"number": 1, "by_name": []}, "Message.by_name: must be an object"),
        ({"number": 1, "flag": 1}, "Message.flag: must be bool"),
        ({"number": 1, "word": 1}, "Message.word: must be str"),
        ({"number": 1, "open": 1}, "Message.open: must be dict"),
    ],
)
def test_json_codec_error_names_the_wrong_field(document, what):
    with pytest.raises(MalformedMessage, match=what):
        from_json(Message, document)


def test_decoding_accepts_an_unknown_word():
    assert from_json(Message, {"number": 1, "word": "c"}).word == "c"


@pytest.mark.parametrize(
    "kind", [set[int], int | str, int | str | None, tuple[int, int], tuple[int], dict[int, str], list, complex]
)
def test_codec_of_an_unsupported_type_is_refused(kind):
    with pytest.raises(TypeError, match="cannot cross"):
        codec_of(kind)


def test_json_codec_passes_any_and_none_through():
    for kind in (Any, type(None)):
        codec = codec_of(kind)
        assert codec.encode(None) is codec.decode(None) is None
    assert codec_of(Any).decode([1, {"x": None}]) == [1, {"x": None}]


class Own:
    """Knows its own JSON."""

    def __init__(self, x):
        self.x = x

    def to_json(self):
        return [self.x]

    @classmethod
    def from_json(cls, document):
        return cls(document[0])


def test_codec_uses_a_class_own_json_methods():
    codec = codec_of(list[Own])
    assert codec.encode([Own(7)]) == [[7]]
    assert [each.x for each in codec.decode([[7]])] == [7]


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
