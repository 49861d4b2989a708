"""Calls of Ray's own functions, which block: on separate threads, with a time limit, and with an error of ours if Ray
does not answer. What could not be read is an error, never an empty answer."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from manta.service.cluster.errors import ClusterUnavailable

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 8
CALL_SECONDS = 60.0
"""How long a call may take: a Ray that pauses for half a minute and continues costs nothing but that time."""


class RayConnection:
    """A connected Ray. `module` is the `ray` module as `RayHead.connect` returns it."""

    def __init__(self, module: Any, seconds: float = CALL_SECONDS, threads: int = THREADS):
        """`seconds`: time after which a call is given up; `threads`: number of simultaneous calls."""
        self.module = module
        self._seconds, self._threads = seconds, RayThreads(threads)
        self._reads: dict[Callable[[], Any], asyncio.Task[Any]] = {}

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The result of `function`, without blocking the loop. Raises ClusterUnavailable for what Ray raises, if it
        takes too long, and at once while all threads are blocked by calls that took too long."""
        if self._threads.all_hang:
            raise ClusterUnavailable(TimeoutError(f"Ray has not answered {self._threads.count} calls"))
        call = self._threads.submit(functools.partial(function, *arguments, **named))
        answer = asyncio.wrap_future(call)
        try:
            await asyncio.wait({answer}, timeout=self._seconds)
            if not answer.done():
                raise ClusterUnavailable(TimeoutError(f"Ray did not answer within {self._seconds:g} s"))
            return answer.result()
        except self.module.exceptions.RayError as error:
            raise ClusterUnavailable(error) from error
        finally:
            if not answer.done():
                self._threads.give_up(call)

    async def read(self, function: Callable[[], T]) -> T:
        """`run` for what is asked often and may be slightly old: all callers that ask while an answer is outstanding
        share that answer, so that they do not use up the threads when Ray hangs."""
        reading = self._reads.get(function)
        if reading is None:
            reading = self._reads[function] = asyncio.create_task(self.run(function))
            reading.add_done_callback(lambda task: self._forget(function, task))
        return await asyncio.shield(reading)

    def _forget(self, function: Callable[[], Any], task: asyncio.Task[Any]) -> None:
        del self._reads[function]
        if not task.cancelled():
            task.exception()  # a caller that still waits gets the exception

    async def kill(self, actor: Any) -> None:
        """Kill an actor without notice; an actor that is gone is not an error."""
        await self.run(self.module.kill, actor, no_restart=True)

    async def find(self, names: list[str]) -> list[Any | None]:
        """Handles of the actors with these names; None for one that is gone. Raises ClusterUnavailable if Ray does not
        say."""
        return await self.run(self._find_all, names)

    async def actor_names(self) -> list[str]:
        """Names of all named actors."""
        return [str(name) for name in await self.run(self.module.util.list_named_actors)]

    async def actor_names_in_other_namespaces(self) -> list[str]:
        """Names of all named actors in other namespaces than ours."""
        listed = await self.run(self.module.util.list_named_actors, all_namespaces=True)
        own = self.module.get_runtime_context().namespace
        return [str(each["name"]) for each in listed if each["namespace"] != own]

    def _find_all(self, names: list[str]) -> list[Any | None]:
        there = set(self.module.util.list_named_actors())
        return [self._find(name) if name in there else None for name in names]

    def _find(self, name: str) -> Any | None:
        try:
            return self.module.get_actor(name)
        except ValueError as error:  # it is gone, or could not be looked up
            if name in self.module.util.list_named_actors():
                raise ClusterUnavailable(error) from error
            return None


def detached(name: str, concurrency: int) -> dict[str, Any]:
    """Options of an actor that outlives the control plane, can be looked up by `name`, and answers `concurrency` calls
    at the same time."""
    return {"name": name, "lifetime": "detached", "num_cpus": 0, "max_restarts": 0, "max_concurrency": concurrency}


class RayThreads:
    """At most `count` simultaneous calls; others wait for a thread."""

    def __init__(self, count: int):
        self.count = count
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._abandoned: set[Future[Any]] = set()
        self._started: list[threading.Thread] = []

    @property
    def all_hang(self) -> bool:
        """Whether every thread is in a call that its caller has given up."""
        return len(self._abandoned) >= self.count

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
            self._abandoned.add(call)
            call.add_done_callback(self._abandoned.discard)

    def _work(self) -> None:
        while True:
            future, function = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - it belongs to the caller that waits
                    future.set_exception(error)
            del future, function  # nothing is kept alive while this waits
