"""The machines."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api.schemas.base import Answer


class RunningRank(Answer):
    """A rank that occupies a GPU or a slot of a node."""

    job: str
    """Job id."""
    rank: int
    """Global rank in it."""


class Gpu(Answer):
    """One GPU of a node, as its driver reported in the last minute; null: it does not report that."""

    index: int
    """The driver's index on its machine."""
    answers: bool = True
    """Whether the driver reaches it."""
    utilization: float | None = None
    """Part of the last sample's time in which a kernel ran, 0 to 1."""
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
    """Corrected memory errors since then."""


class Node(Answer):
    """One machine of the cluster."""

    id: str
    """Its id."""
    address: str
    """Its address."""
    alive: bool
    """Whether it answers."""
    draining: bool = False
    """Whether it is being drained: jobs move away from it, and none is placed there."""
    problem: str | None = None
    """Why no job is placed there until this is fixed, in a sentence."""
    accelerator: str
    """What a rank uses there by default: gpu, or cpu on a node without GPUs."""
    total: float
    """How many ranks fit, of that kind."""
    free: float
    """How many more ranks fit."""
    slots_total: float = 0
    """CPU slots, which nodes with GPUs have too."""
    slots_free: float = 0
    """Free CPU slots."""
    gpu_type: str | None = None
    """Type of its GPUs where Ray has recognised it, such as H100."""
    gpu_memory_bytes: int | None = None
    """Memory of its smallest GPU, once the node's driver has reported it."""
    gpus: list[Gpu] = Field([])
    """Empty where it has none, or nothing is known about them."""
    ranks: list[RunningRank] = Field([])
    """Ranks that run there."""


class Cluster(Answer):
    """All machines."""

    nodes: list[Node]
    """One entry per node."""
    totals: dict[str, Any] = Field(default_factory=dict)
    """Sums over live nodes: total and free of GPUs, or of slots where none has any; slots_total, slots_free."""


class ClusterCheck(Answer):
    """Result of the nodes connecting to each other's ports."""

    problems: list[str]
    """Closed ports, from where to where, in sentences that say what to do."""
    warnings: list[str] = Field([])
    """Nodes about which nothing is known, and what would be lost with Ray's head."""
    nodes: int
    """Nodes that took part."""
    tries: int
    """Connections that were tried."""
