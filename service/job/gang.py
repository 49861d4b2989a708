"""The processes of a job, and their layout: its agents in order of rank, the placement groups of its replicas.

All changes are whole: a method either does what it says, or answers False and leaves the gang as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from manta.service.cluster.agent_client import AgentClient
from manta.service.cluster.agents import describe, describe_all
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.placement import (
    Capacity,
    Unit,
    agent_name,
    placement_group_name,
    replica_of,
    seats_of,
    unit_of,
)
from manta.service.cluster.placement_groups import NotPlaced
from manta.service.cluster.sizes import resized, with_freed_units
from manta.workers.comm.grid import state_groups
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.protocol.messages import AgentDescription
from manta.workers.snapshot.files import layout_tag

REPLICA_SECONDS = 10.0
"""Seconds that placing a replica may take if there should be room for it."""
NO_PLACEMENT_GROUP = ""
"""Stands for the placement group of a replica that has no agent left."""


@dataclass(frozen=True)
class AgentSet:
    """Agents of a job outside its gang: not yet or no longer members, or only there to hand out snapshots."""

    agents: list[AgentClient]
    groups: list[str] = field(default_factory=list)
    """Placement groups that are given back with them."""
    names: list[str] = field(default_factory=list)
    """Names in Ray of agents that are to have a rank."""


class Gang:
    """The agents of one job."""

    def __init__(self, cluster: Cluster, job_id: str, spec: JobSpec):
        self._cluster, self._job_id = cluster, job_id
        self.spec = spec
        """With the present number of replicas; the agents are numbered by its layout."""
        self.agents: list[AgentClient | None] = []
        """By rank; None: the agent is lost, and must be replaced before the next launch."""
        self.names: list[str] = []
        """Names of the agents in Ray."""
        self.groups: list[str] = []
        """Names of the replicas' placement groups."""
        self.after: dict[int, int] = {}
        """By rank the sequence number of the last report that was handled."""
        self.nodes: dict[int, str | None] = {}
        """By rank the node that it was last seen on."""
        self._visited: set[str] = set()
        """All nodes that agents of the job were ever seen on: some may hold its state."""
        self.resting_steps: dict[int, int | None] = {}
        """By rank the committed step that its resting trainer holds."""
        self.departing: list[AgentSet] = []
        """Agents that left and are to be dismissed; their nodes may hold state that the next generation needs."""
        self.stragglers_replaced: dict[int, float] = {}
        """When each rank was last replaced as a straggler, in seconds of the monotonic clock."""
        threads = spec.resources.threads
        self.threads = None if threads == "auto" else threads
        """Threads of each rank; None: decided when the job first starts."""

    @property
    def layout(self) -> ParallelConfig:
        """The layout by which the agents are numbered."""
        return self.spec.layout

    @property
    def tag(self) -> str:
        """Tag of the layout, in the names of its snapshots."""
        return layout_tag(self.spec.layout)

    @property
    def peers(self) -> dict[int, list[int]]:
        """For each rank the ranks with the same state."""
        return {rank: group for group in state_groups(self.layout) for rank in group}

    @property
    def by_rank(self) -> dict[int, AgentClient]:
        """The agents by rank, without lost ones."""
        return {rank: agent for rank, agent in enumerate(self.agents) if agent is not None}

    async def unit(self) -> Unit:
        """The resource of which each rank takes one."""
        return unit_of(self.spec.resources.accelerator, await self._cluster.nodes.has_gpus())

    async def capacity(self) -> Capacity:
        """The cluster's capacity in that resource."""
        return await self._cluster.nodes.capacity(await self.unit())

    async def start(self, generation: int, spec: JobSpec) -> None:
        """Start all agents in the groups that were acquired for `generation` of the job with `spec`."""
        self.spec, self.after, self.nodes, self.resting_steps = spec, {}, {}, {}
        self.groups = [placement_group_name(self._job_id, generation, replica) for replica in range(spec.layout.data)]
        seats = seats_of(spec.layout, self.groups)
        self.agents = [*await self._cluster.agents.start(self._job_id, generation, seats, await self.unit())]
        self.names = [agent_name(self._job_id, generation, rank) for rank in seats]

    async def release(self) -> AgentSet:
        """Give up all agents and their places; the snapshots stay. Returns agents that hand these out, to be dismissed
        once they have been fetched: the next agents may be on other nodes."""
        holders = await self.snapshot_holders(self._visited)
        expected = with_freed_units(await self.capacity(), self.nodes.values())
        await self._cluster.release(self._job_id, keep_snapshots=True)
        await self._cluster.nodes.until_free(expected)
        return holders

    async def snapshot_holders(self, nodes: Collection[str] = ()) -> AgentSet:
        """Agents that hand out what the job has left in the shared memory of these nodes, or of all; to be dismissed
        later."""
        return AgentSet(await self._cluster.agents.start_snapshot_holders(self._job_id, nodes))

    async def snapshot_holders_of(self, replicas: Sequence[int]) -> AgentSet:
        """Agents that hand out what the job has left in the shared memory of these replicas' nodes, except for lost
        nodes; to be dismissed later."""
        nodes = {node for rank in self.ranks_in(replicas) if (node := self.nodes.get(rank)) is not None}
        living = nodes - self._cluster.nodes.lost
        return await self.snapshot_holders(living) if living else AgentSet([])

    async def place(self, generation: int, spec: JobSpec, avoid: Collection[str]) -> None:
        """Acquire places for all ranks of `spec`, and start agents there. Raises NotPlaced."""
        await self._cluster.daemons.wake()
        await self._cluster.groups.acquire(self._job_id, generation, spec.layout, await self.unit(), avoid=avoid)
        await self.start(generation, spec)

    async def adopt(self, names: Sequence[str], after: dict[int, int]) -> dict[int, AgentDescription] | None:
        """Take over the agents with these names, by rank; returns by rank the descriptions of those that are left, or
        None if none is. The places of a replica without any agent are unknown, and freed."""
        if len(names) != self.layout.world_size:
            return None
        agents = await self._cluster.agents.find(names)
        about = await describe_all({rank: agent for rank, agent in enumerate(agents) if agent is not None})
        self.nodes = {rank: place.node for rank, place in about.items()}
        if not about:
            return None
        self.agents, self.names, self.after = agents, list(names), after
        self.record_placements(about)
        await self._cluster.end_strays(self._job_id, names, self.groups)
        return about

    def record_placements(self, about: Mapping[int, AgentDescription]) -> None:
        """Remember where the agents are, as they describe themselves, by rank."""
        self.record_nodes({rank: place.node for rank, place in about.items()})
        by_replica = {replica_of(self.layout, rank): place.group for rank, place in about.items()}
        self.groups = [by_replica.get(replica, NO_PLACEMENT_GROUP) for replica in range(self.layout.data)]

    def record_nodes(self, nodes: Mapping[int, str | None]) -> None:
        """Remember the nodes of the agents of these ranks; those of all others are unknown."""
        self.nodes = dict(nodes)
        self._visited.update(node for node in nodes.values() if node is not None)

    async def replace(self, generation: int, lost: Sequence[int]) -> bool:
        """Start new agents for the ranks `lost`, in their places; False if those are gone too."""
        if any(self.nodes.get(rank) in self._cluster.nodes.lost for rank in lost):
            return False
        if NO_PLACEMENT_GROUP in self._groups_of(self.replicas_of(lost)):
            return False
        seats = seats_of(self.layout, self.groups)
        wanted = {rank: seats[rank] for rank in lost}
        # One that just does not answer still has its seat.
        await self._cluster.agents.kill([self.agents[rank] for rank in lost])
        fresh = await self._cluster.replace_agents(self._job_id, generation, wanted, await self.unit())
        for rank, agent in zip(lost, fresh or [], strict=False):
            self._put(rank, agent, agent_name(self._job_id, generation, rank))
        return fresh is not None

    async def place_replicas(self, generation: int, replicas: Sequence[int], avoid: Collection[str]) -> bool:
        """Get new places and agents for whole replicas, which have given up their own (`give_up`); False if there is no
        room."""
        standby = await self.start_standby(generation, self.layout, replicas, avoid)
        if standby is not None:
            self.swap(replicas, standby)
        return standby is not None

    async def give_up(self, replicas: Sequence[int], lost: Sequence[int] = ()) -> None:
        """End what is left of these replicas, and free their places. Their snapshots stay. Agents of the ranks `lost`
        among them have not answered: they are killed without being asked, since each question would wait again."""
        ranks = self.ranks_in(replicas)
        expected = with_freed_units(await self.capacity(), [self.nodes.get(rank) for rank in ranks])
        places = [group for group in self._groups_of(replicas) if group != NO_PLACEMENT_GROUP]
        await self._cluster.agents.kill([self.agents[rank] for rank in lost])
        for rank in lost:
            self.agents[rank] = None
        await self._cluster.dismiss([self.agents[rank] for rank in ranks], places)
        await self._cluster.nodes.until_free(expected)

    async def start_standby(
        self, generation: int, layout: ParallelConfig, replicas: Sequence[int], avoid: Collection[str]
    ) -> AgentSet | None:
        """Place and start agents for these replicas of `layout`: additional ones, which join with `grow`, or
        replacements, which take over with `swap`. None if they cannot be placed."""
        named = {replica: placement_group_name(self._job_id, generation, replica) for replica in replicas}
        standing = {**dict(enumerate(self.groups)), **named}
        all_seats = seats_of(layout, [standing[replica] for replica in range(layout.data)])
        seats = {rank: seat for rank, seat in all_seats.items() if replica_of(layout, rank) in named}
        unit = await self.unit()
        await self._cluster.daemons.wake()
        try:
            await self._cluster.groups.acquire(
                self._job_id, generation, layout, unit, REPLICA_SECONDS, avoid, replicas=list(named)
            )
        except NotPlaced:
            return None
        agents = await self._cluster.agents.start(self._job_id, generation, seats, unit)
        names = [agent_name(self._job_id, generation, rank) for rank in seats]
        standby = AgentSet(agents, list(named.values()), names)
        if await describe(agents) is not None:
            return standby
        await self.dismiss(standby)
        return None

    def swap(self, replicas: Sequence[int], standby: AgentSet) -> AgentSet:
        """`standby` takes over the ranks of these replicas; returns their former agents, to be dismissed."""
        ranks = self.ranks_in(replicas)
        departing = self._set_of(ranks, replicas)
        for rank, agent, name in zip(ranks, standby.agents, standby.names, strict=True):
            self._put(rank, agent, name)
        for replica, group in zip(replicas, standby.groups, strict=True):
            self.groups[replica] = group
        return departing

    def grow(self, spec: JobSpec, standby: AgentSet) -> None:
        """`standby` becomes the ranks of `spec`'s layout that follow the gang's present ones."""
        self.agents += standby.agents
        self.names += standby.names
        self.groups += standby.groups
        self.spec, self.resting_steps = spec, {}

    def shrink(self, replicas: Sequence[int]) -> AgentSet:
        """Continue with only these replicas, renumbered in order; returns the agents that leave, to be dismissed."""
        staying = [rank for replica in replicas for rank in self.ranks_in([replica])]
        leaving = [replica for replica in range(len(self.groups)) if replica not in set(replicas)]
        departing = self._set_of(self.ranks_in(leaving), leaving)
        self.after = {new: self.after[old] for new, old in enumerate(staying) if old in self.after}
        self.nodes = {new: self.nodes[old] for new, old in enumerate(staying) if old in self.nodes}
        self.agents = [self.agents[rank] for rank in staying]
        self.names = [self.names[rank] for rank in staying]
        self.groups = [self.groups[replica] for replica in replicas]
        self.spec, self.resting_steps = resized(self.spec, len(replicas)), {}
        return departing

    async def dismiss(self, agents: AgentSet) -> None:
        """End agents outside the gang, and free their places."""
        await self._cluster.dismiss(agents.agents, agents.groups)

    def on(self, nodes: Collection[str]) -> list[int]:
        """The ranks on these nodes, ascending."""
        return sorted(rank for rank, node in self.nodes.items() if node in nodes and rank < len(self.agents))

    def replicas_of(self, ranks: Collection[int]) -> list[int]:
        """The replicas of these ranks, ascending."""
        return sorted({replica_of(self.layout, rank) for rank in ranks})

    def ranks_in(self, replicas: Collection[int]) -> list[int]:
        """The ranks of these replicas, ascending."""
        return [rank for rank in range(len(self.agents)) if replica_of(self.layout, rank) in replicas]

    def _set_of(self, ranks: Sequence[int], replicas: Sequence[int]) -> AgentSet:
        """The agents of these ranks that are not lost, with the groups of these replicas."""
        living = self.by_rank
        places = [group for group in self._groups_of(replicas) if group != NO_PLACEMENT_GROUP]
        return AgentSet([living[rank] for rank in ranks if rank in living], places)

    def _groups_of(self, replicas: Sequence[int]) -> list[str]:
        return [self.groups[replica] for replica in replicas]

    def _put(self, rank: int, agent: AgentClient | None, name: str) -> None:
        self.agents[rank], self.names[rank] = agent, name
        for about in (self.after, self.nodes, self.resting_steps):
            about.pop(rank, None)
