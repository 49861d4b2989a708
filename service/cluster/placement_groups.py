"""Placement groups in Ray: one for each data-parallel replica of a job (`placement.py` says what is in them).

They are detached and named, so that a restarted control plane finds them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Collection, Iterable, Sequence

from service.cluster.agent_client import OrderEpoch
from service.cluster.connection import RayConnection
from service.cluster.nodes import Nodes
from service.cluster.placement import (
    Unit,
    anywhere_but,
    avoidable,
    counted,
    job_of,
    placement_group_name,
    replica_bundles,
)
from service.cluster.ray_private import placement_group_states
from workers.config import ParallelConfig
from workers.errors import MantaError

# How long to wait for trusted nodes before nodes to be avoided are used after all.
AVOIDING_SECONDS = 5.0
# Between two checks whether places are held, which Ray grants in a moment or after a long time.
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.01, 0.5


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
        NotPlaced after `timeout` seconds; nothing is held then.
        """
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
        pause = FIRST_LOOK_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not all(state == "CREATED" for state in await self._states_of(names)):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_LOOK_SECONDS)
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
