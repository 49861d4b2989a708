"""Column types that keep what databases lose or refuse: NaN in real columns, non-finite numbers in JSON, invalid
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

from workers.nonfinite import number, spell

_UNUSUAL = re.compile(r"\\u(0000|d[89a-f])")
"""In JSON of nothing but ASCII: NUL, or half of a surrogate pair. Whole pairs look like that too."""

Reader = Session | Connection
"""What answers queries of columns, alike."""

BigKey = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit autoincrement key; SQLite counts up only in a column that is called INTEGER."""


class _PlainDouble(Double[float]):
    """A double whose values go to the driver as they are; SQLAlchemy's own would make a NaN of 'nan' again."""

    def bind_processor(self, dialect: Dialect) -> None:
        """No conversion."""
        return


class Real(TypeDecorator[float]):
    """A double that keeps NaN. SQLite turns a NaN into NULL, so there it is kept as the text 'nan'.

    Infinities are kept by all databases. NaN sorts above all numbers, on SQLite (text comes after numbers) as
    on PostgreSQL (by definition).
    """

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
    """A text of whatever origin in a column of limited length, which SQLite takes and PostgreSQL does not: what is too
    long is cut."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else storable(value)[: cast("String", self.impl_instance).length]


class AnyText(TypeDecorator[str]):
    """A text of whatever origin: an exception's message may hold what is no character to a database."""

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
    """`storable(spell(value))`. To write it down and look at the text takes a quarter of the time of going through it
    all, and most is as it is to be stored."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        return storable(spell(value))
    return storable(spell(value)) if _UNUSUAL.search(text) else value


def storable(value: Any) -> Any:
    """`value` with texts that every database takes: NUL and halves of surrogate pairs are spelled out, here and in all
    that it holds."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")
    if isinstance(value, dict):
        return {storable(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [storable(entry) for entry in value]
    return value
