"""The cluster as a control plane uses it, when it is a simulated one in another process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.support.simulation.cluster_process import HOST, SimulatedCluster
from benchmarks.support.simulation.messages import Channel
from manta.service.cluster.agent_client import AgentClient, AgentFailed, AgentLost, OrderEpoch
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.node_daemons import HeartbeatSource
from manta.service.cluster.node_shapes import NodeShape
from manta.service.cluster.nodes import GpuReadings, RayNode
from manta.service.cluster.placement import Capacity, Seat, Unit, job_of
from manta.service.cluster.placement_groups import NotPlaced
from manta.workers.config import ParallelConfig
from manta.workers.paths import Paths
from manta.workers.protocol.json_codec import JsonObject, MalformedMessage
from manta.workers.protocol.messages import Endpoint, NodeDescription
from manta.workers.protocol.remote_call import StaleOwner, call

T = TypeVar("T")
ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (AgentLost, AgentFailed, NotPlaced, MalformedMessage, StaleOwner)
}


class Asking:
    """Asks the simulated cluster."""

    def __init__(self, channel: Channel):
        self.channel = channel

    async def ask(self, method: Callable[..., Awaitable[T]], **arguments: Any) -> T:
        """What `method` of the SimulatedCluster answers."""
        # Its first parameter is the cluster itself, which is not sent.
        return await call(partial(self.channel.ask, None), method, arguments)


class SimulatedNodes:
    """As `manta.service.cluster.nodes.Nodes`."""

    def __init__(self, asking: Asking):
        self._asking = asking
        self.lost: set[str] = set()
        self.draining: set[str] = set()
        self.leave_by: dict[str, float] = {}
        self.unresponsive: set[str] = set()
        self.problems: dict[str, str] = {}
        self.unswept: set[str] = set()
        self.gpus: dict[str, GpuReadings] = {}
        self.shapes: Sequence[NodeShape] = ()
        self.at_rest: set[str] = set()

    @property
    def closed(self) -> set[str]:
        """Where nothing more is placed."""
        return self.lost | self.draining | self.unresponsive

    def keep_only(self, there: Collection[str]) -> None:
        """No simulated node is gone for good."""

    async def known(self) -> list[RayNode]:
        """All."""
        ports = await self._asking.ask(SimulatedCluster.ports)
        return [RayNode(node, (HOST, port), node) for node, port in ports.items()]

    async def living(self) -> list[str]:
        """Ids of the living nodes."""
        return [node for node in await self._asking.ask(SimulatedCluster.living) if node not in self.lost]

    async def problem_of_all(self) -> str | None:
        """None: ranks can always be placed."""
        return None

    async def has_gpus(self) -> bool:
        """None of them has."""
        return False

    async def capacity(self, unit: Unit, all_living: bool = False) -> Capacity:
        """Slots."""
        units = await self._asking.ask(SimulatedCluster.units)
        nodes = {node: (total, free) for node, (total, free) in units.items() if all_living or node not in self.closed}
        return Capacity(unit, sum(t for t, _ in nodes.values()), sum(f for _, f in nodes.values()), nodes)

    async def at_most(self, unit: Unit) -> Capacity:
        """The capacity as it is: no node joins."""
        return await self.capacity(unit)

    async def until_free(self, expected: Capacity) -> None:
        """At once."""


class SimulatedGroups:
    """As `manta.service.cluster.placement_groups.PlacementGroups`."""

    def __init__(self, asking: Asking):
        self._asking = asking
        self.epoch: OrderEpoch | None = None

    def _check_orders(self, job_ids: Iterable[str | None]) -> None:
        for job in job_ids:
            if self.epoch is not None and job is not None:
                self.epoch(job, None)

    async def acquire(
        self,
        job: str,
        generation: int,
        layout: ParallelConfig,
        unit: Unit,
        timeout: float = 30.0,
        avoid: Collection[str] = (),
        replicas: Sequence[int] | None = None,
    ) -> None:
        """Raises NotPlaced."""
        self._check_orders([job])
        await self._asking.ask(
            SimulatedCluster.acquire,
            job=job,
            generation=generation,
            layout=layout.model_dump(mode="json"),
            avoid=list(avoid),
            replicas=list(range(layout.data) if replicas is None else replicas),
        )

    async def states(self, names: Collection[str] | None = None) -> dict[str, str]:
        """By name, of all or of these."""
        states = await self._asking.ask(SimulatedCluster.group_states)
        return {name: state for name, state in states.items() if names is None or name in names}

    async def remove(self, names: Iterable[str]) -> None:
        """Give them back."""
        names = list(names)
        self._check_orders({job_of(name) for name in names})
        await self._asking.ask(SimulatedCluster.remove_groups, names=names)


class SimulatedAgentClient(AgentClient):
    """The client of a simulated agent: calls are those of an agent in Ray, only the way there is another."""

    def __init__(self, channel: Channel, name: str, epoch: OrderEpoch | None):
        super().__init__(None, None, str(job_of(name)), epoch)
        self._channel, self.name = channel, name

    async def _send(self, method: str, arguments: JsonObject) -> Any:
        return await self._channel.ask(self.name, method, arguments)


class SimulatedAgents:
    """As `manta.service.cluster.agents.Agents`."""

    def __init__(self, asking: Asking):
        self._asking = asking
        self.epoch: OrderEpoch | None = None

    async def start(self, job: str, generation: int, seats: Mapping[int, Seat], unit: Unit) -> list[AgentClient]:
        """One for each seat."""
        names = await self._asking.ask(
            SimulatedCluster.start_agents,
            job=job,
            generation=generation,
            ranks=list(seats),
            groups=[seat.group for seat in seats.values()],
            bundles=[seat.bundle for seat in seats.values()],
        )
        return [SimulatedAgentClient(self._asking.channel, name, self.epoch) for name in names]

    async def start_snapshot_holders(self, job: str, nodes: Collection[str]) -> list[AgentClient]:
        """None: ranks of simulated jobs do not die."""
        return []

    async def names(self) -> list[str]:
        """Of all."""
        return await self._asking.ask(SimulatedCluster.agent_names)

    async def jobs_of_other_installations(self) -> list[str]:
        """None: the cluster has no other installation."""
        return []

    async def find(self, names: Sequence[str]) -> list[AgentClient | None]:
        """Clients of the agents of these names, in order; None for one that does not live."""
        living = set(await self.names())
        return [
            SimulatedAgentClient(self._asking.channel, name, self.epoch) if name in living else None for name in names
        ]

    async def node_of(self, agent: AgentClient) -> str | None:
        """Node of the agent."""
        return await self._asking.ask(SimulatedCluster.node_of, agent=_names([agent])[0])

    def fail_calls_to(self, node: str) -> None:
        """Nodes are not lost here."""

    async def kill(self, agents: Iterable[AgentClient | None]) -> None:
        """Without a word."""
        agents = list(agents)
        _check_orders(agents)
        await self._asking.ask(SimulatedCluster.kill, agents=_names(agents))

    async def end(self, agents: Iterable[AgentClient | None], keep_snapshots: bool) -> None:
        """With their trainers."""
        agents = list(agents)
        _check_orders(agents)
        await self._asking.ask(SimulatedCluster.end, agents=_names(agents), keep_snapshots=keep_snapshots)


def _check_orders(agents: Iterable[AgentClient | None]) -> None:
    for agent in agents:
        if isinstance(agent, SimulatedAgentClient):
            agent.check_order()


def _names(agents: Iterable[AgentClient | None]) -> list[str]:
    return [agent.name for agent in agents if isinstance(agent, SimulatedAgentClient)]


class SimulatedDaemon:
    """As `manta.service.cluster.agent_client.NodeClient`."""

    def __init__(self, asking: Asking, node: str):
        self._asking, self._node = asking, node

    async def start(self) -> NodeDescription:
        """Nothing to start: the simulated node runs."""
        return await self.describe()

    async def describe(self) -> NodeDescription:
        """The node."""
        return NodeDescription(self._node, self._node, HOST, 1, 1, peak_flops=1e12)

    async def drain(self, seconds: float) -> None:
        """No simulated node is left."""

    async def start_store(self, job: str, generation: int, one_machine: bool = False) -> Endpoint:
        """A rendezvous store."""
        return await self._asking.ask(SimulatedCluster.start_store, node=self._node, job=job, generation=generation)

    async def end_job(self, job: str, keep_snapshots: bool = False) -> None:
        """Remove what it has left."""
        await self._asking.ask(SimulatedCluster.end_job, node=self._node, job=job, keep_snapshots=keep_snapshots)

    async def jobs(self) -> list[str]:
        """Nothing is left by jobs that are over."""
        return []

    async def shutdown(self) -> None:
        """Nothing to end."""


class SimulatedDaemons:
    """As `manta.service.cluster.node_daemons.NodeDaemons`."""

    def __init__(self, asking: Asking, nodes: SimulatedNodes):
        self._asking, self._nodes = asking, nodes

    async def ensure(self) -> dict[str, SimulatedDaemon]:
        """Of all nodes."""
        return {node: SimulatedDaemon(self._asking, node) for node in await self._nodes.living()}

    async def of(self, node: str) -> SimulatedDaemon:
        """Of one."""
        return SimulatedDaemon(self._asking, node)

    async def watched(self, node: str) -> SimulatedDaemon:
        """The daemon of `node`: no node is at rest."""
        return await self.of(node)

    async def known(self, node: str) -> SimulatedDaemon:
        """The daemon of `node`."""
        return SimulatedDaemon(self._asking, node)

    async def heartbeat_source(self, node: str) -> HeartbeatSource | None:
        """Where it sends them from."""
        return HeartbeatSource(HOST, (await self._asking.ask(SimulatedCluster.ports))[node], "")

    async def end_job(self, job: str, keep_snapshots: bool = False) -> None:
        """Remove what it has left anywhere."""
        for daemon in (await self.ensure()).values():
            await daemon.end_job(job, keep_snapshots)

    def record_missed_end(self) -> None:
        """All simulated nodes are notified."""

    def keep_only(self, there: Collection[str]) -> None:
        """Nothing is kept of nodes."""

    async def drain(self, node: str, seconds: float) -> bool:
        """No simulated node is left."""
        return False

    async def kill(self, node: str) -> None:
        """Nothing to kill."""

    async def wake(self) -> None:
        """No node is at rest."""


class SimulatedRequests:
    """There is no autoscaler."""

    async def request(self, bundles: Sequence[Mapping[str, float]], without: Collection[str]) -> None:
        """No simulated node joins."""

    async def settle(self) -> bool:
        """Nothing is ever granted."""
        return False

    async def withdraw(self) -> None:
        """Nothing was asked for."""


def connected(socket: str, home: Path) -> Cluster:
    """The simulated cluster that listens at `socket`."""
    asking = Asking(Channel(socket, ERRORS))
    nodes = SimulatedNodes(asking)
    groups, agents, daemons = SimulatedGroups(asking), SimulatedAgents(asking), SimulatedDaemons(asking, nodes)
    parts: list[Any] = [nodes, groups, agents, daemons, SimulatedRequests()]
    return Cluster(Paths.of(home), *parts)
