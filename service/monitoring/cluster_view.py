"""The cluster as users see it: nodes, slots, and which ranks run where."""

from __future__ import annotations

import asyncio
from typing import Any

from service.cluster.cluster import Cluster
from service.cluster.nodes import GpuReadings
from service.monitoring.measurements import gpus_of
from service.store import Store, ranks
from workers.protocol.messages import GpuReading

_NOTHING = (0, 0)


async def cluster_view(cluster: Cluster, store: Store) -> dict[str, Any]:
    """The cluster in the form of `api.schemas.Cluster`. Raises ClusterUnavailable."""
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
    """A GPU in the form of `api.schemas.Gpu`."""
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
    sizes = [each.memory_total_bytes for each in said.readings if each.memory_total_bytes] if said else []
    return min(sizes, default=None)


def _placed_ranks(store: Store) -> dict[str, list[dict[str, Any]]]:
    by_host: dict[str, list[dict[str, Any]]] = {}
    with store.read_once() as connection:
        for job, rank, host in ranks.running(connection):
            by_host.setdefault(host, []).append({"job": job, "rank": rank})
    return by_host
