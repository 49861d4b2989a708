"""The daemons of the nodes in Ray: one detached, named actor on each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from service.cluster.agent_client import AgentError, NodeClient, RayNodeDaemon, within
from service.cluster.connection import RayConnection, detached
from service.cluster.errors import ClusterUnavailable
from service.cluster.nodes import Nodes
from service.cluster.placement import node_daemon_name
from workers.node.daemon import NodeDaemon
from workers.paths import Paths

CONCURRENCY = 100
"""Calls that a daemon answers at a time."""
START_SECONDS = 30.0
CLOSE_SECONDS = 10.0


class NodeDaemons:
    """Starts, finds and ends daemons."""

    def __init__(self, ray: RayConnection, nodes: Nodes, paths: Paths):
        self._ray, self._nodes, self._paths = ray, nodes, paths
        self._class = ray.module.remote(NodeDaemon)

    async def ensure(
        self, zygote_options: Sequence[str] = (), zygote_environment: Mapping[str, str] | None = None
    ) -> dict[str, NodeClient]:
        """Start a daemon on every living node that has none. By node id those that answer."""
        nodes = await self._nodes.living()
        started = await asyncio.gather(
            *(self._ensure(node, list(zygote_options), dict(zygote_environment or {})) for node in nodes)
        )
        return {node: daemon for node, daemon in zip(nodes, started, strict=True) if daemon is not None}

    async def heartbeat_address(self, node: str) -> tuple[str, int] | None:
        """Where the daemon of `node` sends heartbeats from; it is started where there is none. None when it does not
        answer."""
        daemon = await self._ensure(node, [], {})
        if daemon is None:
            return None
        about = await daemon.describe()
        return about.address, about.heartbeat_port

    async def drain(self, node: str, seconds: float) -> bool:
        """Let the daemon of `node` say from now on that it is to be left within `seconds`; False when it does not
        answer."""
        daemon = await self._ensure(node, [], {})
        if daemon is not None:
            await daemon.drain(seconds)
        return daemon is not None

    async def end_all(self) -> None:
        """Shut down the daemons of all nodes but lost ones: no process and no shared memory of ours is left on them."""
        lost = {node_daemon_name(node) for node in self._nodes.lost}
        names = [name for name in await self._ray.actor_names() if name.startswith(node_daemon_name(""))]
        actors = await self._ray.find([name for name in names if name not in lost])
        await asyncio.gather(*(self._end(actor) for actor in actors if actor is not None))

    async def kill(self, node: str) -> None:
        """Let calls to the daemon of `node` fail from now on."""
        (actor,) = await self._ray.find([node_daemon_name(node)])
        if actor is not None:
            await self._ray.kill(actor)

    async def _ensure(self, node: str, options: list[str], environment: dict[str, str]) -> NodeClient | None:
        """The daemon of `node`. None when the node is lost while we ask, or its daemon does not answer."""
        (known,) = await self._ray.find([node_daemon_name(node)])
        for existing in (known, None):
            # One that died since its name was looked up is replaced by one more, with a new handle.
            with contextlib.suppress(AgentError, ClusterUnavailable):
                actor = existing
                if actor is None:
                    actor = await self._ray.run(self._create, node, options, environment)
                daemon = RayNodeDaemon(self._ray.module, actor)
                await within(START_SECONDS, daemon.start())
                return daemon
        return None

    def _create(self, node: str, options: list[str], environment: dict[str, str]) -> Any:
        strategies = self._ray.module.util.scheduling_strategies
        made = self._class.options(
            **detached(node_daemon_name(node), CONCURRENCY),
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            get_if_exists=True,
        )
        return made.remote(node, str(self._paths.home), options, environment)

    async def _end(self, actor: Any) -> None:
        with contextlib.suppress(AgentError):
            await within(CLOSE_SECONDS, RayNodeDaemon(self._ray.module, actor).shutdown())
        await self._ray.kill(actor)
