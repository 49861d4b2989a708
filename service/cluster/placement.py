"""From a layout to bundles of resources, and whether they fit. Pure arithmetic; `placement_groups.py` has Ray do it.

One placement group per data-parallel replica, one bundle in it per tensor-parallel group: a bundle lies on one node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from workers.comm.grid import RankGrid
from workers.config import Accelerator, ParallelConfig

Unit = Literal["GPU", "manta_slot"]
"""The Ray resource of which each rank takes one."""
UNITS: tuple[Unit, ...] = ("GPU", "manta_slot")


def plural_of(unit: Unit) -> str:
    """What several of `unit` are called in a sentence."""
    return "GPUs" if unit == "GPU" else "slots"


@dataclass(frozen=True)
class Capacity:
    """Ranks that the cluster can hold."""

    unit: Unit
    total: int
    """Units of all living nodes."""
    free: int
    """Units that nobody holds."""
    nodes: dict[str, tuple[int, int]]
    """Node id -> (total, free)."""


@dataclass(frozen=True)
class Shortage:
    """Why a layout does not fit now."""

    unit: Unit
    needed: int
    """Units that the layout takes."""
    available: int
    """Units that are free in pieces large enough for its tensor-parallel groups."""
    possible: int
    """Units that would be available if nobody else held any; below `needed`, waiting alone does not help."""
    group: int
    """Units that must lie on one node."""

    def __str__(self) -> str:
        together = f" in groups of {self.group} on one node" if self.group > 1 else ""
        needed = f"needs {self.needed} {plural_of(self.unit)}{together}"
        return f"{needed}, {self.available} of {self.possible} are free"


def unit_of(accelerator: Accelerator, cluster_has_gpus: bool) -> Unit:
    """The resource that ranks of a job with `resources.accelerator` take."""
    if accelerator == "auto":
        return "GPU" if cluster_has_gpus else "manta_slot"
    return "GPU" if accelerator == "gpu" else "manta_slot"


def insufficient(unit: Unit) -> str:
    """Why a job that does not get its ranks' `unit` waits, as a code."""
    return f"insufficient_{plural_of(unit).lower()}"


def replica_bundles(layout: ParallelConfig, unit: Unit) -> list[list[dict[str, float]]]:
    """For each data-parallel replica the bundles of its placement group, one per tensor-parallel group."""
    groups = layout.pipeline * layout.context
    return [[{unit: float(layout.tensor)} for _ in range(groups)] for _ in range(layout.data)]


@dataclass(frozen=True)
class Seat:
    """Where a rank's agent is placed."""

    group: str
    """Name of the placement group of its replica."""
    bundle: int
    """Index of its bundle there."""


def replica_of(layout: ParallelConfig, rank: int) -> int:
    """The data-parallel replica of `rank`."""
    return RankGrid(layout).coordinates(rank).data


def seats_of(layout: ParallelConfig, groups: Sequence[str]) -> dict[int, Seat]:
    """The seat of each rank, where `groups` are the placement groups of the replicas, in order."""
    grid = RankGrid(layout)
    places = {rank: grid.coordinates(rank) for rank in range(layout.world_size)}
    return {rank: Seat(groups[at.data], at.pipeline * layout.context + at.context) for rank, at in places.items()}


def missing(layout: ParallelConfig, capacity: Capacity) -> Shortage | None:
    """What `layout` lacks on this cluster now; None when it fits.

    A tensor-parallel group must share a node, so free units on nodes with fewer than `tensor` of them do not count.
    """
    available = sum(free // layout.tensor for _, free in capacity.nodes.values()) * layout.tensor
    if available >= layout.world_size:
        return None
    possible = sum(total // layout.tensor for total, _ in capacity.nodes.values()) * layout.tensor
    return Shortage(capacity.unit, layout.world_size, available, possible, layout.tensor)


def without(capacity: Capacity, nodes: Collection[str]) -> Capacity:
    """`capacity` if `nodes` did not exist."""
    left = {node: units for node, units in capacity.nodes.items() if node not in nodes}
    return Capacity(capacity.unit, sum(t for t, _ in left.values()), sum(f for _, f in left.values()), left)


def avoidable(layout: ParallelConfig, capacity: Capacity, nodes: Collection[str]) -> set[str]:
    """Those of `nodes` that `layout` can do without: all of them, where the others could hold it if nobody else held
    any of their units; none where they could not, since a node that is not trusted is better than none."""
    living = {node for node in nodes if node in capacity.nodes}
    shortage = missing(layout, without(capacity, living))
    return living if shortage is None or shortage.possible >= shortage.needed else set()


def anywhere_but(nodes: Collection[str]) -> dict[str, str]:
    """Ray's label selector for a bundle that may lie on any node but `nodes`."""
    return {"ray.io/node-id": f"!in({','.join(sorted(nodes))})"} if nodes else {}


def placement_group_name(job: str, generation: int, replica: int) -> str:
    """Name of the placement group of one replica."""
    return f"replica/{job}/{generation}/{replica}"


def agent_name(job: str, generation: int, rank: int) -> str:
    """Name of the agent of one rank; `generation` is the one that placed it."""
    return f"agent/{job}/{generation}/{rank}"


def node_daemon_name(node: str) -> str:
    """Name of the daemon of a Ray node."""
    return f"node-{node}"


def job_of(name: str) -> str | None:
    """The job to which an agent or a placement group belongs, by its name; None for other names."""
    parts = name.split("/")
    return parts[1] if len(parts) == 4 and parts[0] in ("replica", "agent") else None
