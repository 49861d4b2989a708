"""A job's placement groups and agents in Ray, and the daemons of its nodes. For asyncio: no call blocks the loop.

Everything is detached and named (see `placement.py`), so that a restarted control plane finds it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from service.cluster.agent_client import AgentClient, AgentError, NodeClient, RayAgent, RayNodeDaemon, within
from service.cluster.placement import (
    Capacity,
    Seat,
    Unit,
    agent_name,
    anywhere_but,
    avoidable,
    job_of,
    node_daemon_name,
    placement_group_name,
    replica_bundles,
)
from workers.config import ParallelConfig
from workers.errors import MantaError
from workers.messages import AgentDescription
from workers.node.daemon import NodeDaemon
from workers.paths import Paths
from workers.rank.agent import Agent

T = TypeVar("T")

AGENT_CONCURRENCY = 100
CLOSE_SECONDS = 10.0
# How long to wait for nodes that are trusted before those that are avoided are used after all.
AVOIDING_SECONDS = 5.0
DAEMON_SECONDS = 30.0
# How long a new agent on a node that lives may take to come up.
AGENT_SECONDS = 20.0
# How long units that were given back may take to be shown as free, and how often that is looked at.
SETTLED_SECONDS, LOOK_SECONDS = 2.0, 0.05


@dataclass(frozen=True)
class RayNode:
    """A node that Ray takes for living."""

    id: str
    raylet: tuple[str, int]
    """Host and port where its Ray listens."""


class NotPlaced(MantaError):
    """The placement groups were not ready in time; all that was acquired has been released."""


class Gangs:
    """Ray's side of placement. `ray` is the module as `RayHead.connect` returns it."""

    def __init__(self, ray: Any, home: str):
        self._ray = ray
        self._paths = Paths.of(home)
        self.lost: set[str] = set()
        """Nodes that do not answer, whatever Ray says: nothing is asked of them, nothing is placed there."""
        self.draining: set[str] = set()
        """Nodes that are to be left: nothing more is placed there."""
        self._agent_class = ray.remote(Agent)
        self._node_class = ray.remote(NodeDaemon)

    async def capacity(self, unit: Unit, with_draining: bool = False) -> Capacity:
        """Units of `unit` of each living node, in all and free. Those of nodes that are to be left are nobody's, unless
        asked for `with_draining`."""
        nodes, free = await asyncio.to_thread(self._resources)
        nodes = [node for node in nodes if with_draining or node["NodeID"] not in self.draining]
        found = {
            node["NodeID"]: (int(node["Resources"].get(unit, 0)), int(free.get(node["NodeID"], {}).get(unit, 0)))
            for node in nodes
        }
        return Capacity(unit, sum(t for t, _ in found.values()), sum(f for _, f in found.values()), found)

    async def has_gpus(self) -> bool:
        """Whether any living node has a GPU."""
        nodes = await asyncio.to_thread(self._living_nodes)
        return any(node["Resources"].get("GPU", 0) for node in nodes)

    async def until_free(self, expected: Capacity) -> None:
        """Wait until so much is free of what was given back, which Ray shows with some delay; a moment at most, since
        others may have taken it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLED_SECONDS):
                while (await self.capacity(expected.unit)).free < expected.free:
                    await asyncio.sleep(LOOK_SECONDS)

    def _living_nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] not in self.lost]

    async def ray_nodes(self) -> list[RayNode]:
        """The nodes that Ray takes for living."""
        found = [node for node in await asyncio.to_thread(self._ray.nodes) if node["Alive"]]
        return [RayNode(n["NodeID"], (n["NodeManagerAddress"], n["NodeManagerPort"])) for n in found]

    async def pulse_of(self, node: str) -> tuple[str, int] | None:
        """Where the daemon of `node` answers beats; it is started where there is none. None when it does not answer."""
        daemon = await self._ensure_daemon(node, [], {})
        if daemon is None:
            return None
        about = await daemon.describe()
        return about.address, about.heartbeat_port

    async def drain(self, node: str, seconds: float) -> bool:
        """Let the daemon of `node` say from now on that it is to be left within `seconds`; whether it could be told."""
        daemon = await self._ensure_daemon(node, [], {})
        if daemon is not None:
            await daemon.drain(seconds)
        return daemon is not None

    async def bury(self, node: str) -> None:
        """Tell Ray that all actors on `node` are dead, so that calls to them fail now and not when Ray finds out."""
        names = [name for name in await self._agent_names() if job_of(name) or name == node_daemon_name(node)]
        for agent in await self.find_agents(names):
            if agent is not None and await self.node_of(agent) == node:
                await self.kill([agent])

    async def node_of(self, agent: AgentClient) -> str | None:
        """The node that Ray has put `agent` on; None when it has not yet."""
        return await asyncio.to_thread(self._node_of, _actor(agent))

    def _node_of(self, actor: Any) -> str | None:
        about = self._ray._private.state.actors(actor._actor_id.hex()) or {}
        return (about.get("Address") or {}).get("NodeID")

    def _resources(self) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
        return self._living_nodes(), self._ray._private.state.available_resources_per_node()

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
        """Create the placement groups of all replicas, or of these, in order, and wait until they hold their resources.

        Nodes in `avoid` are not used, unless the others cannot hold the layout or are not free in a moment. Raises
        NotPlaced after `timeout` seconds; nothing is held then.
        """
        avoided = avoidable(layout, await self.capacity(unit), avoid) if avoid else set()
        bundles = replica_bundles(layout, unit)
        wanted = {
            placement_group_name(job, generation, replica): bundles[replica]
            for replica in (range(layout.data) if replicas is None else replicas)
        }
        if avoided:
            with contextlib.suppress(NotPlaced):
                await self._acquire(job, wanted, AVOIDING_SECONDS, avoided)
                return
        await self._acquire(job, wanted, timeout, set())

    async def _acquire(
        self, job: str, wanted: dict[str, list[dict[str, float]]], timeout: float, avoided: set[str]
    ) -> None:
        ready = False
        try:
            groups = [await asyncio.to_thread(self._create_group, *each, avoided) for each in wanted.items()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    ready = all(await asyncio.gather(*(asyncio.to_thread(group.wait, timeout) for group in groups)))
        finally:
            if not ready:
                await self.remove_groups(wanted)
        if not ready:
            units = sum(sum(bundle.values()) for bundles in wanted.values() for bundle in bundles)
            raise NotPlaced(f"{job} did not get {units:g} slots or GPUs within {timeout:g} s; it goes on waiting.")

    def _create_group(self, name: str, bundles: list[dict[str, float]], avoided: set[str]) -> Any:
        selector = anywhere_but({*avoided, *self.lost, *self.draining})
        return self._ray.util.placement_group(
            bundles,
            strategy="PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[selector] * len(bundles) if selector else None,
        )

    async def start_agents(
        self, job: str, generation: int, seats: Mapping[int, Seat], unit: Unit, snapshots: bool = True
    ) -> list[AgentClient]:
        """Start one agent for each rank in `seats`, in groups that `acquire` got, and return their handles in that
        order. `generation` is in their names.

        Does not wait until they are up: calls to them do. `snapshots` False: they get no folder in shared memory.
        """
        return await asyncio.to_thread(self._start_agents, job, generation, seats, unit, snapshots)

    async def replace_agents(
        self, job: str, generation: int, seats: Mapping[int, Seat], unit: Unit
    ) -> list[AgentClient] | None:
        """Start new agents for ranks whose own are gone, in their `seats`; their handles once they answer. None when a
        placement group no longer stands, or they do not answer."""
        groups = await asyncio.to_thread(self._groups)
        if any(groups.get(seat.group) != "CREATED" for seat in seats.values()):
            return None
        agents = await self.start_agents(job, generation, seats, unit)
        if await self.answer(agents):
            return agents
        await self.kill(agents)
        return None

    async def start_keepers(self, job: str, nodes: Collection[str]) -> list[AgentClient]:
        """Agents without a rank or a place on those of these nodes that live (with none given: on all): they hand out
        what the agents of `job` leave in the shared memory there, until they are killed. Nobody finds them again: they
        end with this process. A cluster of one node needs none."""
        return await asyncio.to_thread(self._start_keepers, job, nodes)

    def _start_keepers(self, job: str, nodes: Collection[str]) -> list[AgentClient]:
        living = {node["NodeID"] for node in self._living_nodes()}
        if len(living) < 2:
            return []
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        folders = str(self._paths.home), str(self._paths.runtime_folder), str(self._paths.snapshot_folder(job))
        return [
            RayAgent(
                self._ray,
                self._agent_class.options(
                    num_cpus=0,
                    max_concurrency=AGENT_CONCURRENCY,
                    scheduling_strategy=affinity(node_id=node, soft=False),
                ).remote(job, 0, *folders),
            )
            for node in sorted(living.intersection(nodes or living))
        ]

    async def kill(self, agents: Iterable[AgentClient | None]) -> None:
        """Kill these agents, and with them their trainers, without a word; those that are gone are no error."""
        for agent in agents:
            if agent is not None:
                await self._kill_actor(_actor(agent))

    async def _kill_actor(self, actor: Any) -> None:
        await asyncio.to_thread(self._ray.kill, actor, no_restart=True)

    async def answer(self, agents: Sequence[AgentClient]) -> bool:
        """Whether all of these agents answer."""
        return await self.describe(agents) is not None

    async def describe(self, agents: Sequence[AgentClient]) -> list[AgentDescription] | None:
        """What these agents say about themselves; None when one of them does not answer."""
        about = await self.describe_each(dict(enumerate(agents)))
        return list(about.values()) if len(about) == len(agents) else None

    async def describe_each(self, agents: Mapping[int, AgentClient]) -> dict[int, AgentDescription]:
        """By rank what those of these agents say about themselves that answer."""
        answers, _ = await self.ask(agents, lambda rank, agent: agent.describe(), AGENT_SECONDS)
        return answers

    async def ask(
        self, agents: Mapping[int, AgentClient], question: Callable[[int, AgentClient], Awaitable[T]], seconds: float
    ) -> tuple[dict[int, T], dict[int, str]]:
        """Put `question` to each of `agents`, by rank; by rank the answers, and why the others gave none within
        `seconds`, in a line."""
        asked = (within(seconds, question(rank, agent)) for rank, agent in agents.items())
        results = await asyncio.gather(*asked, return_exceptions=True)
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

    def _start_agents(
        self, job: str, generation: int, seats: Mapping[int, Seat], unit: Unit, snapshots: bool
    ) -> list[AgentClient]:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        groups = {name: self._ray.util.get_placement_group(name) for name in {seat.group for seat in seats.values()}}
        resources: dict[str, Any] = {"num_gpus": 1} if unit == "GPU" else {"num_gpus": 0, "resources": {unit: 1}}
        folder = str(self._paths.snapshot_folder(job)) if snapshots else None
        agents: list[AgentClient] = []
        for rank, seat in seats.items():
            options = self._agent_class.options(
                **_detached(agent_name(job, generation, rank)),
                **resources,
                scheduling_strategy=strategy(groups[seat.group], placement_group_bundle_index=seat.bundle),
            )
            actor = options.remote(
                job, rank, str(self._paths.home), str(self._paths.runtime_folder), folder, seat.group
            )
            agents.append(RayAgent(self._ray, actor))
        return agents

    async def find_agents(self, names: Sequence[str]) -> list[AgentClient | None]:
        """The agents with these names; None for one that is gone."""
        found = await asyncio.to_thread(lambda: [self._find(name) for name in names])
        return [RayAgent(self._ray, actor) if actor is not None else None for actor in found]

    def _find(self, name: str) -> Any | None:
        try:
            return self._ray.get_actor(name)
        except ValueError:
            return None

    async def release(self, job: str, keep_snapshots: bool = False) -> None:
        """End the agents of `job` and their trainers, remove its placement groups. Returns when they are gone.

        Its snapshots go too unless `keep_snapshots`.
        """
        names = [name for name in await self._agent_names() if job_of(name) == job]
        agents = [agent for agent in await self.find_agents(names) if agent is not None]
        await asyncio.gather(*(self._end_agent(agent, keep_snapshots) for agent in agents))
        await asyncio.to_thread(self._remove_groups, job)

    async def dismiss(self, agents: Iterable[AgentClient | None], groups: Iterable[str]) -> None:
        """End these agents (None: gone already) and their trainers, but keep what they have in shared memory; remove
        these groups."""
        await asyncio.gather(*(self._end_agent(agent, keep_snapshots=True) for agent in agents if agent is not None))
        await self.remove_groups(groups)

    async def end_strays(self, job: str, names: Collection[str], groups: Collection[str]) -> None:
        """End all agents and placement groups of `job` but these: some that were to join, or had left."""
        strays = [name for name in await self._agent_names() if job_of(name) == job and name not in names]
        found = [agent for agent in await self.find_agents(strays) if agent is not None]
        held = await asyncio.to_thread(self._groups)
        await self.dismiss(found, [name for name in held if job_of(name) == job and name not in groups])

    async def remove_groups(self, names: Iterable[str]) -> None:
        """Remove placement groups by name; those that are gone are no error."""
        await asyncio.to_thread(self._remove, list(names))

    async def end_job(self, job: str) -> None:
        """Release `job` for good, and let every node remove what is left of it, such as the snapshots of an agent
        that was killed. A node that does not answer is swept when it comes back."""
        await self.release(job)
        daemons = (await self.ensure_node_daemons()).values()
        await asyncio.gather(*(daemon.end_job(job) for daemon in daemons), return_exceptions=True)

    async def _agent_names(self) -> list[str]:
        return [str(name) for name in await asyncio.to_thread(self._ray.util.list_named_actors)]

    async def _end_agent(self, agent: AgentClient, keep_snapshots: bool) -> None:
        """Let the agent end its trainer, then kill it; a dead one, or one that does not answer, is just killed."""
        with contextlib.suppress(AgentError):
            ending: Awaitable[object] = agent.stop() if keep_snapshots else agent.close()
            await within(CLOSE_SECONDS, ending)
        await self.kill([agent])
        with contextlib.suppress(AgentError):  # a call to an actor that dies fails when it is dead
            await within(CLOSE_SECONDS, agent.reports(0, CLOSE_SECONDS))

    def _groups(self) -> dict[str, str]:
        """Name -> state of the placement groups that are not removed."""
        table = self._ray.util.placement_group_table()
        return {group["name"]: group["state"] for group in table.values() if group["state"] != "REMOVED"}

    def _remove_groups(self, job: str) -> None:
        self._remove([name for name in self._groups() if job_of(name) == job])

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(ValueError):  # removed meanwhile
                self._ray.util.remove_placement_group(self._ray.util.get_placement_group(name))

    async def sweep(self, live_jobs: Iterable[str]) -> list[str]:
        """Release every job that holds agents or placement groups but is not in `live_jobs`. Answers their ids."""
        names = [*await self._agent_names(), *await asyncio.to_thread(self._groups)]
        orphans = sorted({job for name in names if (job := job_of(name)) is not None} - set(live_jobs))
        for job in orphans:
            await self.release(job)
        return orphans

    async def ensure_node_daemons(
        self, zygote_options: Sequence[str] = (), zygote_environment: Mapping[str, str] | None = None
    ) -> dict[str, NodeClient]:
        """Start a NodeDaemon on every living node that has none. By node id those that answer."""
        nodes = [node["NodeID"] for node in await asyncio.to_thread(self._living_nodes)]
        started = await asyncio.gather(
            *(self._ensure_daemon(node, list(zygote_options), dict(zygote_environment or {})) for node in nodes)
        )
        return {node: daemon for node, daemon in zip(nodes, started, strict=True) if daemon is not None}

    async def _ensure_daemon(self, node: str, options: list[str], environment: dict[str, str]) -> NodeClient | None:
        """The daemon of `node`. None when the node is lost while we ask, or its daemon does not answer."""
        daemon = await asyncio.to_thread(self._find, node_daemon_name(node))
        for existing in (daemon, None):
            # One that died since its name was looked up is replaced by one more, with a new handle.
            with contextlib.suppress(AgentError, self._ray.exceptions.RayError):
                actor = existing
                if actor is None:
                    actor = await asyncio.to_thread(self._create_daemon, node, options, environment)
                found = RayNodeDaemon(self._ray, actor)
                await within(DAEMON_SECONDS, found.start())
                return found
        return None

    def _create_daemon(self, node: str, options: list[str], environment: dict[str, str]) -> Any:
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        made = self._node_class.options(
            **_detached(node_daemon_name(node)), scheduling_strategy=affinity, get_if_exists=True
        )
        return made.remote(node, str(self._paths.home), options, environment)

    async def end_node_daemons(self) -> None:
        """Shut down the daemons of all nodes but lost ones: no process and no shared memory of ours is left on them."""
        lost = {node_daemon_name(node) for node in self.lost}
        names = [name for name in await self._agent_names() if name.startswith(node_daemon_name(""))]
        names = [name for name in names if name not in lost]
        found = await asyncio.to_thread(lambda: [self._find(name) for name in names])
        await asyncio.gather(*(self._end_daemon(actor) for actor in found if actor is not None))

    async def _end_daemon(self, actor: Any) -> None:
        with contextlib.suppress(AgentError):
            await within(CLOSE_SECONDS, RayNodeDaemon(self._ray, actor).shutdown())
        await self._kill_actor(actor)


def _actor(agent: AgentClient) -> Any:
    """The Ray actor of an agent that this module made."""
    assert isinstance(agent, RayAgent)
    return agent.actor


def _detached(name: str) -> dict[str, Any]:
    """Options of an actor that outlives the control plane and is found again by `name`."""
    return {
        "name": name,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": 0,
        "max_concurrency": AGENT_CONCURRENCY,
    }
