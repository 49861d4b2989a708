"""The cluster as the service uses it: its nodes, placement groups, agents and daemons, and operations on several of
them. For asyncio: no call blocks the loop."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manta.service.cluster.agent_client import AgentClient, OrderEpoch
from manta.service.cluster.agents import Agents, describe
from manta.service.cluster.connection import RayConnection
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.node_daemons import NodeDaemons
from manta.service.cluster.node_shapes import NodeShape
from manta.service.cluster.nodes import Nodes, keep_keys
from manta.service.cluster.placement import Seat, Unit, job_of
from manta.service.cluster.placement_groups import NodeRequests, PlacementGroups
from manta.service.cluster.ray_private import session_name
from manta.service.leases.decisions import LeaseLost, LeaseUncertain
from manta.workers.paths import Paths
from manta.workers.system.sockets import PortRange


@dataclass(frozen=True)
class NodeOptions:
    """Options for all nodes of a cluster."""

    notices: str | None = None
    """Which services the nodes ask whether they are about to be taken away, as `manta.workers.node.notice_sources`
    reads it; None: none."""
    ports: PortRange | None = None
    """Ports on which the processes on the nodes listen; None: any."""
    shapes: Sequence[NodeShape] = ()
    """Nodes that an autoscaler can add."""


ANY_NODES = NodeOptions()


class Cluster:
    """The whole cluster. Ray's own errors arrive as ClusterUnavailable, those of agents and daemons as AgentError."""

    def __init__(
        self,
        paths: Paths,
        nodes: Nodes,
        groups: PlacementGroups,
        agents: Agents,
        daemons: NodeDaemons,
        requests: NodeRequests,
    ):
        self.paths, self.nodes, self.groups, self.agents, self.daemons = paths, nodes, groups, agents, daemons
        self.requests = requests
        self.peak_flops: dict[str, float] = {}
        """Peak FLOP/s of one rank on a CPU slot, by node id, if it was measured."""
        self._epoch: OrderEpoch | None = None
        self.identity = ""
        """Identifies the Ray cluster; empty if there is none."""
        self.is_remote = False
        """Whether its nodes may see other files than the control plane does."""

    def fence_with(self, epoch: OrderEpoch) -> None:
        """From now on, do what concerns a job only if `epoch` permits it."""
        self._epoch = self.agents.epoch = self.groups.epoch = epoch

    @classmethod
    def connected(cls, ray: Any, paths: Paths, options: NodeOptions = ANY_NODES, *, is_remote: bool = False) -> Cluster:
        """The cluster that the module `ray` is connected to. `paths`: of the embedded state; `is_remote`: whether
        its nodes may see other files than this process does."""
        connection = RayConnection(ray)
        nodes = Nodes(connection, options.shapes)
        agents = Agents(connection, nodes, paths, options.ports)
        daemons = NodeDaemons(connection, nodes, paths, options.notices, options.ports)
        requests = NodeRequests(connection)
        cluster = cls(paths, nodes, PlacementGroups(connection, nodes), agents, daemons, requests)
        cluster.identity, cluster.is_remote = session_name(ray), is_remote
        return cluster

    async def replace_agents(
        self, job: str, generation: int, seats: Mapping[int, Seat], unit: Unit
    ) -> list[AgentClient] | None:
        """Start new agents for ranks whose agents are gone, in their `seats`; returned in that order once they answer.
        None if a placement group no longer exists, or if they do not answer."""
        states = await self.groups.states({seat.group for seat in seats.values()})
        if any(states.get(seat.group) != "CREATED" for seat in seats.values()):
            return None
        agents = await self.agents.start(job, generation, seats, unit)
        if await describe(agents) is not None:
            return agents
        await self.agents.kill(agents)
        return None

    async def dismiss(self, agents: Iterable[AgentClient | None], groups: Iterable[str]) -> None:
        """End these agents (None: already gone) and their trainers, but keep what they have in shared memory; remove
        these groups."""
        await self.agents.end(agents, keep_snapshots=True)
        await self.groups.remove(groups)

    async def release(self, job: str, keep_snapshots: bool = False) -> None:
        """End the agents of `job` and their trainers, and remove its placement groups. Returns when they are gone. Its
        snapshots are removed too unless `keep_snapshots`."""
        names = [name for name in await self.agents.names() if job_of(name) == job]
        await self.agents.end(await self.agents.find(names), keep_snapshots)
        await self.groups.remove([name for name in await self.groups.states() if job_of(name) == job])

    async def end_strays(self, job: str, names: Collection[str], groups: Collection[str]) -> None:
        """End all agents and placement groups of `job` except these: some that were to join, or had left."""
        strays = [name for name in await self.agents.names() if job_of(name) == job and name not in names]
        held = [name for name in await self.groups.states() if job_of(name) == job and name not in groups]
        await self.dismiss(await self.agents.find(strays), held)

    async def end_job(self, job: str, keep_snapshots: bool = False) -> None:
        """Release `job` for good, and let every node remove what is left of it, such as the snapshots of an agent that
        was killed; or everything except its snapshots. A node that does not answer is swept when it comes back; if Ray
        does not answer, all nodes are."""
        if self._epoch is not None:
            self._epoch(job, None)
        try:
            await self.release(job, keep_snapshots)
            await self.daemons.end_job(job, keep_snapshots)
        except ClusterUnavailable:
            self.daemons.record_missed_end()
            raise

    async def jobs(self) -> list[str]:
        """All jobs that have agents or placement groups."""
        names = [*await self.agents.names(), *await self.groups.states()]
        return sorted({job for name in names if (job := job_of(name)) is not None})

    def keep_only(self, there: Collection[str]) -> None:
        """Forget all nodes except these: the others are gone, and nodes may come and go for weeks."""
        self.nodes.keep_only(there)
        self.daemons.keep_only(there)
        keep_keys(self.peak_flops, there)

    async def fail_calls_to(self, node: str) -> None:
        """Make calls to what is on `node`, which is lost, fail now: those to agents at once, the others, and what waits
        in Ray, by telling it that all actors there are dead, which it would find out much later. Agents of jobs that
        another control plane owns are left to that one, which may still reach the node, and so is the node's daemon,
        since their trainers would end with it."""
        self.agents.fail_calls_to(node)
        theirs = False
        for agent in await self.agents.find(await self.agents.names_on(node)):
            try:
                await self.agents.kill([agent])
            except (LeaseLost, LeaseUncertain):
                theirs = True
        if not theirs:
            await self.daemons.kill(node)
