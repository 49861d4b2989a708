"""A job's placement groups and agents in Ray, and the daemons of its nodes. For asyncio: no call blocks the loop.

Everything is detached and named (see `placement.py`), so that a restarted control plane finds it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from service.placement import (
    Capacity,
    Unit,
    agent_name,
    anywhere_but,
    avoidable,
    bundle_of,
    generation_of,
    job_of,
    node_daemon_name,
    placement_group_name,
    replica_bundles,
)
from workers.agent import Agent
from workers.config import ParallelConfig
from workers.errors import MantaError
from workers.node import NodeDaemon
from workers.paths import Paths

AGENT_CONCURRENCY = 100
CLOSE_SECONDS = 10.0
# How long to wait for nodes that are trusted before those that are avoided are used after all.
AVOIDING_SECONDS = 5.0
DAEMON_SECONDS = 30.0
# How long a new agent on a node that lives may take to come up.
AGENT_SECONDS = 20.0

Handle = Any
"""A Ray actor handle."""


class NotPlaced(MantaError):
    """The placement groups were not ready in time; all that was acquired has been released."""


class Gangs:
    """Ray's side of placement. `ray` is the module as `RayHead.connect` returns it."""

    def __init__(self, ray: Any, home: str):
        self._ray = ray
        self._paths = Paths.of(home)
        self._agent_class = ray.remote(Agent)
        self._node_class = ray.remote(NodeDaemon)

    async def capacity(self, unit: Unit) -> Capacity:
        """Units of `unit` of each living node, in all and free."""
        nodes, free = await asyncio.to_thread(self._resources)
        found = {
            node["NodeID"]: (int(node["Resources"].get(unit, 0)), int(free.get(node["NodeID"], {}).get(unit, 0)))
            for node in nodes
        }
        return Capacity(unit, sum(t for t, _ in found.values()), sum(f for _, f in found.values()), found)

    async def has_gpus(self) -> bool:
        """Whether any living node has a GPU."""
        nodes = await asyncio.to_thread(self._living_nodes)
        return any(node["Resources"].get("GPU", 0) for node in nodes)

    def _living_nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

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
    ) -> None:
        """Create the placement groups of all replicas, in order, and wait until they hold their resources.

        Nodes in `avoid` are not used, unless the others cannot hold the layout or are not free in a moment. Raises
        NotPlaced after `timeout` seconds; nothing is held then.
        """
        avoided = avoidable(layout, await self.capacity(unit), avoid) if avoid else set()
        if avoided:
            with contextlib.suppress(NotPlaced):
                await self._acquire(job, generation, layout, unit, AVOIDING_SECONDS, avoided)
                return
        await self._acquire(job, generation, layout, unit, timeout, set())

    async def _acquire(
        self, job: str, generation: int, layout: ParallelConfig, unit: Unit, timeout: float, avoided: set[str]
    ) -> None:
        bundles = replica_bundles(layout, unit)
        groups = [
            await asyncio.to_thread(self._create_group, placement_group_name(job, generation, replica), wanted, avoided)
            for replica, wanted in enumerate(bundles)
        ]
        try:
            async with asyncio.timeout(timeout):
                ready = await asyncio.gather(*(asyncio.to_thread(group.wait, timeout) for group in groups))
        except TimeoutError:
            ready = [False]
        if not all(ready):
            await self.release(job)
            raise NotPlaced(
                f"{job} did not get its {layout.world_size} x {unit} within {timeout:g} s; it goes on waiting."
            )

    def _create_group(self, name: str, bundles: list[dict[str, float]], avoided: set[str]) -> Any:
        selector = anywhere_but(avoided)
        return self._ray.util.placement_group(
            bundles,
            strategy="PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[selector] * len(bundles) if selector else None,
        )

    async def start_agents(
        self, job: str, generation: int, layout: ParallelConfig, unit: Unit, snapshots: bool = True
    ) -> list[Handle]:
        """Start one agent per rank in the groups that `acquire` got, and return their handles in order of rank.

        Does not wait until they are up: calls to them do. `snapshots` False: they get no folder in shared memory.
        """
        ranks = range(layout.world_size)
        return await asyncio.to_thread(
            self._start_agents, job, generation, generation, ranks, layout, unit, snapshots=snapshots
        )

    async def replace_agents(
        self, job: str, generation: int, ranks: Sequence[int], layout: ParallelConfig, unit: Unit
    ) -> list[Handle] | None:
        """Start new agents for `ranks`, whose own are gone, where those were placed; their handles once they answer.
        None when a placement group no longer stands, or they do not answer. `generation` names the new ones."""
        states = await asyncio.to_thread(self._groups)
        groups = {name: state for name, state in states.items() if job_of(name) == job}
        placed = max((generation_of(name) for name in groups), default=0)
        names = {placement_group_name(job, placed, bundle_of(layout, rank)[0]) for rank in ranks}
        if any(groups.get(name) != "CREATED" for name in names):
            return None
        agents = await asyncio.to_thread(self._start_agents, job, placed, generation, ranks, layout, unit)
        try:
            async with asyncio.timeout(AGENT_SECONDS):
                await asyncio.gather(*(_awaited(agent.describe.remote()) for agent in agents))
        except (self._ray.exceptions.RayError, TimeoutError):
            return None
        return agents

    def _start_agents(
        self,
        job: str,
        placed: int,
        generation: int,
        ranks: Sequence[int],
        layout: ParallelConfig,
        unit: Unit,
        snapshots: bool = True,
    ) -> list[Handle]:
        """`placed`: the generation that the placement groups are named after, `generation`: that of the agents."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        groups = {
            replica: self._ray.util.get_placement_group(placement_group_name(job, placed, replica))
            for replica in {bundle_of(layout, rank)[0] for rank in ranks}
        }
        resources: dict[str, Any] = {"num_gpus": 1} if unit == "GPU" else {"num_gpus": 0, "resources": {unit: 1}}
        folder = str(self._paths.snapshot_folder(job)) if snapshots else None
        agents = []
        for rank in ranks:
            replica, bundle = bundle_of(layout, rank)
            options = self._agent_class.options(
                **_detached(agent_name(job, generation, rank)),
                **resources,
                scheduling_strategy=strategy(groups[replica], placement_group_bundle_index=bundle),
            )
            agents.append(options.remote(job, rank, str(self._paths.home), str(self._paths.runtime_folder), folder))
        return agents

    async def find_agents(self, names: Sequence[str]) -> list[Handle | None]:
        """Handles of the agents with these names; None for one that is gone."""
        return await asyncio.to_thread(lambda: [self._find(name) for name in names])

    def _find(self, name: str) -> Handle | None:
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

    async def end_job(self, job: str) -> None:
        """Release `job` for good, and let every node remove what is left of it, such as the snapshots of an agent
        that was killed. A node that does not answer is swept when it comes back."""
        await self.release(job)
        daemons = (await self.ensure_node_daemons()).values()
        await asyncio.gather(*(_awaited(daemon.end_job.remote(job)) for daemon in daemons), return_exceptions=True)

    async def _agent_names(self) -> list[str]:
        return [str(name) for name in await asyncio.to_thread(self._ray.util.list_named_actors)]

    async def _end_agent(self, agent: Handle, keep_snapshots: bool) -> None:
        """Let the agent end its trainer, then kill it; a dead one, or one that does not answer, is just killed."""
        errors = (self._ray.exceptions.RayError, TimeoutError)
        with contextlib.suppress(*errors):
            call = agent.stop.remote() if keep_snapshots else agent.close.remote()
            await asyncio.wait_for(_awaited(call), CLOSE_SECONDS)
        await asyncio.to_thread(self._ray.kill, agent, no_restart=True)
        with contextlib.suppress(*errors):  # a call to an actor that dies fails when it is dead
            await asyncio.wait_for(_awaited(agent.reports.remote(0, CLOSE_SECONDS)), CLOSE_SECONDS)

    def _groups(self) -> dict[str, str]:
        """Name -> state of the placement groups that are not removed."""
        table = self._ray.util.placement_group_table()
        return {group["name"]: group["state"] for group in table.values() if group["state"] != "REMOVED"}

    def _remove_groups(self, job: str) -> None:
        for name in self._groups():
            if job_of(name) == job:
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
    ) -> dict[str, Handle]:
        """Start a NodeDaemon on every living node that has none. Answers node id -> handle of those that answer."""
        nodes = [node["NodeID"] for node in await asyncio.to_thread(self._living_nodes)]
        started = await asyncio.gather(
            *(self._ensure_daemon(node, list(zygote_options), dict(zygote_environment or {})) for node in nodes)
        )
        return {node: daemon for node, daemon in zip(nodes, started, strict=True) if daemon is not None}

    async def _ensure_daemon(self, node: str, options: list[str], environment: dict[str, str]) -> Handle | None:
        """The daemon of `node`. None when the node is lost while we ask, or its daemon does not answer."""
        daemon = await asyncio.to_thread(self._find, node_daemon_name(node))
        for existing in (daemon, None):
            try:
                found: Handle = existing
                if found is None:
                    found = await asyncio.to_thread(self._create_daemon, node, options, environment)
                await asyncio.wait_for(_awaited(found.start.remote()), DAEMON_SECONDS)
            except (self._ray.exceptions.RayError, TimeoutError):
                continue  # it died since its name was looked up: one more, with a new one
            return found
        return None

    def _create_daemon(self, node: str, options: list[str], environment: dict[str, str]) -> Handle:
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        made = self._node_class.options(
            **_detached(node_daemon_name(node)), scheduling_strategy=affinity, get_if_exists=True
        )
        return made.remote(node, str(self._paths.home), options, environment)

    async def end_node_daemons(self) -> None:
        """Shut down the daemons of all nodes: no process and no shared memory of ours is left on them."""
        names = [name for name in await self._agent_names() if name.startswith(node_daemon_name(""))]
        errors = (self._ray.exceptions.RayError, TimeoutError)
        for daemon in await self.find_agents(names):
            if daemon is not None:
                with contextlib.suppress(*errors):
                    await asyncio.wait_for(_awaited(daemon.shutdown.remote()), DAEMON_SECONDS)
                await asyncio.to_thread(self._ray.kill, daemon, no_restart=True)


def _detached(name: str) -> dict[str, Any]:
    """Options of an actor that outlives the control plane and is found again by `name`."""
    return {
        "name": name,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": 0,
        "max_concurrency": AGENT_CONCURRENCY,
    }


async def _awaited(reference: Any) -> Any:
    """A coroutine for an ObjectRef, for functions that take no other awaitable."""
    return await reference
