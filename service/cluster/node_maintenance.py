"""Checks every node independently: makes its daemon answer, removes what finished jobs have left there, and measures
the peak rate of its devices. A node that does not answer is tried again and delays nothing else. Nodes that an
autoscaler may take away are released when nothing on them is needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from manta.service.cluster.agent_client import AgentError, AgentFailed, NodeClient, within
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.errors import needs_traceback

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
REQUEST_SECONDS = 10.0
# How long the scheduler waits for the first answers of the nodes that exist at the start.
FIRST_SECONDS = 10.0
REST_SECONDS = 15.0
"""How long a node must be without ranks before it is released; from then on the autoscaler counts it as idle."""
IDLE_POLL_SECONDS = 2.0


class NodeMaintenance:
    """Maintains all nodes, including those that join later."""

    def __init__(
        self,
        cluster: Cluster,
        over: Callable[[Collection[str]], Awaitable[set[str]]],
        answered: Callable[[], None],
    ):
        """`over`: returns which of these jobs are certainly finished, so that what is left of them can be removed;
        `answered` is called when jobs can be placed on another node."""
        self._cluster, self._over, self._answered = cluster, over, answered
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unasked: set[str] = set()
        self._first_answers = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                await self._check()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def first_answers(self) -> None:
        """Return when every node that existed at the start has answered or is known not to; or after a while, and then
        nothing is placed on those that have not."""
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                await self._first_answers.wait()
        except TimeoutError:
            self._cluster.nodes.unresponsive.update(self._unasked)

    async def _check(self) -> None:
        try:
            living = await self._cluster.nodes.living()
        except Exception:  # what Ray does not say is not known: everything stays as it is
            log.exception("Ray did not list its nodes")
            return
        for node in set(living) - self._tasks.keys():
            self._unasked.add(node)
            self._tasks[node] = asyncio.create_task(self._maintain(node), name=f"care for {node[:12]}")
        for node in self._tasks.keys() - set(living):
            self._tasks.pop(node).cancel()  # lost, perhaps only for a while
            self._record_requested(node)

    async def _maintain(self, node: str) -> None:
        """Run until the node is gone; sweeps it if it is new or back, or was not reached before."""
        nodes, swept, reported = self._cluster.nodes, False, False
        is_new = True
        while True:
            unsettled = nodes.unresponsive | nodes.unswept | nodes.problems.keys()
            if not swept or node in unsettled or node not in self._cluster.peak_flops:
                try:
                    daemon = await self._daemon(node, is_new)
                    self._record_requested(node)
                    is_new = False
                    if daemon is not None:
                        if not swept or node in nodes.unswept:
                            swept = await self._sweep(node, daemon)
                        await self._learn_peak(node, daemon)
                except Exception:  # from Ray or the database: the node is checked again
                    log.exception("node %s could not be checked", node[:12])
                if node in nodes.unresponsive and not reported:
                    log.error("node %s is excluded from placement until a daemon of this release responds", node[:12])
                reported = node in nodes.unresponsive
            await asyncio.sleep(POLL_SECONDS)

    async def _daemon(self, node: str, is_new: bool) -> NodeClient | None:
        was_silent = node in self._cluster.nodes.unresponsive
        daemons = self._cluster.daemons
        daemon = await (daemons.of(node) if is_new else daemons.watched(node))  # a node that is not new may be at rest
        if daemon is not None and was_silent:
            log.warning("the daemon of node %s responds again", node[:12])
            self._answered()
        return daemon

    def _record_requested(self, node: str) -> None:
        self._unasked.discard(node)
        if not self._unasked:
            self._first_answers.set()

    async def _sweep(self, node: str, daemon: NodeClient) -> bool:
        """Whether nothing of finished jobs is left on the node."""
        try:
            over = await self._over(await within(REQUEST_SECONDS, daemon.jobs()))
            for job in over:
                await within(REQUEST_SECONDS, daemon.end_job(job))
                log.warning("node %s has removed the remains of %s", node[:12], job)
        except AgentFailed as error:  # of another release, or with a broken disk: no reason not to use the node
            log.warning("node %s was not swept: %s", node[:12], error)
        except AgentError:
            return False
        self._cluster.nodes.unswept.discard(node)
        return True

    async def _learn_peak(self, node: str, daemon: NodeClient) -> None:
        try:
            about = await within(REQUEST_SECONDS, daemon.describe())
        except AgentError:
            return
        if about.peak_flops is not None:
            self._cluster.peak_flops[node] = about.peak_flops


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
                await self.check(time.monotonic())
            except Exception as error:  # from Ray or the database: check again
                log.error("idle nodes could not be checked: %s", error, exc_info=needs_traceback(error))
            await asyncio.sleep(IDLE_POLL_SECONDS)

    async def check(self, now: float) -> None:
        """One check, at time `now` of the monotonic clock."""
        nodes, daemons = self._cluster.nodes, self._cluster.daemons
        idle = await nodes.autoscaled_nodes() & await nodes.unused() - nodes.at_rest - nodes.lost
        self._since = {node: self._since.get(node, now) for node in idle}
        for node, since in self._since.items():
            if now - max(since, daemons.used.get(node, since)) >= REST_SECONDS and not await self._is_needed(node):
                log.info("node %s is idle and may be removed", node[:12])
                await daemons.rest(node)

    async def _is_needed(self, node: str) -> bool:
        daemon = await self._cluster.daemons.watched(node)
        if daemon is None:  # at rest; or it does not answer, and may hold the only copy of something
            return node not in self._cluster.nodes.at_rest
        try:
            return bool(await self._needed(await within(REQUEST_SECONDS, daemon.jobs())))
        except AgentError as error:
            log.warning("node %s did not report the contents of its memory: %s", node[:12], error)
            return True
