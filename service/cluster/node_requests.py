"""Asks the autoscaler of a Ray cluster for nodes: it adds nodes for a pending placement group.

There is one group for all jobs that ask, which Ray grants as a whole or not at all, so that free resources are not
partly held. It belongs to this process: Ray removes it when the process is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.cluster.connection import RayConnection
from service.cluster.placement import anywhere_but
from service.cluster.ray_private import placement_group_states
from service.leases.held import new_id

log = logging.getLogger(__name__)

# Delay after Ray has granted everything, before the same is requested again: otherwise free resources that cannot be
# used would be taken and given back all the time.
AGAIN_SECONDS = 10.0

Bundles = Sequence[Mapping[str, float]]


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
    """What this process requests."""

    def __init__(self, ray: RayConnection):
        self._ray = ray
        self._asked: _Request | None = None
        self._granted_at = float("-inf")

    async def ask(self, bundles: Bundles, without: Collection[str]) -> None:
        """Request nodes that can hold all `bundles` at the same time, other than those in `without`, and nothing else;
        without bundles request nothing. Raises ClusterUnavailable."""
        wanted, asked = _Request([dict(bundle) for bundle in bundles], anywhere_but(without)), self._asked
        same = asked is not None and (asked.bundles, asked.selector) == (wanted.bundles, wanted.selector)
        if not bundles or not same:
            await self.withdraw()
        if not bundles or same or time.monotonic() < self._granted_at + AGAIN_SECONDS:
            return
        log.info("the autoscaler is asked for %d bundles: %s", len(bundles), wanted.bundles[0])
        self._asked = wanted
        await self._ray.run(self._create, wanted)

    async def settle(self) -> bool:
        """Give back what Ray has granted by now; returns whether it had granted it. Raises ClusterUnavailable."""
        if self._asked is None:
            return False
        states = await self._ray.run(placement_group_states, self._ray.module, [self._asked.name])
        if states.get(self._asked.name) == "PENDING":
            return False
        granted = states.get(self._asked.name) == "CREATED"
        await self.withdraw()
        if granted:
            self._granted_at = time.monotonic()
        return granted

    async def withdraw(self) -> None:
        """Request nothing any more. Raises ClusterUnavailable."""
        if self._asked is not None:
            self._asked.withdrawn.set()
            if self._asked.group is not None:
                await self._ray.run(self._ray.module.util.remove_placement_group, self._asked.group)
        self._asked = None

    def _create(self, request: _Request) -> None:
        selectors = [request.selector] * len(request.bundles) if request.selector else None
        util = self._ray.module.util
        request.group = util.placement_group(
            request.bundles, strategy="PACK", name=request.name, bundle_label_selector=selectors
        )
        if request.withdrawn.is_set():  # Ray has taken so long that nothing waits for it any more
            util.remove_placement_group(request.group)
