"""A database may be locked, unreachable, full or read-only for a while: operations are retried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from service.backoff import backoff

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_REFUSALS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)


def may_pass(error: BaseException) -> bool:
    """Whether the database may accept the same operation later: it was locked, full, read-only or unreachable. False if
    it understood and refused the operation, and for errors of this program."""
    return isinstance(error, DBAPIError | NoConnectionLeft | OSError) and not isinstance(error, _REFUSALS)


async def until_done(operation: Callable[[], Awaitable[T]]) -> T:
    """The result of `operation`, which reads or writes the database; retried until the database accepts it. Raises
    permanent errors."""
    for pause in backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS):
        try:
            return await operation()
        except Exception as error:
            if not may_pass(error):
                raise
            log.warning("the database does not answer (%s); again in %.1f s", in_a_line(error), pause)
        await asyncio.sleep(pause)
    raise AssertionError("the pauses have no end")


def in_a_line(error: Exception) -> str:
    """What a log says about `error`, without the values in its statement."""
    return " ".join(str(getattr(error, "orig", None) or error).split())
