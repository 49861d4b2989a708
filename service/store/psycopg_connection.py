"""A connection to PostgreSQL with a time limit for every answer."""

from __future__ import annotations

import select
import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

T = TypeVar("T")


class BoundedConnection(psycopg.Connection[Any]):
    """psycopg's connection; a server that does not answer within `answer_seconds` counts as gone.

    The server's own limits (`statement_timeout`) do not help if it stands still, and neither do TCP's: its kernel still
    acknowledges everything.
    """

    answer_seconds: float | None = None
    """None: no limit."""

    @property
    def has_unread(self) -> bool:
        """Whether the server has sent something without a request, which most likely announces the end of the
        connection."""
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self, gen: Generator[Any, Any, T], interval: float = 0.1) -> T:
        """Raises psycopg.OperationalError if it takes too long; the connection is then closed."""
        return super().wait(gen if self.answer_seconds is None else self._bounded(gen, self.answer_seconds), interval)

    def _bounded(self, gen: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
        deadline = time.monotonic() + seconds
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()  # a late answer is not wanted
                    raise psycopg.OperationalError(f"the server gave no answer in {seconds:g} s")
                wanted = gen.send(ready)
        except StopIteration as end:
            value: T = end.value
            return value
