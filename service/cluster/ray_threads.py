"""Threads for calls that may hang: few and separate, and none prevents the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class RayThreads:
    """At most `count` simultaneous calls; others wait for a thread."""

    def __init__(self, count: int):
        self.count = count
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._given_up: set[Future[Any]] = set()
        self._started: list[threading.Thread] = []

    @property
    def all_hang(self) -> bool:
        """Whether every thread is in a call that its caller has given up."""
        return len(self._given_up) >= self.count

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have one of the threads call `function`."""
        if len(self._started) < self.count:
            thread = threading.Thread(target=self._work, name=f"ray-{len(self._started)}", daemon=True)
            self._started.append(thread)
            thread.start()
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def give_up(self, call: Future[Any]) -> None:
        """Nobody waits for `call` any more: it is not started, or its thread is left to it until it returns."""
        if not call.cancel():
            self._given_up.add(call)
            call.add_done_callback(self._given_up.discard)

    def _work(self) -> None:
        while True:
            future, function = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - it belongs to the caller that waits
                    future.set_exception(error)
            del future, function  # nothing is kept alive while this waits
