"""Asks the autoscaler of a Ray cluster for nodes: a placement group that waits is what it adds nodes for.

One group for all jobs that ask, which Ray grants as a whole or not at all, so that what is free is not held in parts.
It belongs to this process: Ray removes it when the process is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from service.cluster.connection import RayConnection
from service.cluster.placement import anywhere_but
from service.cluster.ray_private import placement_group_states
from service.leases.held import new_id

log = logging.getLogger(__name__)

# After Ray has granted all that was asked for, before the same is asked for again: else what is free but cannot be used
# would be taken and given back all the time.
AGAIN_SECONDS = 10.0

Bundles = Sequence[Mapping[str, float]]


class NodeRequests:
    """What this process asks for."""

    def __init__(self, ray: RayConnection):
        self._ray = ray
        self._asked: tuple[list[dict[str, float]], dict[str, str]] | None = None
        self._name = ""
        self._group: Any = None
        self._granted_at = float("-inf")

    async def ask(self, bundles: Bundles, without: Collection[str]) -> None:
        """Ask for nodes on which all `bundles` lie at the same time, others than those in `without`, and for nothing
        else; with no bundles for nothing at all. Raises ClusterUnavailable."""
        wanted = ([dict(bundle) for bundle in bundles], anywhere_but(without))
        if not bundles or (self._asked is not None and wanted != self._asked):
            await self.withdraw()
        if not bundles or self._asked is not None or time.monotonic() < self._granted_at + AGAIN_SECONDS:
            return
        log.info("the autoscaler is asked for %d bundles: %s", len(wanted[0]), wanted[0][0])
        self._name, self._asked = f"nodes/{new_id()}", wanted
        self._group = await self._ray.run(self._create, self._name, *wanted)

    async def settle(self) -> bool:
        """Give back what Ray has granted by now; whether it had. Raises ClusterUnavailable."""
        if self._asked is None:
            return False
        states = await self._ray.run(placement_group_states, self._ray.module, [self._name])
        if states.get(self._name) == "PENDING":
            return False
        granted = states.get(self._name) == "CREATED"
        await self.withdraw()
        if granted:
            self._granted_at = time.monotonic()
        return granted

    async def withdraw(self) -> None:
        """Ask for nothing any more. Raises ClusterUnavailable."""
        if self._group is not None:
            await self._ray.run(self._ray.module.util.remove_placement_group, self._group)
        self._asked, self._group = None, None

    def _create(self, name: str, bundles: list[dict[str, float]], selector: dict[str, str]) -> Any:
        selectors = [selector] * len(bundles) if selector else None
        return self._ray.module.util.placement_group(
            bundles, strategy="PACK", name=name, bundle_label_selector=selectors
        )
