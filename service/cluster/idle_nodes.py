"""Releases nodes that an autoscaler may take away: ends the daemon of a node that has been without ranks for a while
and has nothing in its memory that is still needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from service.cluster.agent_client import AgentError, within
from service.cluster.cluster import Cluster
from service.cluster.errors import needs_traceback

log = logging.getLogger(__name__)

REST_SECONDS = 15.0
"""How long a node must be without ranks before it is released; from then on the autoscaler counts it as idle."""
LOOK_SECONDS = 2.0
ASK_SECONDS = 10.0


class IdleNodes:
    """Looks after all nodes that come and go; there are none if no shapes of nodes are declared."""

    def __init__(self, cluster: Cluster, needed: Callable[[Collection[str]], Awaitable[set[str]]]):
        """`needed`: returns which of these jobs need what they have in the memory of a node without their ranks."""
        self._cluster, self._needed = cluster, needed
        self._since: dict[str, float] = {}
        """By node, since when it has had no ranks, in seconds of the monotonic clock."""

    async def run(self) -> None:
        """Run until cancelled; returns at once if no nodes come and go."""
        while self._cluster.nodes.shapes:
            try:
                await self.look(time.monotonic())
            except Exception as error:  # from Ray or the database: look again
                log.error("idle nodes could not be checked: %s", error, exc_info=needs_traceback(error))
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self, now: float) -> None:
        """One look, at time `now` of the monotonic clock."""
        nodes, daemons = self._cluster.nodes, self._cluster.daemons
        idle = await nodes.that_come_and_go() & await nodes.unused() - nodes.at_rest - nodes.lost
        self._since = {node: self._since.get(node, now) for node in idle}
        for node, since in self._since.items():
            if now - max(since, daemons.used.get(node, since)) >= REST_SECONDS and not await self._is_needed(node):
                log.info("node %s may be taken away: nothing is on it", node[:12])
                await daemons.rest(node)

    async def _is_needed(self, node: str) -> bool:
        daemon = await self._cluster.daemons.watched(node)
        if daemon is None:  # at rest; or it does not answer, and may hold the only copy of something
            return node not in self._cluster.nodes.at_rest
        try:
            return bool(await self._needed(await within(ASK_SECONDS, daemon.jobs())))
        except AgentError as error:
            log.warning("node %s did not say what is in its memory: %s", node[:12], error)
            return True
