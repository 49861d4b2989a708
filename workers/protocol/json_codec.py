"""Dataclasses as JSON and back: the only codec for everything that is sent between processes. Pure Python.

Made for two releases that talk to each other: keys that the reader does not know are ignored, keys that the writer did
not send get the field's default. Supported are str, int, float, bool, None, literals (of which only the type is
checked), lists, tuples of any length, dicts with string keys, dataclasses, classes with their own `to_json` and
`from_json`, and open JSON objects (`JsonObject`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

from manta.workers.errors import MantaError

JsonObject = dict[str, Any]
"""A JSON object whose keys are defined elsewhere: a JobSpec, a row of metrics, an event's data. Its contents are not
inspected."""

T = TypeVar("T")
_SCALARS: dict[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (float, int)}

NON_FINITE = ("nan", "inf", "-inf")
"""Spelling of numbers that JSON does not have, everywhere in Manta."""


class MalformedMessage(MantaError):
    """A message does not have the form that is defined for it; the sentence names type and field."""


@dataclass(frozen=True)
class Codec:
    """How values of one type are converted to JSON and back. `decode` raises MalformedMessage."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def to_json(message: Any) -> JsonObject:
    """A dataclass as a JSON object."""
    cls: Any = type(message)
    return {name: codec.encode(getattr(message, name)) for name, codec, _ in _fields(cls)}


def from_json(cls: type[T], document: Any) -> T:
    """The dataclass `cls` from a JSON object. Raises MalformedMessage if a field without a default is missing, or one
    has the wrong type."""
    if not isinstance(document, dict):
        raise MalformedMessage(f"{cls.__name__} is a JSON object, not {document!r:.80}")
    kind: Any = cls
    values = {}
    for name, codec, required in _fields(kind):
        if name in document:
            try:
                values[name] = codec.decode(document[name])
            except MalformedMessage as error:
                raise MalformedMessage(f"{cls.__name__}.{name}: {error}") from None
        elif required:
            raise MalformedMessage(f"{cls.__name__} without {name}, which has no default")
    return cls(**values)


@functools.cache
def codec_of(kind: Any) -> Codec:
    """The codec of a type, given as an annotation. Raises TypeError for an unsupported type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SCALARS:
        return Codec(_same, functools.partial(_scalar, _SCALARS[kind]))
    if kind is Any or kind is type(None):
        return Codec(_same, _same)
    if kind == JsonObject:
        return Codec(_same, functools.partial(_scalar, (dict,)))
    if hasattr(kind, "to_json") and hasattr(kind, "from_json"):
        return Codec(kind.to_json, kind.from_json)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return Codec(to_json, functools.partial(from_json, kind))
    if origin is Literal:
        return Codec(_same, functools.partial(_scalar, tuple({type(value) for value in arguments})))
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        return _optional(codec_of(next(argument for argument in arguments if argument is not type(None))))
    if origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis):
        return _sequence(origin, codec_of(arguments[0]))
    if origin is dict and arguments[0] is str:
        return _mapping(codec_of(arguments[1]))
    raise TypeError(f"{kind} cannot cross a border between processes")


@functools.cache
def _fields(cls: Any) -> tuple[tuple[str, Codec, bool], ...]:
    """Name, codec, and whether it must be sent, of each field."""
    hints, missing = typing.get_type_hints(cls), dataclasses.MISSING
    return tuple(
        (field.name, codec_of(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
    )


def _same(value: Any) -> Any:
    return value


def _scalar(allowed: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise MalformedMessage(f"must be {' or '.join(each.__name__ for each in allowed)}, not {value!r:.80}")
    return float(value) if float in allowed else value


def _optional(inner: Codec) -> Codec:
    return Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda value: None if value is None else inner.decode(value),
    )


def _sequence(kind: Any, inner: Codec) -> Codec:
    def decode(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise MalformedMessage(f"must be a list, not {value!r:.80}")
        return kind(map(inner.decode, value))

    return Codec(lambda value: list(map(inner.encode, value)), decode)


def _mapping(inner: Codec) -> Codec:
    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MalformedMessage(f"must be an object, not {value!r:.80}")
        return {name: inner.decode(each) for name, each in value.items()}

    return Codec(lambda value: {name: inner.encode(each) for name, each in value.items()}, decode)


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
