"""From a layout to bundles of resources, and whether they fit. Pure arithmetic; `placement_groups.py` has Ray do it.

One placement group per data-parallel replica, one bundle in it per tensor-parallel group: a bundle lies on one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from workers.comm.grid import RankGrid
from workers.config import Accelerator, ParallelConfig

Unit = Literal["GPU", "manta_slot"]
"""The Ray resource of which each rank takes one."""
UNITS: tuple[Unit, ...] = ("GPU", "manta_slot")
TYPE_RESOURCE = "accelerator_type:"
"""Before the type of a node's GPUs, a resource that Ray offers there."""
LITTLE_OF_A_TYPE = 0.001
"""Of a type's resource, which is there to choose nodes and has no amount that could be used up; Ray has one of it."""


def plural_of(unit: Unit) -> str:
    """What several of `unit` are called in a sentence."""
    return "GPUs" if unit == "GPU" else "slots"


def counted(number: float, unit: Unit) -> str:
    """So many of `unit`, in a sentence."""
    plural = plural_of(unit)
    return f"{number:g} {plural if number != 1 else plural.removesuffix('s')}"


@dataclass(frozen=True)
class Capacity:
    """Ranks that the cluster can hold."""

    unit: Unit
    total: int
    """Units of all living nodes."""
    free: int
    """Units that are free."""
    nodes: dict[str, tuple[int, int]]
    """Node id -> (total, free)."""
    types: dict[str, str] = field(default_factory=dict)
    """Node id -> type of its GPUs, of those whose type is known."""

    def of_type(self, type: str | None) -> list[tuple[int, int]]:
        """(Total, free) of each node with such GPUs; None: of all nodes."""
        return [units for node, units in self.nodes.items() if type is None or self.types.get(node) == type]


@dataclass(frozen=True)
class Shortage:
    """Why a layout does not fit now."""

    unit: Unit
    needed: int
    """Units that the layout takes."""
    available: int
    """Units that are free in pieces large enough for its tensor-parallel groups."""
    possible: int
    """Units that would be available if no other job held any."""
    group: int
    """Units that must lie on one node."""
    type: str | None = None
    """Of the GPUs of those nodes, where it matters."""

    def __str__(self) -> str:
        together = f" in groups of {self.group} on one node" if self.group > 1 else ""
        typed = f" on nodes with {self.type}" if self.type is not None else ""
        needed = f"needs {counted(self.needed, self.unit)}{typed}{together}"
        if self.waits_in_vain:
            return f"{needed}, of which there are {self.possible}"
        return f"{needed}, {self.available} of {self.possible} are free"

    @property
    def waits_in_vain(self) -> bool:
        """Whether it would not fit either if no other job held any."""
        return self.possible < self.needed


def unit_of(accelerator: Accelerator, cluster_has_gpus: bool) -> Unit:
    """The resource that ranks of a job with `resources.accelerator` take."""
    if accelerator == "auto":
        return "GPU" if cluster_has_gpus else "manta_slot"
    return "GPU" if accelerator == "gpu" else "manta_slot"


def insufficient(unit: Unit) -> str:
    """Why a job that does not get its ranks' `unit` waits, as a code."""
    return f"insufficient_{plural_of(unit).lower()}"


def stage_types(layout: ParallelConfig) -> tuple[str | None, ...]:
    """For each stage the type that the GPUs of its nodes must have; None: any."""
    return layout.stage_accelerators or (None,) * layout.pipeline


def bundle_of(layout: ParallelConfig, unit: Unit, type: str | None) -> dict[str, float]:
    """What a tensor-parallel group takes of a node, which must have GPUs of this type."""
    typed = {} if type is None else {TYPE_RESOURCE + type: LITTLE_OF_A_TYPE}
    return {unit: float(layout.tensor), **typed}


def replica_bundles(layout: ParallelConfig, unit: Unit) -> list[list[dict[str, float]]]:
    """For each data-parallel replica the bundles of its placement group, one per tensor-parallel group."""
    types = [type for type in stage_types(layout) for _ in range(layout.context)]
    return [[bundle_of(layout, unit, type) for type in types] for _ in range(layout.data)]


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
    Where several types of node are too few, of the one that most is missing of even if no other job held any.
    """
    shortages = list(_shortages(layout, capacity))
    return max(shortages, key=lambda each: (each.needed - each.possible, each.needed - each.available), default=None)


def _shortages(layout: ParallelConfig, capacity: Capacity) -> Iterator[Shortage]:
    each = layout.tensor * layout.data * layout.context
    for type, stages in Counter(stage_types(layout)).items():
        needed, nodes = stages * each, capacity.of_type(type)
        available = sum(free // layout.tensor for _, free in nodes) * layout.tensor
        if available < needed:
            possible = sum(total // layout.tensor for total, _ in nodes) * layout.tensor
            yield Shortage(capacity.unit, needed, available, possible, layout.tensor, type)


def without(capacity: Capacity, nodes: Collection[str]) -> Capacity:
    """`capacity` if `nodes` did not exist."""
    left = {node: units for node, units in capacity.nodes.items() if node not in nodes}
    total, free = (sum(each) for each in zip(*left.values(), strict=True)) if left else (0, 0)
    return replace(capacity, total=total, free=free, nodes=left)


def avoidable(layout: ParallelConfig, capacity: Capacity, nodes: Collection[str]) -> set[str]:
    """Those of `nodes` that `layout` can do without: all of them, where the others could hold it if no other job held
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
