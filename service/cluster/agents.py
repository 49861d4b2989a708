"""The agents of all jobs in Ray: one detached, named actor for each rank, so that another control plane finds it; and
calls to what runs on a node, which fail as soon as the node is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from manta.service.cluster.agent_client import AgentClient, AgentError, AgentLost, OrderEpoch, within
from manta.service.cluster.connection import RayConnection, detached
from manta.service.cluster.nodes import Nodes
from manta.service.cluster.placement import Seat, Unit, agent_name, job_of
from manta.service.cluster.ray_private import actors_on, node_of_actor
from manta.workers.paths import Paths
from manta.workers.protocol.messages import AgentDescription
from manta.workers.rank.agent import AgentOnNode
from manta.workers.system.sockets import PortRange

T = TypeVar("T")

CONCURRENCY = 100
"""Calls that an agent answers at the same time."""
CLOSE_SECONDS = 10.0
# How long a new agent on a living node may take to start.
AGENT_SECONDS = 20.0


async def query(
    agents: Mapping[int, AgentClient], question: Callable[[int, AgentClient], Awaitable[T]], seconds: float
) -> tuple[dict[int, T], dict[int, str]]:
    """Put `question` to each of `agents`, by rank; returns by rank the answers, and for the others one line that says
    why they did not answer within `seconds`."""

    async def put(rank: int, agent: AgentClient) -> T:  # if cancelled before its turn it asks nothing
        return await within(seconds, question(rank, agent))

    results = await asyncio.gather(*(put(*item) for item in agents.items()), return_exceptions=True)
    answers: dict[int, T] = {}
    silent: dict[int, str] = {}
    for rank, result in zip(agents, results, strict=True):
        if isinstance(result, AgentError):
            silent[rank] = str(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[rank] = result
    return answers, silent


async def describe_all(agents: Mapping[int, AgentClient]) -> dict[int, AgentDescription]:
    """By rank, the descriptions of those of these agents that answer."""
    answers, _ = await query(agents, lambda rank, agent: agent.describe(), AGENT_SECONDS)
    return answers


async def describe(agents: Sequence[AgentClient]) -> list[AgentDescription] | None:
    """The descriptions of these agents; None if one of them does not answer."""
    about = await describe_all(dict(enumerate(agents)))
    return list(about.values()) if len(about) == len(agents) else None


class Agents:
    """Starts, finds and ends agents."""

    def __init__(self, ray: RayConnection, nodes: Nodes, paths: Paths, ports: PortRange | None = None):
        """`ports`: on which agents and trainers listen; None: any."""
        self._ports = None if ports is None else str(ports)
        self._ray, self._nodes, self._paths = ray, nodes, paths
        self._class = ray.module.remote(AgentOnNode)
        self._calls = CallsToNodes(nodes)
        self.epoch: OrderEpoch | None = None
        """What calls carry; None: there are no leases."""

    async def start(self, job: str, generation: int, seats: Mapping[int, Seat], unit: Unit) -> list[AgentClient]:
        """Start one agent for each rank in `seats`, in groups that were acquired; returned in that order. `generation`
        is part of their names. Does not wait until they are up: calls to them do. Raises LeaseLost, LeaseUncertain:
        while this control plane waited for places, another one may have taken over the job and acquired places with the
        same names."""
        if self.epoch is not None:
            self.epoch(job, None)
        return await self._ray.run(self._start, job, generation, seats, unit)

    async def start_snapshot_holders(self, job: str, nodes: Collection[str]) -> list[AgentClient]:
        """Start agents without a rank or a place on those of these nodes that live (if none are given: on all): they
        hand out what the agents of `job` have left in shared memory there, until they are killed. They are not found
        again: they end with this process. A cluster of one node needs none."""
        living = set(await self._nodes.living())
        if len(living) < 2:
            return []
        return await self._ray.run(self._start_snapshot_holders, job, sorted(living.intersection(nodes or living)))

    async def names(self) -> list[str]:
        """Names of all agents of all jobs."""
        return [name for name in await self._ray.actor_names() if job_of(name) is not None]

    async def jobs_of_other_installations(self) -> list[str]:
        """The jobs of other installations, and of databases that are lost, that have agents in this Ray."""
        return sorted(
            {job for name in await self._ray.actor_names_in_other_namespaces() if (job := job_of(name)) is not None}
        )

    async def names_on(self, node: str) -> list[str]:
        """Names of the agents on a node."""
        names = await self._ray.run(actors_on, self._ray.module, node)
        return [name for name in names if job_of(name) is not None]

    async def find(self, names: Sequence[str]) -> list[AgentClient | None]:
        """The agents with these names; None for one that is gone."""
        actors = await self._ray.find(list(names))
        return [
            None if actor is None else AgentClient(self._ray.module, actor, str(job_of(name)), self.epoch, self._calls)
            for name, actor in zip(names, actors, strict=True)
        ]

    async def node_of(self, agent: AgentClient) -> str | None:
        """The node on which Ray has placed `agent`; None if it has not yet."""
        return await self._ray.run(node_of_actor, self._ray.module, agent.actor)

    def fail_calls_to(self, node: str) -> None:
        """Calls to agents on `node`, which is lost, fail from now on, those in progress too, whatever Ray says. Of an
        agent that has not described itself the node is not known."""
        self._calls.fail(node)

    async def kill(self, agents: Iterable[AgentClient | None]) -> None:
        """Kill these agents, and with them their trainers, without notice; agents that are gone are not an error."""
        for agent in agents:
            if agent is not None:
                agent.check_order()
                await self._ray.kill(agent.actor)

    async def end(self, agents: Iterable[AgentClient | None], keep_snapshots: bool) -> None:
        """Let agents (None: already gone) end their trainers, then kill them; an agent that is dead or does not answer
        is only killed, and nothing is waited for where the node is lost."""
        await asyncio.gather(*(self._end(agent, keep_snapshots) for agent in agents if agent is not None))

    async def _end(self, agent: AgentClient, keep_snapshots: bool) -> None:
        with contextlib.suppress(AgentError):
            ending: Awaitable[object] = agent.stop() if keep_snapshots else agent.close()
            await within(CLOSE_SECONDS, ending)
        await self.kill([agent])
        with contextlib.suppress(AgentError):  # a call to an actor that is dying fails once it is dead
            await within(CLOSE_SECONDS, agent.reports(0, CLOSE_SECONDS))

    def _start(self, job: str, generation: int, seats: Mapping[int, Seat], unit: Unit) -> list[AgentClient]:
        util = self._ray.module.util
        groups = {name: util.get_placement_group(name) for name in {seat.group for seat in seats.values()}}
        resources: dict[str, Any] = {"num_gpus": 1} if unit == "GPU" else {"num_gpus": 0, "resources": {unit: 1}}
        agents: list[AgentClient] = []
        for rank, seat in seats.items():
            options = self._class.options(
                **detached(agent_name(job, generation, rank), CONCURRENCY),
                **resources,
                scheduling_strategy=util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    groups[seat.group], placement_group_bundle_index=seat.bundle
                ),
            )
            home, installation, reports_lines = str(self._paths.home), self._paths.installation, bool(self._paths.logs)
            actor = options.remote(job, rank, home, installation, seat.group, self._ports, reports_lines)
            agents.append(AgentClient(self._ray.module, actor, job, self.epoch, self._calls))
        return agents

    def _start_snapshot_holders(self, job: str, nodes: Sequence[str]) -> list[AgentClient]:
        affinity = self._ray.module.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        holders: list[AgentClient] = []
        for node in nodes:
            options = self._class.options(
                num_cpus=0, max_concurrency=CONCURRENCY, scheduling_strategy=affinity(node_id=node, soft=False)
            )
            holder = options.remote(job, 0, str(self._paths.home), self._paths.installation, "", self._ports)
            holders.append(AgentClient(self._ray.module, holder, calls=self._calls, node=node))
        return holders


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
