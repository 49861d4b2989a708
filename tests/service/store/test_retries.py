"""What a database may take later is tried again, after growing pauses; what it has refused is not."""

import asyncio
import contextlib
import sqlite3
from itertools import islice, pairwise

import pytest
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from manta.service.states import JobState
from manta.service.store.database import may_pass, until_done
from manta.service.store.errors import IllegalTransition
from manta.service.tasks import backoff, backoff_after
from tests.service.support.virtual_time import VirtualTimeLoop


def failing(kind, text):
    return kind("INSERT", {}, sqlite3.Error(text))


PASSING = [
    failing(OperationalError, "database is locked"),
    failing(OperationalError, "database or disk is full"),
    failing(OperationalError, "attempt to write a readonly database"),
    failing(OperationalError, "server closed the connection unexpectedly"),
    NoConnectionLeft(),
    PermissionError(13, "Permission denied"),
]
LASTING = [
    failing(IntegrityError, "UNIQUE constraint failed"),
    failing(ProgrammingError, "no such column"),
    IllegalTransition("job_0", JobState.QUEUED, target=JobState.RUNNING),
    ValueError("ours"),
]


def in_virtual_seconds(operation):
    """Let `until_done` have its way with it, on a clock of its own: the seconds at which it was tried, and its end."""
    loop, tries = VirtualTimeLoop(), []

    async def noted():
        tries.append(loop.time())
        return await operation()

    async def end():
        return (await asyncio.gather(until_done(noted), return_exceptions=True))[0]

    with contextlib.closing(loop):
        return tries, loop.run_until_complete(end())


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_error_that_may_pass_is_retried_with_growing_pauses_until_success(error):
    left = [error] * 9

    async def operation():
        if left:
            raise left.pop()
        return "done"

    tries, end = in_virtual_seconds(operation)
    assert end == "done"
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


@pytest.mark.parametrize("error", LASTING, ids=str)
def test_lasting_error_is_raised_without_a_retry(error):
    async def operation():
        raise error

    assert not may_pass(error)
    assert in_virtual_seconds(operation) == ([0.0], error)


def test_backoff_doubles_with_the_number_of_tries_up_to_the_maximum():
    pauses = list(islice(backoff(0.25, 10.0), 9))
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert [backoff_after(tries, 0.25, 10.0) for tries in range(9)] == pauses
    assert backoff_after(100_000, 0.25, 60.0) == 60.0
