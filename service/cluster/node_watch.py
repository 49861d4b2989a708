"""Which nodes live: our own heartbeat, since Ray takes a quarter of a minute to miss one.

The control plane holds a connection to the pulse of every node's daemon. When the connection breaks, or nothing comes
for a while, that alone proves nothing: a daemon may have been killed, and a busy machine answers late. A node is lost
when neither its daemon nor its Ray takes a fresh connection. Kernels take those for processes that are far too busy to
do it themselves, so load raises no false alarm, and the kernel of a living machine says at once that a process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable

from service.cluster.cluster import Cluster
from service.cluster.nodes import RayNode
from workers.json_codec import MalformedMessage, from_json
from workers.messages import Heartbeat

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
# Silence that is worth a look; together with CONNECT_SECONDS it is how long an unreachable machine goes unnoticed.
SILENT_SECONDS = 1.5
# Long enough for the kernel's second try, one second after a first packet that was lost.
CONNECT_SECONDS = 1.2
LOOK_SECONDS = 1.0

Address = tuple[str, int]


class NodeWatch:
    """Watches all nodes, those that join later too, and sees to it that each has a daemon."""

    def __init__(
        self, cluster: Cluster, lost: Callable[[str, str], None], draining: Callable[[str, float], None] | None = None
    ):
        """`lost` is called with a node that is lost, and why; `draining` with one that is to be left, and within how
        many seconds."""
        self._cluster, self._lost, self._draining = cluster, lost, draining
        self._minders: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for minder in self._minders.values():
                minder.cancel()
            await asyncio.gather(*self._minders.values(), return_exceptions=True)

    async def _look(self) -> None:
        try:
            living = {node.id: node for node in await self._cluster.nodes.known() if node.alive}
        except Exception:  # Ray may be restarting: it is minded elsewhere
            log.exception("Ray did not tell its nodes")
            return
        for node in living.keys() - self._minders.keys():
            self._minders[node] = asyncio.create_task(self._mind(living[node]), name=node)
        for node in self._minders.keys() - living.keys():
            self._minders.pop(node).cancel()
            await self._lose(node, "Ray says that it is gone")
            for known in (self._cluster.nodes.lost, self._cluster.nodes.draining):
                known.discard(node)  # ids of nodes never come again

    async def _mind(self, node: RayNode) -> None:
        """Until Ray itself gives the node up."""
        while True:
            door = await self._door(node)
            if door is not None:
                await self._listen(node.id, door)
            doors = [node.raylet] if door is None else [door, node.raylet]
            if await asyncio.to_thread(anybody, doors):
                await asyncio.sleep(BEAT_SECONDS)
                continue
            await self._lose(node.id, "neither its daemon nor its Ray can be reached")
            while not await asyncio.to_thread(anybody, [node.raylet]):
                await asyncio.sleep(LOOK_SECONDS)
            log.warning("node %s is back", node.id)
            self._cluster.nodes.lost.discard(node.id)

    async def _door(self, node: RayNode) -> Address | None:
        """Where the node's daemon, which is started where there is none, answers beats. None when it cannot be had."""
        asking = asyncio.create_task(self._cluster.daemons.heartbeat_address(node.id))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=BEAT_SECONDS)
                if not asking.done() and not await asyncio.to_thread(anybody, [node.raylet]):
                    return None
            door = asking.result()
        except Exception:  # whatever it is, the node is looked at again
            log.exception("the daemon of node %s did not say where it answers", node.id)
            door = None
        finally:
            asking.cancel()
        if door is None:
            await asyncio.sleep(LOOK_SECONDS)
        return door

    async def _listen(self, node: str, door: Address) -> None:
        """Hear the node's pulse for as long as it has one."""
        writer: asyncio.StreamWriter | None = None
        beats: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(*door)
            beats = asyncio.create_task(_beat(writer))
            while True:
                line = await asyncio.wait_for(reader.readline(), SILENT_SECONDS)
                if not line or (heartbeat := from_json(Heartbeat, json.loads(line))).node != node:
                    return
                self._hear(heartbeat)
        except (OSError, TimeoutError, ValueError, MalformedMessage):
            return
        finally:
            if beats is not None:
                beats.cancel()
            if writer is not None:
                writer.close()

    def _hear(self, heartbeat: Heartbeat) -> None:
        if heartbeat.drain_seconds is not None and self._draining is not None:
            self._draining(heartbeat.node, heartbeat.drain_seconds)

    async def _lose(self, node: str, why: str) -> None:
        if node in self._cluster.nodes.lost:
            return
        log.error("node %s is lost: %s", node, why)
        self._cluster.nodes.lost.add(node)
        self._lost(node, why)
        try:
            await self._cluster.fail_calls_to(node)
        except Exception:  # then calls to what was there fail when Ray finds out
            log.exception("Ray could not be told that node %s is lost", node)


async def _beat(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            writer.write(b"\n")
            await writer.drain()


def anybody(doors: list[Address]) -> bool:
    """Whether a fresh connection to one of `doors` is taken within CONNECT_SECONDS.

    On a thread and with the kernel's own timeout: one that counts in an event loop passes when that loop is held up.
    """
    for door in doors:
        with contextlib.suppress(OSError), socket.create_connection(door, CONNECT_SECONDS):
            return True
    return False
