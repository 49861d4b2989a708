"""Calls of Ray's own functions, which block: on a thread, and with an error of ours where Ray does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from service.cluster.errors import ClusterUnavailable

P = ParamSpec("P")
T = TypeVar("T")


class RayConnection:
    """A connected Ray. `module` is the `ray` module as `RayHead.connect` returns it."""

    def __init__(self, module: Any):
        self.module = module

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What `function` answers, without blocking the loop. Raises ClusterUnavailable for what Ray raises."""
        try:
            return await asyncio.to_thread(function, *arguments, **named)
        except self.module.exceptions.RayError as error:
            raise ClusterUnavailable(error) from error

    async def kill(self, actor: Any) -> None:
        """Kill an actor without a word; one that is gone is no error."""
        await self.run(self.module.kill, actor, no_restart=True)

    async def find(self, names: list[str]) -> list[Any | None]:
        """Handles of the actors with these names; None for one that is gone."""
        return await self.run(lambda: [self._find(name) for name in names])

    async def actor_names(self) -> list[str]:
        """Of all named actors."""
        return [str(name) for name in await self.run(self.module.util.list_named_actors)]

    def _find(self, name: str) -> Any | None:
        try:
            return self.module.get_actor(name)
        except ValueError:
            return None


def detached(name: str, concurrency: int) -> dict[str, Any]:
    """Options of an actor that outlives the control plane, is found again by `name`, and answers `concurrency` calls
    at a time."""
    return {"name": name, "lifetime": "detached", "num_cpus": 0, "max_restarts": 0, "max_concurrency": concurrency}
