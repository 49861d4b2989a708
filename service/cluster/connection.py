"""Calls of Ray's own functions, which block: on threads of their own, for a limited time, and with an error of ours
where Ray does not answer. What could not be read is an error, never an empty answer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from service.cluster.errors import ClusterUnavailable
from service.cluster.ray_threads import RayThreads

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 8
CALL_SECONDS = 60.0
"""How long a call may take: a Ray that stands still for half a minute and continues costs nothing but that time."""


class RayConnection:
    """A connected Ray. `module` is the `ray` module as `RayHead.connect` returns it."""

    def __init__(self, module: Any, seconds: float = CALL_SECONDS, threads: int = THREADS):
        """`seconds`: after which a call is given up; `threads`: calls at a time."""
        self.module = module
        self._seconds, self._threads = seconds, RayThreads(threads)
        self._reads: dict[Callable[[], Any], asyncio.Task[Any]] = {}

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What `function` answers, without blocking the loop. Raises ClusterUnavailable for what Ray raises, when it
        takes too long, and at once while all threads hang in calls that took too long."""
        if self._threads.all_hang:
            raise ClusterUnavailable(TimeoutError(f"Ray has left {self._threads.count} calls without an answer"))
        call = self._threads.submit(functools.partial(function, *arguments, **named))
        answer = asyncio.wrap_future(call)
        try:
            await asyncio.wait({answer}, timeout=self._seconds)
            if not answer.done():
                raise ClusterUnavailable(TimeoutError(f"Ray gave no answer in {self._seconds:g} s"))
            return answer.result()
        except self.module.exceptions.RayError as error:
            raise ClusterUnavailable(error) from error
        finally:
            if not answer.done():
                self._threads.give_up(call)

    async def read(self, function: Callable[[], T]) -> T:
        """The same for what is asked again and again, and may be a moment old: all who ask while an answer is under way
        get that one, so that they do not take one thread after the other when Ray hangs."""
        reading = self._reads.get(function)
        if reading is None:
            reading = self._reads[function] = asyncio.create_task(self.run(function))
            reading.add_done_callback(lambda task: self._forget(function, task))
        return await asyncio.shield(reading)

    def _forget(self, function: Callable[[], Any], task: asyncio.Task[Any]) -> None:
        del self._reads[function]
        if not task.cancelled():
            task.exception()  # a caller that still waits gets it

    async def kill(self, actor: Any) -> None:
        """Kill an actor without a word; one that is gone is no error."""
        await self.run(self.module.kill, actor, no_restart=True)

    async def find(self, names: list[str]) -> list[Any | None]:
        """Handles of the actors with these names; None for one that is gone. Raises ClusterUnavailable when Ray does
        not say so."""
        return await self.run(self._find_all, names)

    async def actor_names(self) -> list[str]:
        """Of all named actors."""
        return [str(name) for name in await self.run(self.module.util.list_named_actors)]

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
    at a time."""
    return {"name": name, "lifetime": "detached", "num_cpus": 0, "max_restarts": 0, "max_concurrency": concurrency}
