"""The nodes of the cluster: which live, which are lost or being drained, and what is free on them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from manta.service.cluster.connection import RayConnection
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.node_shapes import NodeShape, grown
from manta.service.cluster.placement import TYPE_RESOURCE, UNITS, Capacity, Unit
from manta.service.cluster.ray_private import free_resources, node_types
from manta.workers.protocol.messages import GpuReading

# How long it may take until units that were given back are shown as free, and how often to check.
SETTLED_SECONDS, POLL_SECONDS = 2.0, 0.05


@dataclass(frozen=True)
class RayNode:
    """A node as Ray knows it."""

    id: str
    raylet: tuple[str, int]
    """Host and port on which its Ray listens."""
    host: str = ""
    """Name of its machine."""
    alive: bool = True
    """Whether Ray considers it alive."""
    holds_ranks: bool = True
    """Whether it offers what a rank takes; others, such as a head without any, do not concern us."""
    gpu_type: str | None = None
    """Ray's name for the type of its GPUs; None if it has none, or Ray does not know them."""


@dataclass(frozen=True)
class GpuReadings:
    """What a node has reported about the GPUs of its machine."""

    heard_at: float
    """In seconds of the monotonic clock."""
    readings: tuple[GpuReading, ...]

    @property
    def min_gpu_memory(self) -> int | None:
        """Bytes of the GPU with the least memory; None if the driver did not say for any."""
        return min(
            (reading.memory_total_bytes for reading in self.readings if reading.memory_total_bytes), default=None
        )


