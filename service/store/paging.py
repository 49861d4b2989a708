"""Pages of a list, and the opaque cursors between them. A cursor is only valid for the list that issued it, with the
same filter: in another one it would silently skip items, or repeat them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from manta.service.store.errors import ForeignCursor, InvalidCursor

T = TypeVar("T")
MAX_INTEGER = 2**63 - 1
_TAG_DIGITS = 8
_TAGGED = re.compile(rf"([0-9a-f]{{{_TAG_DIGITS}}})\.(.*)", re.DOTALL)


class Cursors:
    """The cursors of one list under one filter."""

    def __init__(self, name: str, /, **filters: str | int | None):
        """Of the list called `name`; `filters` with None filter nothing."""
        given = {key: value for key, value in filters.items() if value is not None}
        identity = json.dumps([name, given], sort_keys=True)
        self._tag = hashlib.sha256(identity.encode()).hexdigest()[:_TAG_DIGITS]

    def encode(self, text: str) -> str:
        """`text` as an opaque token that is safe in URLs."""
        return base64.urlsafe_b64encode(f"{self._tag}.{text}".encode()).decode().rstrip("=")

    def decode(self, cursor: str) -> str:
        """The input of `encode`. Raises InvalidCursor, ForeignCursor."""
        try:
            text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        except (binascii.Error, ValueError) as error:
            raise InvalidCursor from error
        parts = _TAGGED.fullmatch(text)
        if parts is None:
            raise InvalidCursor
        if parts[1] != self._tag:
            raise ForeignCursor
        return parts[2]

    def decode_number(self, cursor: str) -> int:
        """The non-negative integer in `cursor`. Raises InvalidCursor, ForeignCursor."""
        text = self.decode(cursor)
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_INTEGER):
            raise InvalidCursor
        return int(text)


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some items of a list."""

    items: list[T]
    """The items, in the list's order."""
    next_cursor: str | None
    """Where the next page begins; None if this is the last one."""

    @classmethod
    def of(cls, rows: list[T], limit: int, cursors: Cursors, key: Callable[[T], str]) -> Page[T]:
        """The page made of `rows`, of which one more than `limit` was fetched; `key` returns the content of an item's
        cursor."""
        items = rows[:limit]
        return cls(items, cursors.encode(key(items[-1])) if len(rows) > limit else None)
