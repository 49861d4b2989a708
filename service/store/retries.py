"""A database that is locked, unreachable, full or read-only is so for a while: operations are retried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from service.pauses import growing_pauses

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_REFUSALS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)


def may_pass(error: BaseException) -> bool:
    """Whether the database may take the same operation later: it was locked, full, read-only or could not be reached.
    Not so where it understood the operation and refused it, nor for errors of ours."""
    return isinstance(error, DBAPIError | NoConnectionLeft | OSError) and not isinstance(error, _REFUSALS)


async def until_done(operation: Callable[[], Awaitable[T]]) -> T:
    """What `operation`, which reads or writes the database, answers; tried again until the database takes it. Raises
    what will not pass."""
    for pause in growing_pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS):
        try:
            return await operation()
        except Exception as error:
            if not may_pass(error):
                raise
            log.warning("the database does not answer (%s); again in %.1f s", _in_a_line(error), pause)
        await asyncio.sleep(pause)
    raise AssertionError("the pauses have no end")


def _in_a_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split())
