"""A cluster that exists on paper: nodes with slots, agents in this process. The real `Cluster` combines them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from manta.service.cluster.agent_client import AgentError, within
from manta.service.cluster.agents import CLOSE_SECONDS
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.node_shapes import NodeShape, grown
from manta.service.cluster.nodes import GpuReadings, Nodes, RayNode
from manta.service.cluster.placement import Capacity, agent_name, placement_group_name, replica_bundles
from manta.service.cluster.placement_groups import NotPlaced
from manta.workers.config import JobSpec
from manta.workers.paths import Paths
from manta.workers.protocol.messages import (
    Endpoint,
    Launched,
    LaunchOrder,
    NodeDescription,
    StoredSnapshot,
)
from manta.workers.protocol.reports import Report
from manta.workers.protocol.requests import RankRequest
from manta.workers.snapshot.files import layout_tag
from tests.service.support.fake_agents import FakeAgent

Memory = dict[tuple[str, str, int], list[int]]
"""By job, layout and rank the steps in shared memory."""


class FakeNodes:
    """Nodes by name with so many slots each; a node is a host of its own."""

    def __init__(self, slots: dict[str, int]):
        self.slots, self.used = dict(slots), dict.fromkeys(slots, 0)
        self.lost: set[str] = set()
        self.draining: set[str] = set()
        self.leave_by: dict[str, float] = {}
        self.drain_reasons: dict[str, str] = {}
        self.unresponsive: set[str] = set()
        self.problems: dict[str, str] = {}
        self.unswept: set[str] = set()
        self.gpus: dict[str, GpuReadings] = {}
        self.accelerated: dict[str, tuple[int, int]] | None = None
        """By node its GPUs, (total, free), of which nobody takes any; None: what is asked for is what there is."""
        self.at_rest: set[str] = set()
        self.shapes: tuple[NodeShape, ...] = ()
        self.types: dict[str, str] = {}
        """By node its type, of those that an autoscaler has added."""
        self.error: Exception | None = None
        """What the next look at the nodes raises."""

    @property
    def closed(self):
        return self.lost | self.draining | self.unresponsive | self.problems.keys()

    drain, cancel_drain, problem_of_all = Nodes.drain, Nodes.cancel_drain, Nodes.problem_of_all

    async def has_gpus(self):
        return bool(self.accelerated)

    async def living(self):
        return [node for node in self.slots if node not in self.lost]

    async def known(self):
        return [RayNode(node, ("127.0.0.1", 1), node) for node in self.slots]

    async def capacity(self, unit, all_living=False):
        error, self.error = self.error, None
        if error is not None:
            raise error
        left = [node for node in await self.living() if all_living or node not in self.closed]
        if unit == "GPU" and self.accelerated is not None:
            gpus = {node: self.accelerated.get(node, (0, 0)) for node in left}
            return Capacity(
                unit, sum(total for total, _ in gpus.values()), sum(free for _, free in gpus.values()), gpus
            )
        units = {node: (self.slots[node], max(0, self.slots[node] - self.used[node])) for node in left}
        return Capacity(unit, sum(total for total, _ in units.values()), sum(free for _, free in units.values()), units)

    async def at_most(self, unit):
        return grown(await self.capacity(unit), self.shapes, self.types.values())

    async def autoscaled_nodes(self):
        return {node for node in await self.living() if node in self.types}

    async def unused(self):
        return {node for node in await self.living() if not self.used[node]}

    async def until_free(self, expected):
        return None


class FakeRequests:
    """What an autoscaler is asked for."""

    def __init__(self):
        self.bundles: list[dict[str, float]] = []

    async def request(self, bundles, without):
        self.bundles = list(bundles)

    async def settle(self):
        return False

    async def withdraw(self):
        self.bundles = []


class FakeGroups:
    """Placement groups: by name the node of each of their bundles."""

    def __init__(self, nodes: FakeNodes):
        self._nodes = nodes
        self.held: dict[str, list[tuple[str, int]]] = {}
        """By group for each bundle its node, and how many slots it takes there."""
        self.acquired: list[tuple[str, int, tuple[int, ...], frozenset[str]]] = []
        """(Job, generation, replicas, nodes to avoid) of each call."""
        self.refuse: Callable[[], None] = lambda: None
        """Called when anything is to be acquired; what it raises is raised."""

    async def acquire(self, job, generation, layout, unit, timeout=30.0, avoid=(), replicas=None):
        wanted = list(range(layout.data) if replicas is None else replicas)
        self.acquired.append((job, generation, tuple(wanted), frozenset(avoid)))
        self.refuse()
        names = [placement_group_name(job, generation, replica) for replica in wanted]
        bundles = replica_bundles(layout, unit)
        try:
            for name, replica in zip(names, wanted, strict=True):
                self.held[name] = []
                for bundle in bundles[replica]:
                    size = int(bundle[unit])
                    self.held[name].append((self._take(size, {*avoid, *self._nodes.closed}), size))
        except NotPlaced:
            await self.remove(names)
            raise

    def _take(self, size: int, avoid: set[str]) -> str:
        for node, slots in self._nodes.slots.items():
            if node not in avoid and slots - self._nodes.used[node] >= size:
                self._nodes.used[node] += size
                return node
        raise NotPlaced("there is no room")

    async def states(self, names=None):
        lost = self._nodes.lost
        return {
            name: "RESCHEDULING" if any(node in lost for node, _ in at) else "CREATED"
            for name, at in self.held.items()
            if names is None or name in names
        }

    async def remove(self, names):
        for name in names:
            for node, size in self.held.pop(name, []):
                self._nodes.used[node] -= size


class SimulatedAgent(FakeAgent):
    """A FakeAgent whose snapshots lie in the shared memory of its host, where later agents find them."""

    def __init__(self, agents: FakeAgents, job: str, rank: int, node: str, group: str = "", name: str | None = None):
        self._agents, self.job, self.name, self.node = agents, job, name, node
        self.layout: str | None = None
        self.hung: int | None = None
        """Generation in which its trainer stands still."""
        self.handled = 0
        """Sequence of the last report that was handled."""
        super().__init__(rank, node, node, group)

    @property
    def memory(self) -> Memory:
        """The shared memory of its host."""
        return self._agents.memory.setdefault(self.node, {})

    @property
    def steps(self) -> list[int]:
        return self.memory.get((self.job, self.layout or "", self.rank), [])

    @steps.setter
    def steps(self, steps: list[int]) -> None:
        if self.layout is not None:
            self.memory[self.job, self.layout, self.rank] = list(steps)

    @property
    def files(self) -> list[StoredSnapshot]:
        return [
            StoredSnapshot(f"/shm/{layout}-{rank}", rank, layout, False, tuple(steps))
            for (job, layout, rank), steps in self.memory.items()
            if steps and job == self.job
        ]

    @files.setter
    def files(self, files: list[StoredSnapshot]) -> None:
        if not files and self.layout is not None:
            self.memory.pop((self.job, self.layout, self.rank), None)

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        await self._agents.before_rest(self)
        return await super().rest(generation, grace, patience)

    async def tell(self, request: RankRequest) -> bool:
        outcome = await super().tell(request)
        self._agents.changed()
        return outcome

    async def launch(self, order: LaunchOrder) -> Launched:
        self.layout = layout_tag(JobSpec.model_validate(order.spec).layout)
        launched = await super().launch(order)
        self._agents.changed()
        return launched

    async def snapshot_steps(self, layout: str | None = None) -> list[int]:
        await self._answer("snapshot_steps")
        return list(self.memory.get((self.job, layout or self.layout or "", self.rank), []))

    async def fetch_snapshot(
        self, rank: int, holder: Endpoint, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        await super().fetch_snapshot(rank, holder, token, generation, layout, of)
        steps = self._agents.memory.get(holder.host, {}).get((self.job, layout, rank if of is None else of), [])
        self.memory[self.job, layout, rank] = list(steps)
        return list(steps)

    async def reports(self, after: int, timeout: float, kept: tuple[int, ...] | None = None) -> list[Report]:
        self.handled = max(self.handled, after)
        self._agents.changed()
        return await super().reports(after, timeout, kept)

    @property
    def all_handled(self) -> bool:
        """Whether everything that it has reported was handled."""
        return self.handled == len(self._reports)


async def _nothing(agent: SimulatedAgent) -> None:
    return None


class FakeAgents:
    """All agents of all jobs, by name."""

    def __init__(self, nodes: FakeNodes, groups: FakeGroups):
        self._nodes, self._groups = nodes, groups
        self.living: dict[str, SimulatedAgent] = {}
        self.holders: list[SimulatedAgent] = []
        """Those that were started only to hand out snapshots, ended ones too."""
        self.ended: list[SimulatedAgent] = []
        self.elsewhere: list[str] = []
        """Jobs with agents under other databases."""
        self.memory: dict[str, Memory] = {}
        """Shared memory by host."""
        self.on_start: Callable[[SimulatedAgent], None] = lambda agent: None
        """Called with each agent that is started for a rank."""
        self.before_rest: Callable[[SimulatedAgent], Awaitable[None]] = _nothing
        """Called before an agent brings its trainer to rest."""
        self._change = asyncio.Event()

    def changed(self) -> None:
        """Something happened to an agent: look again."""
        self._change.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at whenever something happens to an agent."""
        while not condition():
            self._change.clear()
            await self._change.wait()

    async def start(self, job, generation, seats, unit):
        started = []
        for rank, seat in seats.items():
            node, _ = self._groups.held[seat.group][seat.bundle]
            agent = SimulatedAgent(self, job, rank, node, seat.group, agent_name(job, generation, rank))
            self.living[agent.name] = agent
            self.on_start(agent)
            started.append(agent)
        self.changed()
        return started

    async def start_snapshot_holders(self, job, nodes):
        living = await self._nodes.living()
        if len(living) < 2:
            return []
        holders = [SimulatedAgent(self, job, 0, node) for node in living if node in (nodes or living)]
        self.holders += holders
        return holders

    async def names(self):
        return list(self.living)

    async def jobs_of_other_installations(self):
        return self.elsewhere

    async def names_on(self, node):
        return [name for name, agent in self.living.items() if agent.node == node]

    async def find(self, names):
        return [self.living.get(name) for name in names]

    async def node_of(self, agent):
        return agent.node

    def fail_calls_to(self, node):
        """Calls fail once the agents there are killed."""

    async def kill(self, agents):
        for agent in agents:
            if agent is not None:
                agent.lose()
                self.living.pop(agent.name, None)
                self.ended.append(agent)
        self.changed()

    async def end(self, agents, keep_snapshots):
        for agent in agents:
            if agent is None:
                continue
            with contextlib.suppress(AgentError):
                await within(CLOSE_SECONDS, agent.stop() if keep_snapshots else agent.close())
            await self.kill([agent])


