"""The cluster as one control plane sees it: for users, nodes, slots, and which ranks run where; for monitoring, what is
not in the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from manta.service.cluster.cluster import Cluster
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.nodes import GpuReadings, Nodes
from manta.service.cluster.placement import UNITS, Unit
from manta.service.store import Store, ranks
from manta.workers.protocol.messages import GpuReading

RAY_SECONDS = 3.0
FRESH_SECONDS = 60.0
"""Readings of a node that are older than this are not shown."""

NodeState = Literal["ready", "draining", "silent", "problem", "lost"]
NODE_STATES: tuple[NodeState, ...] = get_args(NodeState)
_NOTHING = (0, 0)


@dataclass(frozen=True)
class NodeMeasurements:
    """A node that Ray considers alive."""

    id: str
    host: str
    state: NodeState
    """ready: ranks are placed there; draining: jobs move away from it; silent: its daemon does not answer; problem: an
    operator has to do something first; lost: neither its daemon nor its Ray can be reached."""
    gpus: tuple[GpuReading, ...] = ()
    """Also empty if nothing is known of them."""


@dataclass(frozen=True)
class Measurements:
    """Measurements of one moment."""

    loop_delay_seconds: float
    """How long the control plane's thread took to begin answering."""
    owned_jobs: int
    """Number of jobs that this control plane owns."""
    lag_seconds: Mapping[str, float]
    """By loop, how long its oldest outstanding work has been due."""
    ray_answers: bool = True
    """Whether Ray listed its nodes; otherwise the two fields below are empty."""
    nodes: tuple[NodeMeasurements, ...] = ()
    units: Mapping[Unit, tuple[int, int]] = field(default_factory=dict)
    """By resource that a rank takes (`GPU`, `manta_slot`), how many there are on living nodes, and how many of them are
    free."""


async def measured(cluster: Cluster | None, requested_at: float, owned: int, lags: Mapping[str, float]) -> Measurements:
    """To be called on the control plane's loop. `requested_at`: by the monotonic clock; `cluster`: None until there is
    one."""
    delay = time.monotonic() - requested_at
    try:
        if cluster is None:
            raise ClusterUnavailable(LookupError("the cluster is not connected yet"))
        async with asyncio.timeout(RAY_SECONDS):
            known = [node for node in await cluster.nodes.known() if node.alive and node.holds_ranks]
            capacities = [await cluster.nodes.capacity(unit, all_living=True) for unit in UNITS]
    except (ClusterUnavailable, TimeoutError):
        return Measurements(delay, owned, lags, ray_answers=False)
    nodes = tuple(
        NodeMeasurements(node.id, node.host, _state(cluster.nodes, node.id), gpus_of(cluster.nodes, node.id))
        for node in known
    )
    units = {capacity.unit: (capacity.total, capacity.free) for capacity in capacities}
    return Measurements(delay, owned, lags, nodes=nodes, units=units)


def gpus_of(nodes: Nodes, node: str) -> tuple[GpuReading, ...]:
    """Recent readings of a node's GPUs."""
    heard = nodes.gpus.get(node)
    return heard.readings if heard is not None and time.monotonic() - heard.heard_at < FRESH_SECONDS else ()


def _state(nodes: Nodes, node: str) -> NodeState:
    if node in nodes.lost:
        return "lost"
    if node in nodes.draining:
        return "draining"
    if node in nodes.unresponsive:
        return "silent"
    return "problem" if node in nodes.problems else "ready"


async def cluster_view(cluster: Cluster, store: Store) -> dict[str, Any]:
    """The cluster in the form of `manta.api.schemas.Cluster`. Raises ClusterUnavailable."""
    gpus = await cluster.nodes.capacity("GPU", all_living=True)
    slots = await cluster.nodes.capacity("manta_slot", all_living=True)
    known = {node.id: node for node in await cluster.nodes.known()}
    placed = await asyncio.to_thread(_placed_ranks, store)
    nodes = [
        {
            "id": node,
            "address": known[node].raylet[0],
            "alive": True,
            "draining": node in cluster.nodes.draining,
            "problem": cluster.nodes.problems.get(node),
            **_places(gpus.nodes.get(node, _NOTHING), slots.nodes.get(node, _NOTHING)),
            "gpu_type": known[node].gpu_type,
            "gpu_memory_bytes": _gpu_memory(cluster.nodes.gpus.get(node)),
            "gpus": [_gpu(reading) for reading in gpus_of(cluster.nodes, node)],
            "ranks": placed.get(known[node].host, []),
        }
        for node in {**gpus.nodes, **slots.nodes}
        if node in known  # otherwise it was lost in the meantime
    ]
    of_all = _places((gpus.total, gpus.free), (slots.total, slots.free))
    return {"nodes": nodes, "totals": {name: value for name, value in of_all.items() if name != "accelerator"}}


def _places(gpus: tuple[int, int], slots: tuple[int, int]) -> dict[str, Any]:
    """What ranks can use of these GPUs and slots, (total, free) each: the GPUs if there are any, and in addition the
    slots for jobs that ask for the CPU."""
    total, free = gpus if gpus[0] else slots
    return {
        "accelerator": "gpu" if gpus[0] else "cpu",
        "total": total,
        "free": free,
        "slots_total": slots[0],
        "slots_free": slots[1],
    }


def _gpu(reading: GpuReading) -> dict[str, Any]:
    """A GPU in the form of `manta.api.schemas.Gpu`."""
    return {
        "index": reading.index,
        "answers": reading.answers,
        "utilization": reading.busy_ratio,
        "memory_used_bytes": reading.memory_used_bytes,
        "memory_total_bytes": reading.memory_total_bytes,
        "power_watts": reading.power_watts,
        "temperature_celsius": reading.temperature_celsius,
        "clock_mhz": reading.clock_mhz,
        "xid": sorted(int(code) for code in reading.xids),
        "ecc_errors": reading.ecc_uncorrected,
        "ecc_corrected": reading.ecc_corrected,
    }


def _gpu_memory(said: GpuReadings | None) -> int | None:
    """Memory of the smallest GPU of a node, if its driver has been asked."""
    sizes = [reading.memory_total_bytes for reading in said.readings if reading.memory_total_bytes] if said else []
    return min(sizes, default=None)


def _placed_ranks(store: Store) -> dict[str, list[dict[str, Any]]]:
    by_host: dict[str, list[dict[str, Any]]] = {}
    with store.read_once() as connection:
        for job, rank, host in ranks.running(connection):
            by_host.setdefault(host, []).append({"job": job, "rank": rank})
    return by_host
