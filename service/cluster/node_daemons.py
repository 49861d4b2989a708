"""The daemons of the nodes in Ray: one detached, named actor on each node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manta.service.cluster.agent_client import AgentError, AgentTimeout, NodeClient, within
from manta.service.cluster.connection import RayConnection, detached
from manta.service.cluster.errors import problem_of, problem_of_start
from manta.service.cluster.nodes import Nodes, keep_keys
from manta.service.cluster.placement import job_of, node_daemon_name
from manta.service.cluster.ray_private import node_of_actor
from manta.workers.node.daemon import NodeDaemon
from manta.workers.node.host import own_code
from manta.workers.paths import Paths
from manta.workers.protocol.messages import ProtocolMismatch
from manta.workers.system.sockets import PortRange

log = logging.getLogger(__name__)

CONCURRENCY = 100
"""Calls that a daemon answers at the same time."""
START_SECONDS = 30.0
# Time limit of a running daemon, and of one that has not answered before; if it takes longer, its node is closed until
# it answers.
ANSWER_SECONDS = 10.0
CLOSE_SECONDS = 10.0
# How long a node may take to check a corpus, and how many are asked one after another: a file system that does not
# answer there will not answer on a thousand others.
DATA_SECONDS, DATA_NODES = 60.0, 3
# Time between two checks whether the daemon of another release can be replaced: a check looks at all agents.
POLL_SECONDS = 5.0


@dataclass(frozen=True)
class HeartbeatSource:
    """Where a node's heartbeats come from, and the secret to send to get them."""

    host: str
    port: int
    secret: str = field(repr=False)