class Nodes:
    """All nodes. Ray's view of them lags by a fraction of a second, and by much more for a node that is gone."""

    def __init__(self, ray: RayConnection, shapes: Sequence[NodeShape] = ()):
        """`shapes`: of the nodes that an autoscaler can add; none: there is no autoscaler to ask."""
        self._ray, self.shapes = ray, tuple(shapes)
        self.at_rest: set[str] = set()
        """Nodes that the autoscaler may take away: they have no daemon until something is placed there."""
        self.lost: set[str] = set()
        """Nodes that do not answer, whatever Ray says: nothing is asked of them or placed there."""
        self.draining: set[str] = set()
        """Nodes that are being drained: nothing more is placed there."""
        self.leave_by: dict[str, float] = {}
        """For nodes that are being drained, the moment until which they can be relied on, in seconds of the monotonic
        clock; absent if not known."""
        self.drain_reasons: dict[str, str] = {}
        """The reason, as given by whoever drains the node."""
        self.unresponsive: set[str] = set()
        """Nodes whose daemon does not answer: nothing more is placed there until it does."""
        self.unswept: set[str] = set()
        """Nodes where finished jobs may have left something, since the daemon could not be notified."""
        self.problems: dict[str, str] = {}
        """By node, if an operator has to act: a sentence that says why nothing is placed there and what to do."""
        self.gpus: dict[str, GpuReadings] = {}
        """By node, its last report about the GPUs of its machine."""

    def drain(self, node: str, seconds: float | None, reason: str = "") -> bool:
        """`node` is being drained within `seconds`, None if that is not known; the latest statement counts. Returns
        whether that is new; the same reason with another remaining time is not."""
        is_news = self.drain_reasons.get(node) != reason
        self.draining.add(node)
        self.drain_reasons[node] = reason
        if seconds is None:
            self.leave_by.pop(node, None)
        else:
            self.leave_by[node] = time.monotonic() + seconds
        return is_news

    def cancel_drain(self, node: str) -> None:
        """`node` stays after all, or is gone."""
        self.draining.discard(node)
        self.leave_by.pop(node, None)
        self.drain_reasons.pop(node, None)

    def keep_only(self, there: Collection[str]) -> None:
        """Forget all other nodes, which are gone: ids of nodes are never reused."""
        for some in (self.at_rest, self.lost, self.draining, self.unresponsive, self.unswept):
            some.intersection_update(there)
        for about in (self.leave_by, self.drain_reasons, self.problems, self.gpus):
            keep_keys(about, there)

    @property
    def closed(self) -> set[str]:
        """Nodes where nothing more is placed."""
        return self.lost | self.draining | self.unresponsive | self.problems.keys()

    async def known(self) -> list[RayNode]:
        """All nodes that Ray knows, including dead ones and those without room for ranks."""
        return [
            RayNode(
                node["NodeID"],
                (node["NodeManagerAddress"], node["NodeManagerPort"]),
                node["NodeManagerHostname"],
                node["Alive"],
                _holds_ranks(node),
                _gpu_type(node),
            )
            for node in await self._ray.read(self._all)
        ]

    async def living(self) -> list[str]:
        """Ids of the nodes that live and may hold ranks."""
        return [node["NodeID"] for node in await self._living()]

    async def problem_of_all(self) -> str | None:
        """Why no rank could be placed on any node, even if all were free; None if one could, or if a node can be
        added. Nodes that are being drained count: whoever drains them knows."""
        living = set(await self.living())
        if living - self.unresponsive - self.problems.keys() or self.shapes:
            return None
        if living:
            return f"no rank can be placed: of {len(living)} nodes none has a daemon that can be reached"
        return "no rank can be placed: Ray has no living node with slots for ranks"

    async def capacity(self, unit: Unit, all_living: bool = False) -> Capacity:
        """Units of `unit` of each living node, total and free. Nodes where nothing more is placed are left out unless
        `all_living`; on nodes whose daemon does not answer nothing is free."""
        nodes, free = await self._living(), await self._ray.read(self._free)
        free = {node: units for node, units in free.items() if node not in self.unresponsive | self.problems.keys()}
        units = {
            node["NodeID"]: (int(node["Resources"].get(unit, 0)), int(free.get(node["NodeID"], {}).get(unit, 0)))
            for node in nodes
            if all_living or node["NodeID"] not in self.closed
        }
        types = {node["NodeID"]: type for node in nodes if (type := _gpu_type(node)) is not None}
        return Capacity(unit, sum(t for t, _ in units.values()), sum(f for _, f in units.values()), units, types)

    async def at_most(self, unit: Unit) -> Capacity:
        """`capacity` once the autoscaler has added everything that it may."""
        if not self.shapes:
            return await self.capacity(unit)
        return grown(await self.capacity(unit), self.shapes, (await self._types()).values())

    async def unused(self) -> set[str]:
        """Living nodes of which no unit is held."""
        nodes, free = await self._living(), await self._ray.read(self._free)
        return {
            node["NodeID"]
            for node in nodes
            if all(free.get(node["NodeID"], {}).get(unit, 0) >= node["Resources"].get(unit, 0) for unit in UNITS)
        }

    async def autoscaled_nodes(self) -> set[str]:
        """Living nodes of the types that an autoscaler adds, and takes away when they are idle."""
        ours = {shape.type for shape in self.shapes}
        return {node for node, type in (await self._types()).items() if type in ours}

    async def has_gpus(self) -> bool:
        """Whether any living node has a complete GPU, or one with a GPU can be added."""
        can_be_added = any(shape.unit == "GPU" for shape in self.shapes)
        return can_be_added or any(node["Resources"].get("GPU", 0) >= 1 for node in await self._living())

    async def until_free(self, expected: Capacity) -> None:
        """Wait until `expected`, which was given back, is free, which Ray shows with some delay; only briefly, since
        others may have taken it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLED_SECONDS):
                while (await self.capacity(expected.unit)).free < expected.free:
                    await asyncio.sleep(POLL_SECONDS)

    async def _living(self) -> list[dict[str, Any]]:
        nodes = await self._ray.read(self._all)
        return [node for node in nodes if node["Alive"] and node["NodeID"] not in self.lost and _holds_ranks(node)]

    async def _types(self) -> dict[str, str]:
        return await self._ray.read(self._all_types) if self.shapes else {}

    def _all_types(self) -> dict[str, str]:
        return node_types(self._ray.module)

    def _all(self) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = self._ray.module.nodes()
        if not nodes:  # there is always the head
            raise ClusterUnavailable(LookupError("Ray did not list its nodes"))
        return nodes

    def _free(self) -> dict[str, dict[str, float]]:
        return free_resources(self._ray.module)


def keep_keys(about: dict[str, Any], these: Collection[str]) -> None:
    """Forget what is known about all others."""
    for key in about.keys() - set(these):
        del about[key]


def _holds_ranks(node: dict[str, Any]) -> bool:
    return any(node["Resources"].get(unit, 0) >= 1 for unit in UNITS)


def _gpu_type(node: dict[str, Any]) -> str | None:
    """Ray offers a resource named after the type if it has recognised the GPUs."""
    types = (name.removeprefix(TYPE_RESOURCE) for name in sorted(node["Resources"]) if name.startswith(TYPE_RESOURCE))
    return next(types, None)
