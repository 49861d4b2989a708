"""Lists of the service, page by page, for commands that want all of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from api.schemas import Items

T = TypeVar("T")
PAGE = 1000
"""Items asked for at a time: the most that the service gives."""


def to_the_last(page_at: Callable[[str | None], Items[T]]) -> Iterator[T]:
    """All items of the list of which `page_at(cursor)` is the page at that cursor; None: the first."""
    cursor: str | None = None
    while True:
        page = page_at(cursor)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return