@dataclass
class FakeDaemon:
    """The daemon of a node."""

    node: str
    stores: list[tuple[str, int]] = field(default_factory=list)
    ended_jobs: list[str] = field(default_factory=list)
    on_end: Callable[[str], None] = lambda job: None
    remembers: Callable[[], set[str]] = set
    """Jobs that have snapshots here."""
    left: list[str] = field(default_factory=list)
    """Jobs that have left something else."""
    peak_flops: float | None = 1e12
    drains: list[float] = field(default_factory=list)
    notice: str = ""
    """Why the machine says that it goes away."""

    async def describe(self):
        return NodeDescription(self.node, self.node, "127.0.0.1", 1, 2, peak_flops=self.peak_flops)

    async def jobs(self):
        return [*self.left, *sorted(self.remembers() - set(self.left))]

    async def drain(self, seconds):
        self.drains.append(seconds)

    async def undrain(self):
        self.drains.clear()
        return self.notice

    async def start_store(self, job, generation, one_machine=False):
        self.stores.append((job, generation, one_machine))
        return Endpoint(self.node, 4000)

    async def end_job(self, job, keep_snapshots=False):
        self.ended_jobs.append(job)
        if keep_snapshots:
            return
        self.left = [each for each in self.left if each != job]
        self.on_end(job)


