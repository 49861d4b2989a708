"""What a database may take later is tried again; what it has refused is not."""

import asyncio
import sqlite3

import pytest
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from service.pauses import growing_pauses
from service.states import JobState
from service.store import IllegalTransition, retries
from service.store.retries import may_pass, until_done


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


@pytest.fixture
def pauses(monkeypatch):
    """Those that were made, without making them."""
    made = []

    async def sleep(seconds):
        made.append(seconds)

    monkeypatch.setattr(retries.asyncio, "sleep", sleep)
    return made


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_what_may_pass_is_tried_until_it_is_done(pauses, error):
    left = [error] * 9

    async def operation():
        if left:
            raise left.pop()
        return "done"

    assert asyncio.run(until_done(operation)) == "done"
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("error", LASTING, ids=str)
def test_what_was_refused_comes_out(pauses, error):
    async def operation():
        raise error

    assert not may_pass(error)
    with pytest.raises(type(error)):
        asyncio.run(until_done(operation))
    assert pauses == []


def test_pauses_grow_to_the_longest():
    pauses = growing_pauses(1.0, 3.0)
    assert [next(pauses) for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
