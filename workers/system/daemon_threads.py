"""Work on a separate thread for which neither an event loop nor the end of the process waits: a file system or a store
that does not answer blocks that thread and no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """The result of `work`, or the exception that it raises. A caller that stops waiting for it does not cancel it."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def answered_within(seconds: float, name: str, work: Callable[[], T]) -> T:
    """The result of `work`, or the exception that it raises. Raises TimeoutError, which is an OSError, if that takes
    longer."""
    return in_daemon_thread(name, work).result(seconds)