class FakeDaemons:
    """A daemon on each node."""

    def __init__(self, nodes: FakeNodes, memory: dict[str, Memory]):
        self._nodes, self._memory = nodes, memory
        self.silent: set[str] = set()
        """Nodes whose daemon does not answer."""
        self.remembered: set[str] = set()
        """Nodes whose daemon is found without Ray's head."""
        self.hang: dict[str, Callable[[float], Awaitable[None]]] = {}
        """What is waited for before the daemon of a node is there."""
        self._daemons: dict[str, FakeDaemon] = {}
        self.used: dict[str, float] = {}

    def _daemon(self, node: str) -> FakeDaemon:
        made = FakeDaemon(node, on_end=lambda job: self._forget(node, job), remembers=lambda: self._remembered(node))
        return self._daemons.setdefault(node, made)

    def _remembered(self, node: str) -> set[str]:
        return {job for job, *_ in self._memory.get(node, {})}

    def _forget(self, node: str, job: str) -> None:
        memory = self._memory.get(node, {})
        for key in [key for key in memory if key[0] == job]:
            del memory[key]

    async def ensure(self, zygote_options=(), zygote_environment=None):
        living = await self._nodes.living()
        self._nodes.unswept.update(self.silent.intersection(living))
        return {node: self._daemon(node) for node in living if node not in self.silent}

    async def known(self, node):
        return self._daemon(node) if node in self.remembered - self.silent else None

    async def of(self, node, zygote_options=(), zygote_environment=None):
        await self.hang.get(node, asyncio.sleep)(0)
        answers = node not in self.silent
        if answers:
            self._nodes.unresponsive.discard(node)
            return self._daemon(node)
        self._nodes.unresponsive.add(node)
        self._nodes.unswept.add(node)
        return None

    async def watched(self, node):
        if node in self._nodes.at_rest:
            return None
        return await self.of(node)

    async def wake(self):
        for node in self._nodes.at_rest - self._nodes.closed:
            self._nodes.at_rest.discard(node)
            await self.of(node)

    async def rest(self, node):
        self._nodes.at_rest.add(node)

    async def end_job(self, job, keep_snapshots=False):
        for daemon in (await self.ensure()).values():
            await daemon.end_job(job, keep_snapshots)

    def record_missed_end(self):
        self._nodes.unswept.update(self._nodes.slots)

    async def kill(self, node):
        self.silent.add(node)

    async def drain(self, node, seconds):
        if node in self.silent:
            return False
        await self._daemon(node).drain(seconds)
        return True

    async def undrain(self, node):
        return None if node in self.silent else await self._daemon(node).undrain()

    async def end_all(self):
        self.silent.update(self._nodes.slots)


class FakeCluster(Cluster):
    """The real Cluster over parts that exist on paper."""

    nodes: FakeNodes
    groups: FakeGroups
    agents: FakeAgents
    daemons: FakeDaemons
    requests: FakeRequests  # type: ignore[assignment]

    def __init__(self, home, **slots: int):
        """`slots`: of each node, by its name."""
        nodes = FakeNodes(slots)
        groups = FakeGroups(nodes)
        agents = FakeAgents(nodes, groups)
        daemons = FakeDaemons(nodes, agents.memory)
        super().__init__(Paths.of(home), nodes, groups, agents, daemons, FakeRequests())  # type: ignore[arg-type]

    def lose_node(self, node: str) -> None:
        """`node` is gone, with its agents and what is in its memory; the control plane is not told."""
        self.nodes.lost.add(node)
        self.agents.memory.pop(node, None)
        for agent in [agent for agent in self.agents.living.values() if agent.node == node]:
            agent.lose()
            self.agents.living.pop(agent.name)

    @property
    def nothing_held(self) -> bool:
        """Whether no job holds agents, places or snapshots."""
        return not (self.agents.living or self.groups.held or any(self.agents.memory.values()))
