"""The machines."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api.schemas.base import Answer


class RunningRank(Answer):
    """What occupies a place on a node."""

    job: str
    """Job id."""
    rank: int
    """Global rank in it."""


class Gpu(Answer):
    """One GPU of a node, as its driver said in the last minute; null: it does not say that."""

    index: int
    """The driver's, on its machine."""
    answers: bool = True
    """Whether the driver reaches it."""
    utilization: float | None = None
    """Part of the last sample's time in which a kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    clock_mhz: int | None = None
    """Of its multiprocessors."""
    xid: list[int] = Field([])
    """Codes of the errors (XID) that the driver has told since the node's daemon began."""
    ecc_errors: int | None = None
    """Memory errors that were not corrected, since the driver was loaded."""
    ecc_corrected: int | None = None
    """Those that were."""


class Node(Answer):
    """One machine of the cluster."""

    id: str
    """Its id."""
    address: str
    """Its address."""
    alive: bool
    """Whether it answers."""
    draining: bool = False
    """Whether it is to be left: jobs move away from it, and none is placed there."""
    problem: str | None = None
    """Why none is placed there until somebody mends it, in a sentence."""
    accelerator: str
    """What a rank takes there unless its job asks for the other: gpu, or cpu where there is none."""
    total: float
    """Places for ranks, of that kind."""
    free: float
    """Places that nobody has."""
    slots_total: float = 0
    """CPU slots, which a node has beside GPUs too."""
    slots_free: float = 0
    """CPU slots that nobody has."""
    gpu_type: str | None = None
    """What Ray calls the type of its GPUs, where it has recognised them: H100."""
    gpu_memory_bytes: int | None = None
    """Of its smallest GPU, where the node's driver has been asked."""
    gpus: list[Gpu] = Field([])
    """Empty where there are none, or nothing is known of them."""
    ranks: list[RunningRank] = Field([])
    """Who has the others."""


class Cluster(Answer):
    """All machines."""

    nodes: list[Node]
    """One entry a machine."""
    totals: dict[str, Any] = Field(default_factory=dict)
    """Sums over living machines: total and free of GPUs, or of slots where none has any; slots_total, slots_free."""


class ClusterCheck(Answer):
    """What came out when the nodes tried each other's ports."""

    problems: list[str]
    """Closed ports, from where to where, in sentences that say what to do."""
    warnings: list[str] = Field([])
    """Nodes of which nothing is known, and what would be lost with Ray's head."""
    nodes: int
    """Nodes that took part."""
    tries: int
    """Connections that were tried."""
