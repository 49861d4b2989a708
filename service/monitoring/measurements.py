"""What one control plane knows about itself and the nodes that is not in the database: for monitoring."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from service.cluster.cluster import Cluster
from service.cluster.errors import ClusterUnavailable
from service.cluster.nodes import Nodes, RayNode
from service.cluster.placement import UNITS, Unit
from workers.protocol.messages import GpuReading

RAY_SECONDS = 3.0
FRESH_SECONDS = 60.0
"""Readings of a node that are older than this are not shown."""

NodeState = Literal["ready", "draining", "silent", "problem", "lost"]
NODE_STATES: tuple[NodeState, ...] = get_args(NodeState)


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


async def measured(cluster: Cluster | None, asked_at: float, owned: int, lags: Mapping[str, float]) -> Measurements:
    """To be called on the control plane's loop. `asked_at`: by the monotonic clock; `cluster`: None until there is
    one."""
    delay = time.monotonic() - asked_at
    try:
        if cluster is None:
            raise ClusterUnavailable(LookupError("the cluster is not connected yet"))
        async with asyncio.timeout(RAY_SECONDS):
            known = [node for node in await cluster.nodes.known() if node.alive and node.holds_ranks]
            capacities = [await cluster.nodes.capacity(unit, all_living=True) for unit in UNITS]
    except (ClusterUnavailable, TimeoutError):
        return Measurements(delay, owned, lags, ray_answers=False)
    nodes = tuple(_node(cluster.nodes, node) for node in known)
    units = {capacity.unit: (capacity.total, capacity.free) for capacity in capacities}
    return Measurements(delay, owned, lags, nodes=nodes, units=units)


def gpus_of(nodes: Nodes, node: str) -> tuple[GpuReading, ...]:
    """Recent readings of a node's GPUs."""
    heard = nodes.gpus.get(node)
    return heard.readings if heard is not None and time.monotonic() - heard.heard_at < FRESH_SECONDS else ()


def _node(nodes: Nodes, node: RayNode) -> NodeMeasurements:
    return NodeMeasurements(node.id, node.host, _state(nodes, node.id), gpus_of(nodes, node.id))


def _state(nodes: Nodes, node: str) -> NodeState:
    if node in nodes.lost:
        return "lost"
    if node in nodes.draining:
        return "draining"
    if node in nodes.silent:
        return "silent"
    return "problem" if node in nodes.problems else "ready"
