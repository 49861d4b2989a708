"""Placement groups in Ray: one for each data-parallel replica of a job (`placement.py` says what is in them), and one
for all jobs that ask an autoscaler for nodes, which it adds for a pending group.

Those of jobs are detached and named, so that a restarted control plane finds them again. That of requests Ray grants as
a whole or not at all, so that free resources are not partly held; it belongs to this process: Ray removes it when the
process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manta.service.cluster.agent_client import OrderEpoch
from manta.service.cluster.connection import RayConnection
from manta.service.cluster.nodes import Nodes
from manta.service.cluster.placement import (
    Unit,
    anywhere_but,
    avoidable,
    counted,
    job_of,
    placement_group_name,
    replica_bundles,
)
from manta.service.cluster.ray_private import placement_group_states
from manta.service.leases.held import new_id
from manta.workers.config import ParallelConfig
from manta.workers.errors import MantaError

log = logging.getLogger(__name__)

# How long to wait for trusted nodes before nodes to be avoided are used after all.
AVOIDING_SECONDS = 5.0
# Between two checks whether places are held, which Ray grants in a moment or after a long time.
INITIAL_POLL_SECONDS, MAX_POLL_SECONDS = 0.01, 0.5
# Delay after Ray has granted everything, before the same is requested again: otherwise free resources that cannot be
# used would be taken and given back all the time.
RETRY_SECONDS = 10.0
Bundles = Sequence[Mapping[str, float]]


class NotPlaced(MantaError):
    """The placement groups were not ready in time; everything that was acquired has been released."""


class PlacementGroups:
    """All placement groups of all jobs."""

    def __init__(self, ray: RayConnection, nodes: Nodes):
        self._ray, self._nodes = ray, nodes
        self.epoch: OrderEpoch | None = None
        """Says whether a job's places may be taken or given back; None: there are no leases."""

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
        Nodes in `avoid` are not used unless the others cannot hold the layout or do not become free in a moment. Raises
        NotPlaced after `timeout` seconds; nothing is held then."""
        if self.epoch is not None:
            self.epoch(job, None)
        avoided = avoidable(layout, await self._nodes.capacity(unit), avoid) if avoid else set()
        bundles = replica_bundles(layout, unit)
        wanted = {
            placement_group_name(job, generation, replica): bundles[replica]
            for replica in (range(layout.data) if replicas is None else replicas)
        }
        if avoided:
            with contextlib.suppress(NotPlaced):
                await self._acquire(job, unit, wanted, AVOIDING_SECONDS, avoided)
                return
        await self._acquire(job, unit, wanted, timeout, set())

    async def states(self, names: Collection[str] | None = None) -> dict[str, str]:
        """By name, the state of those groups (of these names, or all) that are not removed; CREATED: its resources are
        held."""
        return await self._ray.run(placement_group_states, self._ray.module, names)

    async def remove(self, names: Iterable[str]) -> None:
        """Remove groups by name; groups that are gone are not an error."""
        names = list(names)
        if self.epoch is not None:
            for job in {job for name in names if (job := job_of(name)) is not None}:
                self.epoch(job, None)
        if names:
            await self._ray.run(self._remove, names)

    async def _acquire(
        self, job: str, unit: Unit, wanted: dict[str, list[dict[str, float]]], timeout: float, avoided: set[str]
    ) -> None:
        ready, given_up = False, threading.Event()
        # From an earlier attempt that Ray left unanswered; its names would be refused.
        await self.remove(await self.states(wanted.keys()))
        try:
            for name, bundles in wanted.items():
                await self._ray.run(self._create, name, bundles, avoided, given_up)
            ready = await self._are_created(wanted, timeout)
        finally:
            if not ready:
                given_up.set()
                await self.remove(wanted)
        if not ready:
            units = sum(bundle[unit] for bundles in wanted.values() for bundle in bundles)
            raise NotPlaced(f"{job} did not get {counted(units, unit)} within {timeout:g} s; it keeps waiting.")

    async def _are_created(self, names: Collection[str], timeout: float) -> bool:
        """Whether these groups hold their resources within `timeout` seconds. No thread waits for that."""
        pause = INITIAL_POLL_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not all(state == "CREATED" for state in await self._states_of(names)):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_POLL_SECONDS)
                return True
        return False

    async def _states_of(self, names: Collection[str]) -> list[str | None]:
        states = await self.states(names)
        return [states.get(name) for name in names]

    def _create(self, name: str, bundles: list[dict[str, float]], avoided: set[str], given_up: threading.Event) -> None:
        """`given_up`: set when nothing waits for the group any more, which may be before Ray has created it."""
        selector = anywhere_but({*avoided, *self._nodes.closed})
        self._ray.module.util.placement_group(
            bundles,
            strategy="PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[selector] * len(bundles) if selector else None,
        )
        if given_up.is_set():
            self._remove([name])

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(ValueError):  # removed in the meantime
                self._ray.module.util.remove_placement_group(self._ray.module.util.get_placement_group(name))


@dataclass(eq=False)
class _Request:
    """One group, from its request on."""

    bundles: list[dict[str, float]]
    selector: dict[str, str]
    name: str = field(default_factory=lambda: f"nodes/{new_id()}")
    group: Any = None
    """None: Ray has not answered, and may still create it."""
    withdrawn: threading.Event = field(default_factory=threading.Event)


class NodeRequests:
    """What this process requests of the autoscaler."""

    def __init__(self, ray: RayConnection):
        self._ray = ray
        self._requested: _Request | None = None
        self._granted_at = float("-inf")

    async def request(self, bundles: Bundles, without: Collection[str]) -> None:
        """Request nodes that can hold all `bundles` at the same time, other than those in `without`, and nothing else;
        without bundles request nothing. Raises ClusterUnavailable."""
        wanted, asked = _Request([dict(bundle) for bundle in bundles], anywhere_but(without)), self._requested
        same = asked is not None and (asked.bundles, asked.selector) == (wanted.bundles, wanted.selector)
        if not bundles or not same:
            await self.withdraw()
        if not bundles or same or time.monotonic() < self._granted_at + RETRY_SECONDS:
            return
        log.info("requesting %d bundles from the autoscaler: %s", len(bundles), wanted.bundles[0])
        self._requested = wanted
        await self._ray.run(self._create, wanted)

    async def settle(self) -> bool:
        """Give back what Ray has granted by now; returns whether it had granted it. Raises ClusterUnavailable."""
        if self._requested is None:
            return False
        states = await self._ray.run(placement_group_states, self._ray.module, [self._requested.name])
        if states.get(self._requested.name) == "PENDING":
            return False
        granted = states.get(self._requested.name) == "CREATED"
        await self.withdraw()
        if granted:
            self._granted_at = time.monotonic()
        return granted

    async def withdraw(self) -> None:
        """Request nothing any more. Raises ClusterUnavailable."""
        if self._requested is not None:
            self._requested.withdrawn.set()
            if self._requested.group is not None:
                await self._ray.run(self._ray.module.util.remove_placement_group, self._requested.group)
        self._requested = None

    def _create(self, request: _Request) -> None:
        selectors = [request.selector] * len(request.bundles) if request.selector else None
        util = self._ray.module.util
        request.group = util.placement_group(
            request.bundles, strategy="PACK", name=request.name, bundle_label_selector=selectors
        )
        if request.withdrawn.is_set():  # Ray has taken so long that nothing waits for it any more
            util.remove_placement_group(request.group)
