"""Column types that preserve what databases lose or refuse: NaN in real columns, non-finite numbers in JSON, invalid
characters in texts."""

from __future__ import annotations

import json
import math
import re
from typing import Any, cast

from sqlalchemy import JSON, BigInteger, Connection, Double, Integer, String, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import Session
from sqlalchemy.types import TypeDecorator

from manta.workers.protocol.json_codec import number, spell

_UNUSUAL = re.compile(r"\\u(0000|d[89a-f])")
"""In ASCII-only JSON: NUL, or half of a surrogate pair. Complete pairs match as well."""

Reader = Session | Connection
"""Anything that answers column queries."""

BigKey = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit autoincrement key; SQLite only counts up in a column of type INTEGER."""


class _PlainDouble(Double[float]):
    """A double whose values are passed to the driver unchanged; SQLAlchemy's own would turn 'nan' into a NaN again."""

    def bind_processor(self, dialect: Dialect) -> None:
        """No conversion."""
        return


class Real(TypeDecorator[float]):
    """A double that keeps NaN. SQLite turns a NaN into NULL, so there it is kept as the text 'nan'. Infinities are kept
    by all databases. NaN sorts above all numbers, on SQLite (text comes after numbers) as on PostgreSQL (by
    definition)."""

    impl = _PlainDouble
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> Any:
        """To the database."""
        if value is not None and dialect.name == "sqlite" and math.isnan(value):
            return "nan"
        return value

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        """From the database."""
        return None if value is None else float(value)


class ShortText(TypeDecorator[str]):
    """Any text in a column of limited length. SQLite accepts longer texts and PostgreSQL does not, so they are
    truncated."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else storable(value)[: cast("String", self.impl_instance).length]


class AnyText(TypeDecorator[str]):
    """Any text: an exception's message may contain characters that a database refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else storable(value)


class Document(TypeDecorator[Any]):
    """A JSON value in which non-finite numbers are spelled out, since JSON has none."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """To the database."""
        return _as_json_has_it(value)


class Numbers(TypeDecorator[dict[str, float | int | None]]):
    """A flat JSON object of numbers; non-finite ones come back as numbers."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """To the database."""
        return _as_json_has_it(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """From the database."""
        return None if value is None else {name: number(entry) for name, entry in value.items()}


def _as_json_has_it(value: Any) -> Any:
    """`storable(spell(value))`. Serializing it and checking the text takes a quarter of the time of walking through it,
    and most values need no change."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        return storable(spell(value))
    return storable(spell(value)) if _UNUSUAL.search(text) else value


def storable(value: Any) -> Any:
    """`value` with texts that every database accepts: NUL and halves of surrogate pairs are escaped, at any depth."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")
    if isinstance(value, dict):
        return {storable(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [storable(entry) for entry in value]
    return value
