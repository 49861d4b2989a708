"""Who carries out a job, and in which layout: its agents in order of rank, the placement groups of its replicas.

All changes are whole: a method either does what it says, or answers False and leaves the crew as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from service.cluster.agent_client import AgentClient, AgentError, within
from service.cluster.gangs import Gangs, NotPlaced
from service.cluster.placement import Capacity, Unit, agent_name, placement_group_name, replica_of, seats_of, unit_of
from service.cluster.sizes import given_back, resized
from workers.comm.grid import state_peers
from workers.config import JobSpec, ParallelConfig
from workers.messages import AgentDescription, LaunchOrder
from workers.snapshot.snapshots import layout_tag

PREPARE_SECONDS = 120.0
"""How long trainers of joiners may take to be ready."""
REPLICA_SECONDS = 10.0
"""How long a replica that there should be room for may take to be placed."""


@dataclass(frozen=True)
class Joiners:
    """Agents of replicas that are to join a crew."""

    agents: list[AgentClient]
    names: list[str]
    groups: list[str]


class Crew:
    """The agents of one job."""

    def __init__(self, gangs: Gangs, job_id: str, spec: JobSpec):
        self._gangs, self._job_id = gangs, job_id
        self.spec = spec
        """With the number of replicas that the job runs with; the agents are numbered by its layout."""
        self.agents: list[AgentClient] = []
        self.names: list[str] = []
        """Of the agents, as Ray knows them."""
        self.groups: list[str] = []
        """Placement groups of the replicas, by name."""
        self.after: dict[int, int] = {}
        """By rank the last report that was handled."""
        self.nodes: dict[int, str | None] = {}
        """By rank the node that it was last seen on."""
        self._been: set[str] = set()
        """All nodes that agents of the job were ever seen on: some may hold its state."""
        self.memory: dict[int, int | None] = {}
        """By rank the committed step that its trainer, which is at rest, holds for the layout."""

    @property
    def layout(self) -> ParallelConfig:
        """The one that the agents are numbered by."""
        return self.spec.layout

    @property
    def tag(self) -> str:
        """Of the layout, in the names of its snapshots."""
        return layout_tag(self.spec.model_dump(mode="json"))

    @property
    def peers(self) -> dict[int, list[int]]:
        """For each rank those that have the same state."""
        return {rank: state_peers(self.layout, rank) for rank in range(self.layout.world_size)}

    async def unit(self) -> Unit:
        """The resource of which each rank takes one."""
        return unit_of(self.spec.resources.accelerator, await self._gangs.has_gpus())

    async def capacity(self) -> Capacity:
        """What the cluster has of it."""
        return await self._gangs.capacity(await self.unit())

    async def start(self, generation: int, spec: JobSpec) -> None:
        """Start all agents in the groups that were acquired for `generation` of the job with `spec`."""
        self.spec, self.after, self.nodes, self.memory = spec, {}, {}, {}
        self.groups = [placement_group_name(self._job_id, generation, replica) for replica in range(spec.layout.data)]
        seats = seats_of(spec.layout, self.groups)
        self.agents = await self._gangs.start_agents(self._job_id, generation, seats, await self.unit())
        self.names = [agent_name(self._job_id, generation, rank) for rank in seats]

    async def release(self) -> Joiners:
        """Give up all agents and their places; the snapshots stay. Answers who hands them out, to be sent away once
        they have been fetched: the next agents may be on other nodes."""
        self.memory = {}
        keepers = await self.keepers(self._been)
        expected = given_back(await self.capacity(), self.nodes.values())
        await self._gangs.release(self._job_id, keep_snapshots=True)
        await self._gangs.until_free(expected)
        return keepers

    async def keepers(self, nodes: Collection[str] = ()) -> Joiners:
        """Who hands out what the job has left in the shared memory of these nodes, or of all; to be sent away."""
        return Joiners(await self._gangs.start_keepers(self._job_id, nodes), [], [])

    async def keepers_of(self, replicas: Sequence[int]) -> Joiners:
        """The same for the nodes of these replicas, but for those that are lost."""
        nodes = {node for rank in self.ranks_in(replicas) if (node := self.nodes.get(rank)) is not None}
        living = nodes - self._gangs.lost
        return await self.keepers(living) if living else Joiners([], [], [])

    async def place(self, generation: int, spec: JobSpec, avoid: Collection[str]) -> None:
        """Acquire places for all ranks of `spec`, and start agents there. Raises NotPlaced."""
        await self._gangs.acquire(self._job_id, generation, spec.layout, await self.unit(), avoid=avoid)
        await self.start(generation, spec)

    async def adopt(self, names: Sequence[str], after: dict[int, int]) -> dict[int, AgentDescription] | None:
        """Take over the agents with these names, by rank; by rank how those that are left describe themselves. None
        when of some replica none is: then nobody knows its places any more."""
        if len(names) != self.layout.world_size:
            return None
        found = dict(enumerate(await self._gangs.find_agents(names)))
        about = await self._gangs.describe_each({rank: agent for rank, agent in found.items() if agent is not None})
        self.nodes = {rank: place.node for rank, place in about.items()}
        if len(self.replicas_of(about)) < self.layout.data:
            return None
        self.agents = [found[rank] for rank in sorted(found)]  # type: ignore[misc]  # None: lost, to be replaced
        self.names, self.after = list(names), after
        self.note(about)
        await self._gangs.end_strays(self._job_id, names, self.groups)
        return about

    def note(self, about: Mapping[int, AgentDescription]) -> None:
        """Remember where the agents are, as they describe themselves, by rank."""
        self.seen({rank: place.node for rank, place in about.items()})
        by_replica = {replica_of(self.layout, rank): place.group for rank, place in about.items()}
        self.groups = [by_replica[replica] for replica in range(self.layout.data)]

    def seen(self, nodes: Mapping[int, str | None]) -> None:
        """Remember on which nodes the agents of these ranks, and of no others, are."""
        self.nodes = dict(nodes)
        self._been.update(node for node in nodes.values() if node is not None)

    async def replace(self, generation: int, lost: Sequence[int]) -> bool:
        """New agents for the ranks `lost`, in their places; False where those are gone too."""
        if any(self.nodes.get(rank) in self._gangs.lost for rank in lost):
            return False
        seats = seats_of(self.layout, self.groups)
        wanted = {rank: seats[rank] for rank in lost}
        await self._gangs.kill([self.agents[rank] for rank in lost])  # one that only does not answer has its seat still
        fresh = await self._gangs.replace_agents(self._job_id, generation, wanted, await self.unit())
        for rank, agent in zip(lost, fresh or [], strict=False):
            self._put(rank, agent, agent_name(self._job_id, generation, rank))
        return fresh is not None

    async def place_replicas(self, generation: int, replicas: Sequence[int], avoid: Collection[str]) -> bool:
        """New places and agents for whole replicas of the layout, whose own were given up (`give_up`)."""
        joiners = await self.enlist(generation, self.layout, replicas, avoid)
        if joiners is not None:
            self.swap(replicas, joiners)
        return joiners is not None

    async def give_up(self, replicas: Sequence[int]) -> None:
        """End what is left of these replicas, and free their places. Their snapshots stay."""
        ranks = self.ranks_in(replicas)
        expected = given_back(await self.capacity(), [self.nodes.get(rank) for rank in ranks])
        await self._gangs.dismiss([self.agents[rank] for rank in ranks], [self.groups[each] for each in replicas])
        await self._gangs.until_free(expected)

    async def enlist(
        self, generation: int, layout: ParallelConfig, replicas: Sequence[int], avoid: Collection[str]
    ) -> Joiners | None:
        """Place and start agents for these replicas of `layout`: more than the crew has, who join with `grow`, or
        others in the place of its own, with `swap`."""
        named = {replica: placement_group_name(self._job_id, generation, replica) for replica in replicas}
        standing = {**dict(enumerate(self.groups)), **named}
        all_seats = seats_of(layout, [standing[replica] for replica in range(layout.data)])
        seats = {rank: seat for rank, seat in all_seats.items() if replica_of(layout, rank) in named}
        groups = list(named.values())
        unit = await self.unit()
        try:
            await self._gangs.acquire(
                self._job_id, generation, layout, unit, REPLICA_SECONDS, avoid, replicas=list(named)
            )
        except NotPlaced:
            return None
        agents = await self._gangs.start_agents(self._job_id, generation, seats, unit)
        joiners = Joiners(agents, [agent_name(self._job_id, generation, rank) for rank in seats], groups)
        if await self._gangs.answer(agents):
            return joiners
        await self.send_away(joiners)
        return None

    def swap(self, replicas: Sequence[int], joiners: Joiners) -> Joiners:
        """From now on the joiners have the ranks of these replicas; those who had them, to be sent away."""
        ranks = self.ranks_in(replicas)
        left = Joiners(
            [self.agents[rank] for rank in ranks],
            [self.names[rank] for rank in ranks],
            [self.groups[replica] for replica in replicas],
        )
        for rank, agent, name in zip(ranks, joiners.agents, joiners.names, strict=True):
            self._put(rank, agent, name)
        for replica, group in zip(replicas, joiners.groups, strict=True):
            self.groups[replica] = group
        return left

    def grow(self, spec: JobSpec, joiners: Joiners) -> None:
        """From now on the joiners have the ranks of `spec`'s layout that follow the crew's."""
        self.agents += joiners.agents
        self.names += joiners.names
        self.groups += joiners.groups
        self.spec, self.memory = spec, {}

    def shrink(self, replicas: Sequence[int]) -> Joiners:
        """Go on with only these replicas, numbered anew in their order; those who leave, to be sent away."""
        staying = [rank for replica in replicas for rank in range(len(self.agents)) if self._in(rank, [replica])]
        leaving = [rank for rank in range(len(self.agents)) if rank not in set(staying)]
        gone = [group for replica, group in enumerate(self.groups) if replica not in set(replicas)]
        left = Joiners([self.agents[rank] for rank in leaving], [self.names[rank] for rank in leaving], gone)
        self.after = {new: self.after[old] for new, old in enumerate(staying) if old in self.after}
        self.nodes = {new: self.nodes[old] for new, old in enumerate(staying) if old in self.nodes}
        self.agents = [self.agents[rank] for rank in staying]
        self.names = [self.names[rank] for rank in staying]
        self.groups = [self.groups[replica] for replica in replicas]
        self.spec, self.memory = resized(self.spec, len(replicas)), {}
        return left

    async def send_away(self, people: Joiners) -> None:
        """End agents that are not of the crew (any more), and free their places."""
        await self._gangs.dismiss(people.agents, people.groups)

    def on(self, nodes: Collection[str]) -> list[int]:
        """The ranks on these nodes, ascending."""
        return sorted(rank for rank, node in self.nodes.items() if node in nodes and rank < len(self.agents))

    def replicas_of(self, ranks: Collection[int]) -> list[int]:
        """The replicas of these ranks, ascending."""
        return sorted({replica_of(self.layout, rank) for rank in ranks})

    def ranks_in(self, replicas: Collection[int]) -> list[int]:
        """The ranks of these replicas, ascending."""
        return [rank for rank in range(len(self.agents)) if self._in(rank, replicas)]

    def _in(self, rank: int, replicas: Collection[int]) -> bool:
        return replica_of(self.layout, rank) in replicas

    def _put(self, rank: int, agent: AgentClient, name: str) -> None:
        self.agents[rank], self.names[rank] = agent, name
        for about in (self.after, self.nodes, self.memory):
            about.pop(rank, None)


async def prepared(agents: Sequence[AgentClient], orders: Sequence[LaunchOrder]) -> bool:
    """Whether every agent has a trainer ready for its order."""
    pairs = zip(agents, orders, strict=True)
    try:
        return all(await within(PREPARE_SECONDS, asyncio.gather(*(agent.prepare(order) for agent, order in pairs))))
    except AgentError:
        return False
