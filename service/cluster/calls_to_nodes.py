"""Calls to what runs on a node: they fail as soon as the node is lost, without waiting for Ray, which leaves them
unanswered until it has found out for itself, or has carried out what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from service.cluster.agent_client import AgentLost
from service.cluster.nodes import Nodes

T = TypeVar("T")


class CallsToNodes:
    """The calls in progress, all on one event loop."""

    def __init__(self, nodes: Nodes):
        self._nodes = nodes
        self._waiting: dict[str, set[asyncio.Timeout]] = {}
        """By node, what ends the wait for each answer."""

    async def answer(self, node: str | None, call: Callable[[], Awaitable[T]]) -> T:
        """The answer to `call`, which goes to something on `node` (None: not known). Raises AgentLost if the node is
        lost, and then nothing is called, or if it gets lost before it answers."""
        if node is None:
            return await call()
        if node in self._nodes.lost:
            raise _lost(node)
        waiting = self._waiting.setdefault(node, set())
        try:
            async with asyncio.timeout(None) as wait:
                waiting.add(wait)
                try:
                    return await call()
                finally:
                    waiting.discard(wait)
                    if not waiting and self._waiting.get(node) is waiting:
                        del self._waiting[node]
        except TimeoutError as error:
            if wait.expired():
                raise _lost(node) from error
            raise

    def fail(self, node: str) -> None:
        """`node` is lost: nobody waits for its answers any more."""
        now = asyncio.get_running_loop().time()
        for wait in self._waiting.pop(node, ()):
            wait.reschedule(now)


def _lost(node: str) -> AgentLost:
    return AgentLost(f"node {node[:12]} is lost", "NodeLost")
