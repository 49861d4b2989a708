"""Which nodes live: our own heartbeat, since Ray takes a quarter of a minute to notice a missing one.

The control plane holds a connection to every node's daemon, which sends heartbeats. A broken connection, or silence for
a while, alone proves nothing: a daemon may have been killed, and a busy machine answers late. A node is lost if neither
its daemon nor its Ray accepts a new connection. Kernels accept connections for processes that are far too busy to do so
themselves, so load raises no false alarm, and the kernel of a living machine says at once that a process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from manta.service.cluster.cluster import Cluster
from manta.service.cluster.errors import problem_of_port
from manta.service.cluster.node_daemons import HeartbeatSource
from manta.service.cluster.nodes import GpuReadings, RayNode
from manta.service.tasks import Lag
from manta.workers.protocol.json_codec import MalformedMessage, from_json
from manta.workers.protocol.messages import Heartbeat

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
# Silence that triggers a check; together with CONNECT_SECONDS it is how long an unreachable machine goes unnoticed.
HEARTBEAT_TIMEOUT_SECONDS = 1.5
# Long enough for the kernel's second attempt, one second after a lost first packet.
CONNECT_SECONDS = 1.2
POLL_SECONDS = 1.0
# How many times in a row the daemon's port must refuse while Ray's does not, before it counts as closed: about 15 s.
REFUSALS = 6
# How long Ray may take to give up a node whose machine has another one by now: its patience, and some more.
GIVE_UP_SECONDS = 30.0

THREADS = 32
"""Threads of the watch only: a connection that is not accepted occupies one for as long as it is tried. If many nodes
are gone at once, nothing else, such as reading the database, may have to wait for that."""

Address = tuple[str, int]


class NodeWatch:
    """Watches all nodes, including those that join later, and ensures that each has a daemon."""

    def __init__(
        self,
        cluster: Cluster,
        lost: Callable[[str, str], None],
        draining: Callable[[str, float | None, str], None] | None = None,
    ):
        """`lost` is called with a node that is lost, and why; `draining` with a node that is being drained, and within
        how many seconds and why, if that is known, with each of its heartbeats."""
        self._cluster, self._lost, self._draining = cluster, lost, draining
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.lag = Lag(POLL_SECONDS)
        """How far it is behind with Ray's information about the nodes."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="nodes")
        self._refused: dict[str, int] = {}
        """By node, how many times in a row its daemon's port accepted no connection though its Ray's did."""

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                await self._poll()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for watcher in self._watchers.values():
                watcher.cancel()
            await asyncio.gather(*self._watchers.values(), return_exceptions=True)
            self._threads.shutdown(wait=False)

    async def _poll(self) -> None:
        self.lag.begin()
        try:
            known = await self._cluster.nodes.known()
            living = {node.id: node for node in known if node.alive and node.holds_ranks}
        except Exception:  # Ray may be restarting, which is watched elsewhere
            log.exception("Ray did not list its nodes")
            return
        for node in living.keys() - self._watchers.keys():
            self._watchers[node] = asyncio.create_task(self._watch(living[node]), name=node)
        for node in self._watchers.keys() - living.keys():
            self._watchers.pop(node).cancel()
            await self._mark_lost(node, "Ray reports it as dead")
            self._refused.pop(node, None)
        self._cluster.keep_only({node.id for node in known if node.alive})
        self.lag.done()

    async def _watch(self, node: RayNode) -> None:
        """Watch it until Ray itself gives the node up."""
        while True:
            source = await self._heartbeat_source(node)
            if source is not None:
                await self._listen(node.id, source)
            if await self._is_there(node, source):
                await asyncio.sleep(BEAT_SECONDS)
                continue
            await self._mark_lost(node.id, "neither its daemon nor its Ray can be reached")
            await self._until_back(node)
            log.warning("node %s is back", node.id)
            self._cluster.nodes.lost.discard(node.id)

    async def _until_back(self, node: RayNode) -> None:
        """Return once a lost node can be used again: when its daemon answers. It is not enough that something listens
        where its Ray did, which a machine that was started again does as another node: until Ray gives up the old
        one. If it does not, the daemon has ended, and a new one is started."""
        silent_at = time.monotonic()
        while time.monotonic() - silent_at <= GIVE_UP_SECONDS:
            if not await self._listens(node.raylet):
                silent_at = time.monotonic()
            elif await self._cluster.daemons.known(node.id) is not None:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _is_there(self, node: RayNode, source: HeartbeatSource | None) -> bool:
        """Whether its daemon or its Ray accepts a connection. If for a while only its Ray does, that is a problem for
        an operator to fix, and not a loss."""
        if source is not None and await self._listens((source.host, source.port)):
            self._record_reachable(node.id)
            return True
        there = await self._listens(node.raylet)
        if there and source is not None:
            self._refused[node.id] = self._refused.get(node.id, 0) + 1
            if self._refused[node.id] == REFUSALS:
                problem = problem_of_port(node.host or node.id, source.host, source.port)
                log.error("a node is excluded from placement: %s", problem)
                self._cluster.nodes.problems[node.id] = problem
        return there

    async def _listens(self, address: Address) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._threads, listens, address)

    def _record_reachable(self, node: str) -> None:
        if self._refused.pop(node, 0) >= REFUSALS:
            log.warning("the daemon of node %s can be reached again", node)
            self._cluster.nodes.problems.pop(node, None)

    async def _heartbeat_source(self, node: RayNode) -> HeartbeatSource | None:
        """Where the node's daemon sends heartbeats from; it is started if there is none. None if it does not answer."""
        asking = asyncio.create_task(self._cluster.daemons.heartbeat_source(node.id))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=BEAT_SECONDS)
                if not asking.done() and not await self._listens(node.raylet):
                    return None
            source = asking.result()
        except Exception:  # whatever the error is, the node is looked at again
            log.exception("the daemon of node %s did not say where it answers", node.id)
            source = None
        finally:
            asking.cancel()
        if source is None:
            await asyncio.sleep(POLL_SECONDS)
        return source

    async def _listen(self, node: str, source: HeartbeatSource) -> None:
        """Receive the node's heartbeats for as long as they come."""
        writer: asyncio.StreamWriter | None = None
        requests: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(source.host, source.port)
            requests = asyncio.create_task(_request_heartbeats(writer, source.secret))
            while True:
                # Unlike this, wait_for loses a cancellation that meets an answer.
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_SECONDS):
                    line = await reader.readline()
                if not line or (heartbeat := from_json(Heartbeat, json.loads(line))).node != node:
                    return
                self._receive(heartbeat)
        except (OSError, TimeoutError, ValueError, MalformedMessage):
            return
        finally:
            if requests is not None:
                requests.cancel()
            if writer is not None:
                writer.close()

    def _receive(self, heartbeat: Heartbeat) -> None:
        self._record_reachable(heartbeat.node)
        if heartbeat.gpus is not None:
            self._cluster.nodes.gpus[heartbeat.node] = GpuReadings(time.monotonic(), heartbeat.gpus)
        if heartbeat.draining and self._draining is not None:
            self._draining(heartbeat.node, heartbeat.drain_seconds, heartbeat.drain_reason)
        elif heartbeat.stays and heartbeat.node in self._cluster.nodes.draining:
            log.warning("node %s is no longer being drained", heartbeat.node)
            self._cluster.nodes.cancel_drain(heartbeat.node)

    async def _mark_lost(self, node: str, why: str) -> None:
        if node in self._cluster.nodes.lost:
            return
        if node in self._cluster.nodes.at_rest:
            log.info("idle node %s is gone", node)
        else:
            log.error("node %s is lost: %s", node, why)
        self._cluster.nodes.lost.add(node)
        self._cluster.nodes.gpus.pop(node, None)
        self._lost(node, why)
        try:
            await self._cluster.fail_calls_to(node)
        except Exception:  # calls to what was there fail when Ray finds out
            log.exception("Ray could not be notified that node %s is lost", node)


async def _request_heartbeats(writer: asyncio.StreamWriter, secret: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            writer.write(f"{secret}\n".encode())
            await writer.drain()
            await asyncio.sleep(BEAT_SECONDS)


def listens(address: Address) -> bool:
    """Whether a new connection to `address` is accepted within CONNECT_SECONDS. This uses a thread and the kernel's own
    timeout: a timeout in an event loop also expires if the loop is held up."""
    with contextlib.suppress(OSError), socket.create_connection(address, CONNECT_SECONDS):
        return True
    return False