class NodeDaemons:
    """Starts, finds and ends daemons."""

    def __init__(
        self, ray: RayConnection, nodes: Nodes, paths: Paths, notices: str | None = None, ports: PortRange | None = None
    ):
        """`notices`, `ports`: see NodeDaemon."""
        self._ray, self._nodes, self._paths, self._notices = ray, nodes, paths, notices
        self._ports = None if ports is None else str(ports)
        self._class = ray.module.remote(NodeDaemon)
        self.used: dict[str, float] = {}
        """By node, when its daemon was last needed here, in seconds of the monotonic clock."""
        self._next_check: dict[str, float] = {}
        """By node, when to check again whether a daemon of another release can be replaced."""
        self._left_out: dict[str, str] = {}
        """By node that has a daemon of another release, what was said about it."""
        self._foreign: set[str] = set()
        """Nodes where a daemon that we started is of another release: so is the Manta that is installed there."""
        self._with_problem: set[str] = set()
        """Nodes whose problem was recorded here."""
        self._other_code: set[str] = set()
        """Nodes where a daemon that we started runs other code than this process."""
        self._answered: dict[str, NodeClient] = {}
        """By node, the daemon that answered last."""

    async def ensure(
        self, zygote_options: Sequence[str] = (), zygote_environment: Mapping[str, str] | None = None
    ) -> dict[str, NodeClient]:
        """Start a daemon on every living node that has none, except those at rest. Returns by node id those that
        answer; each is asked independently, with its own time limit."""
        nodes = [node for node in await self._nodes.living() if node not in self._nodes.at_rest]
        started = await asyncio.gather(*(self.of(node, zygote_options, zygote_environment) for node in nodes))
        return {node: daemon for node, daemon in zip(nodes, started, strict=True) if daemon is not None}

    async def wake(self) -> None:
        """Start the daemons of the nodes at rest if something might be placed now. Raises ClusterUnavailable."""
        if resting := self._nodes.at_rest - self._nodes.closed:
            await asyncio.gather(*(self.of(node) for node in resting.intersection(await self._nodes.living())))

    async def watched(self, node: str) -> NodeClient | None:
        """Like `of`, for a caller that only checks the node: a node that comes and goes, and has neither ranks nor a
        daemon, is at rest: None."""
        may_rest = node in await self._nodes.autoscaled_nodes() and node in await self._nodes.unused()
        return await self._of(node, may_rest=may_rest)

    async def rest(self, node: str) -> None:
        """End the daemon of `node`, on which nothing needs it: Ray considers a node with any actor busy, and its
        autoscaler keeps it. What is in the node's memory stays as long as the node does."""
        self._nodes.at_rest.add(node)
        await self.kill(node)
        # The next start finds out again.
        self._with_problem.discard(node)
        self._nodes.problems.pop(node, None)
        self._nodes.unresponsive.discard(node)

    async def of(
        self, node: str, zygote_options: Sequence[str] = (), zygote_environment: Mapping[str, str] | None = None
    ) -> NodeClient | None:
        """The daemon of `node`, which is started if there is none. None if it does not answer: then nothing is placed
        there until it does. Raises ClusterUnavailable if Ray does not say whether there is one."""
        self.used[node] = time.monotonic()
        self._nodes.at_rest.discard(node)
        return await self._of(node, zygote_options, zygote_environment)

    async def _of(
        self,
        node: str,
        zygote_options: Sequence[str] = (),
        zygote_environment: Mapping[str, str] | None = None,
        may_rest: bool = False,
    ) -> NodeClient | None:
        """`may_rest`: if there is no daemon, do not start one."""
        (known,) = await self._ray.find([node_daemon_name(node)])
        patient = known is None and node not in self._nodes.unresponsive
        for existing in (known, None):
            try:
                actor = existing
                if actor is None and may_rest:
                    self._nodes.at_rest.add(node)
                    return None
                if actor is None:
                    actor = await self._ray.run(self._create, node, zygote_options, zygote_environment or {})
                daemon = NodeClient(self._ray.module, actor)
                about = await within(START_SECONDS if patient else ANSWER_SECONDS, daemon.start())
            except AgentTimeout:
                break  # another attempt would find the same one
            except AgentError as error:
                if existing is None:
                    self._record_problem(node, problem_of_start(node, str(error)))
                continue  # it died since its name was looked up: try once more, with a new handle
            except ProtocolMismatch as error:
                if existing is None:
                    self._foreign.add(node)
                if await self._replace(node, actor, str(error)):
                    continue
                break
            self._nodes.unresponsive.discard(node)
            self._answered[node] = daemon
            self._nodes.at_rest.discard(node)
            self._left_out.pop(node, None)
            if existing is None and about.code not in ("", own_code()):
                self._other_code.add(node)
            self._record_problem(node, problem_of(about, node in self._other_code))
            return daemon
        self._nodes.unresponsive.add(node)
        self._nodes.unswept.add(node)
        return None

    async def known(self, node: str) -> NodeClient | None:
        """The daemon of `node` that answered before, if it still does: Ray's head is not asked, and may be unreachable.
        None if there is none; `of` may find one."""
        daemon = self._answered.get(node)
        if daemon is None:
            return None
        try:
            await within(ANSWER_SECONDS, daemon.describe())
        except (AgentError, ProtocolMismatch):
            return None
        return daemon

    def _record_problem(self, node: str, problem: str | None) -> None:
        if problem is None:
            if node in self._with_problem:  # otherwise the problem was recorded elsewhere
                self._with_problem.discard(node)
                self._nodes.problems.pop(node, None)
            return
        self._with_problem.add(node)
        if self._nodes.problems.get(node) != problem:
            log.error("a node is excluded from placement: %s", problem)
            self._nodes.problems[node] = problem

    async def _replace(self, node: str, actor: Any, problem: str) -> bool:
        """End a daemon of another release, with its zygote; False while that would end trainers, or would not help.
        What is in the node's shared memory stays: waiting jobs resume from it."""
        self._nodes.unresponsive.add(node)  # nothing is placed there in the meantime
        if time.monotonic() < self._next_check.get(node, 0.0):
            return False
        self._next_check[node] = time.monotonic() + POLL_SECONDS
        if node in self._foreign or await self._has_agents(node):
            if self._left_out.get(node) != problem:
                log.warning("node %s is excluded from placement: %s", node[:12], problem)
            self._left_out[node] = problem
            return False
        log.warning("the daemon of node %s is replaced: %s", node[:12], problem)
        await self._ray.kill(actor)
        return True

    async def _has_agents(self, node: str) -> bool:
        """Whether an agent is on the node, or may be: one that Ray has not placed yet."""
        agents = [name for name in await self._ray.actor_names() if job_of(name) is not None]
        for actor in await self._ray.find(agents):
            if actor is not None and await self._ray.run(node_of_actor, self._ray.module, actor) in (node, None):
                return True
        return False

    async def heartbeat_source(self, node: str) -> HeartbeatSource | None:
        """Where the daemon of `node` sends heartbeats from; it is started if there is none. None if it does not answer,
        and for a node at rest."""
        daemon = await self.watched(node)
        if daemon is None:
            return None
        about = await within(ANSWER_SECONDS, daemon.describe())
        return HeartbeatSource(about.address, about.heartbeat_port, about.heartbeat_secret)

    async def drain(self, node: str, seconds: float) -> bool:
        """Make the daemon of `node` report from now on that it is being drained within `seconds`; False if it does not
        answer."""
        daemon = await self.of(node)
        if daemon is None:
            return False
        try:
            await within(ANSWER_SECONDS, daemon.drain(seconds))
        except AgentError:
            return False
        return True

    async def undrain(self, node: str) -> str | None:
        """Make the daemon of `node` report that it stays. Returns why it is being drained nevertheless, which is empty
        if it is not; None if the daemon does not answer."""
        daemon = await self.of(node)
        if daemon is None:
            return None
        try:
            return await within(ANSWER_SECONDS, daemon.undrain())
        except AgentError:
            return None

    async def problem_of_data(
        self, spec: Mapping[str, Any], roots: list[str] | None, begins: bool = True
    ) -> str | None:
        """What the first node that answers says about a job's corpus (`NodeDaemon.check_data`); None if the job can be
        trained on it, or if none of DATA_NODES nodes answers."""
        open_ones = sorted(set(await self._nodes.living()) - self._nodes.closed - self._nodes.at_rest)
        for node in open_ones[:DATA_NODES]:
            try:
                daemon = await self.of(node)
                if daemon is not None:
                    return await within(DATA_SECONDS, daemon.check_data(dict(spec), roots, begins))
            except AgentError as error:
                log.warning("node %s did not report whether it can read a job's data: %s", node[:12], error)
        return None

    async def end_job(self, job: str, keep_snapshots: bool = False) -> None:
        """Let every node remove what is left of `job`, or everything except its snapshots. A node that does not answer,
        or is at rest, is recorded, to be swept later."""
        self._nodes.unswept |= self._nodes.at_rest
        daemons = await self.ensure()
        await asyncio.gather(*(self._end_job(node, daemons[node], job, keep_snapshots) for node in daemons))

    def record_missed_end(self) -> None:
        """The nodes could not be notified of a job's end, since Ray did not say which nodes exist."""
        self._nodes.unswept |= self._answered.keys() | self._nodes.at_rest

    async def _end_job(self, node: str, daemon: NodeClient, job: str, keep_snapshots: bool) -> None:
        try:
            await within(CLOSE_SECONDS, daemon.end_job(job, keep_snapshots))
        except AgentError:
            self._nodes.unswept.add(node)

    def keep_only(self, there: Collection[str]) -> None:
        """Forget the daemons of all other nodes, which are gone."""
        for about in (self.used, self._next_check, self._left_out, self._answered):
            keep_keys(about, there)
        for some in (self._foreign, self._with_problem, self._other_code):
            some.intersection_update(there)

    async def end_all(self) -> None:
        """Shut down the daemons of all nodes except lost ones: none of our processes and shared memory is left on
        them."""
        lost = {node_daemon_name(node) for node in self._nodes.lost}
        names = [name for name in await self._ray.actor_names() if name.startswith(node_daemon_name(""))]
        actors = await self._ray.find([name for name in names if name not in lost])
        await asyncio.gather(*(self._end(actor) for actor in actors if actor is not None))

    async def kill(self, node: str) -> None:
        """Make calls to the daemon of `node` fail from now on."""
        (actor,) = await self._ray.find([node_daemon_name(node)])
        if actor is not None:
            await self._ray.kill(actor)

    def _create(self, node: str, options: Sequence[str], environment: Mapping[str, str]) -> Any:
        strategies = self._ray.module.util.scheduling_strategies
        made = self._class.options(
            **detached(node_daemon_name(node), CONCURRENCY),
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            get_if_exists=True,
        )
        about_us = (self._paths.installation, [str(folder) for folder in self._folders_to_share()], self._ports)
        return made.remote(node, str(self._paths.home), list(options), dict(environment), self._notices, *about_us)

    def _folders_to_share(self) -> list[Path]:
        root = self._paths.checkpoint_root
        return [root] if isinstance(root, Path) else []

    async def _end(self, actor: Any) -> None:
        with contextlib.suppress(AgentError):
            await within(CLOSE_SECONDS, NodeClient(self._ray.module, actor).shutdown())
        await self._ray.kill(actor)
