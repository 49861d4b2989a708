"""Hours of waiting in a moment: an event loop whose clock jumps to the next timer whenever nothing else is to be done.

Nothing may run on other threads meanwhile, since the clock would not wait for them: `in_virtual_time` carries out at
once what would have been handed to one.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from manta.service.job.context import FolderReader
from manta.service.store import Store
from manta.workers.checkpoint.catalog import list_checkpoints

BEGAN = 1_800_000_000.0
"""What the wall clock says at the beginning, in Unix seconds."""
MAX_TURNS_AT_A_TIME = 20_000
"""Turns of the loop after which the clock moves as a real one would have long before: who waits for the rest of a time,
a rounding error, would otherwise wait for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that nobody will do"
            self._turns = 0 if timeout > 0 else self._turns + 1
            self.now += timeout if self._turns < MAX_TURNS_AT_A_TIME else 1e-6
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its time is virtual seconds since it was made."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now


def run_with_answers_at_once(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` on such a loop; what it hands to a thread is carried out at once."""
    loop = VirtualTimeLoop()
    loop.run_in_executor = lambda executor, function, *arguments: asyncio.sleep(0, function(*arguments))  # type: ignore[method-assign, assignment]
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def in_virtual_time(monkeypatch: pytest.MonkeyPatch, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `body` on such a loop, with clocks that go by it."""
    loop = VirtualTimeLoop()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: BEGAN + loop.time())
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(asyncio, "to_thread", _upload_slots)
        patch.setattr(Store, "write_async", _write)
        patch.setattr(FolderReader, "list", _list)
        patch.setattr("manta.service.control.data_checks.in_daemon_thread", _future)
        try:
            loop.run_until_complete(body())
        finally:
            loop.run_until_complete(_cancel_all())
            loop.close()


async def _upload_slots(work: Callable[..., Any], *arguments: Any) -> Any:
    await asyncio.sleep(0)
    return work(*arguments)


async def _write(self: Store, operation: Callable[[Any], Any]) -> Any:
    await asyncio.sleep(0)
    return self.write(operation)


async def _list(self: FolderReader, folder: Any, seconds: float = 0.0, job: str | None = None) -> Any:
    return list_checkpoints(folder, job)


def _future(name: str, work: Callable[[], Any]) -> Future[Any]:
    answer: Future[Any] = Future()
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
        answer.set_exception(error)
    return answer


async def _cancel_all() -> None:
    tasks: set[Awaitable[Any]] = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
    for task in tasks:
        task.cancel()  # type: ignore[attr-defined]
    await asyncio.gather(*tasks, return_exceptions=True)
