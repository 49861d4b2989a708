"""Responses of the REST API about the cluster's nodes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from manta.api.schemas.base import Answer


class RunningRank(Answer):
    """A rank that occupies a slot or GPU of a node."""

    job: str
    """Job id."""
    rank: int
    """Global rank in the job."""


class Gpu(Answer):
    """One GPU of a node, as reported by its driver in the last minute; null: not reported."""

    index: int
    """The driver's index on its machine."""
    answers: bool = True
    """Whether the driver can reach it."""
    utilization: float | None = None
    """Fraction of the last sample's time in which a kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    clock_mhz: int | None = None
    """Clock of its multiprocessors."""
    xid: list[int] = Field([])
    """Codes of the errors (XID) that the driver has reported since the node's daemon started."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    ecc_corrected: int | None = None
    """Corrected memory errors since the driver was loaded."""


class Node(Answer):
    """One machine of the cluster."""

    id: str
    """Id."""
    address: str
    """Address."""
    alive: bool
    """Whether it responds."""
    draining: bool = False
    """Whether it is being drained: its jobs move away, and no new ranks are placed on it."""
    problem: str | None = None
    """Why no ranks are placed on it until it is repaired, as a sentence."""
    accelerator: str
    """What a rank occupies there by default: gpu, or cpu if the node has none."""
    total: float
    """Number of GPUs or slots of that kind."""
    free: float
    """Free GPUs or slots of that kind."""
    slots_total: float = 0
    """Number of CPU slots, which nodes with GPUs also have."""
    slots_free: float = 0
    """Free CPU slots."""
    gpu_type: str | None = None
    """Ray's name for the type of its GPUs, if Ray has detected it, such as H100."""
    gpu_memory_bytes: int | None = None
    """Memory of its smallest GPU, if its driver has been queried."""
    gpus: list[Gpu] = Field([])
    """GPUs of the node; empty if there are none or nothing is known about them."""
    ranks: list[RunningRank] = Field([])
    """Ranks that occupy GPUs or slots."""


class Cluster(Answer):
    """All nodes."""

    nodes: list[Node]
    """One entry per machine."""
    totals: dict[str, Any] = Field(default_factory=dict)
    """Sums over live nodes: total and free GPUs, or slots if no node has GPUs; slots_total, slots_free."""


class ClusterCheck(Answer):
    """Result of a check in which the nodes connect to each other's ports."""

    problems: list[str]
    """Closed ports and between which nodes, as sentences with what to do."""
    warnings: list[str] = Field([])
    """Nodes without a result, and what would be lost with Ray's head node."""
    nodes: int
    """Number of nodes that took part."""
    tries: int
    """Number of connections tried."""
