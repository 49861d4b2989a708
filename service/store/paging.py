"""Pages of a list, and the opaque cursors between them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.store.errors import InvalidCursor

T = TypeVar("T")
_LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some items of a list."""

    items: list[T]
    """The items, in the list's order."""
    next_cursor: str | None
    """Where the next page begins; None when this is the last one."""

    @classmethod
    def of(cls, rows: list[T], limit: int, key: Callable[[T], str]) -> Page[T]:
        """The page made of `rows`, of which one more than `limit` was fetched; `key` yields an item's cursor."""
        items = rows[:limit]
        return cls(items, encode_cursor(key(items[-1])) if len(rows) > limit else None)


def encode_cursor(text: str) -> str:
    """`text` as an opaque token that is safe in URLs."""
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> str:
    """What `encode_cursor` was given. Raises InvalidCursor."""
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise InvalidCursor from error


def decode_number(cursor: str) -> int:
    """The non-negative integer in `cursor`. Raises InvalidCursor."""
    text = decode_cursor(cursor)
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _LARGEST_INTEGER):
        raise InvalidCursor
    return int(text)
