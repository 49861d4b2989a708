"""The cluster as users see it: nodes, slots, and which ranks run where."""

from __future__ import annotations

import asyncio
from typing import Any

from service.cluster.cluster import Cluster
from service.cluster.placement import unit_of
from service.store import Store, jobs, ranks


async def cluster_view(cluster: Cluster, store: Store) -> dict[str, Any]:
    """In the form of `api.schemas.Cluster`. Raises ClusterUnavailable."""
    gpus = await cluster.nodes.has_gpus()
    capacity = await cluster.nodes.capacity(unit_of("auto", gpus), all_living=True)
    known = {node.id: node for node in await cluster.nodes.known()}
    placed = await asyncio.to_thread(_placed_ranks, store)
    nodes = [
        {
            "id": node,
            "address": known[node].raylet[0],
            "alive": True,
            "draining": node in cluster.nodes.draining,
            "problem": cluster.nodes.problems.get(node),
            "accelerator": "gpu" if gpus else "cpu",
            "total": total,
            "free": free,
            "ranks": placed.get(known[node].host, []),
        }
        for node, (total, free) in capacity.nodes.items()
        if node in known  # else it was lost between the two looks
    ]
    return {"nodes": nodes, "totals": {"total": capacity.total, "free": capacity.free}}


def _placed_ranks(store: Store) -> dict[str, list[dict[str, Any]]]:
    by_host: dict[str, list[dict[str, Any]]] = {}
    with store.read() as session:
        for job in jobs.unfinished(session):
            for rank in ranks.of_job(session, job.id):
                if rank.pid is not None and rank.node is not None:
                    by_host.setdefault(rank.node, []).append({"job": job.id, "rank": rank.rank})
    return by_host
