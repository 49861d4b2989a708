"""From a layout to bundles of resources, and whether they fit; which rank holds the backup of which. Pure arithmetic;
`placement_groups.py` has Ray create the bundles.

There is one placement group per data-parallel replica, with one bundle per tensor-parallel group: a bundle is on one
node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from manta.workers.comm.grid import RankGrid
from manta.workers.config import Accelerator, ParallelConfig

Unit = Literal["GPU", "manta_slot"]
"""The Ray resource of which each rank takes one."""
UNITS: tuple[Unit, ...] = ("GPU", "manta_slot")
TYPE_RESOURCE = "accelerator_type:"
"""Prefix of the type of a node's GPUs, in the name of a resource that Ray offers there."""
LITTLE_OF_A_TYPE = 0.001
"""Amount of a type's resource in a bundle. The resource only serves to choose nodes and is not meant to be used up; Ray
offers one of it."""


def plural_of(unit: Unit) -> str:
    """The plural of `unit` in a sentence."""
    return "GPUs" if unit == "GPU" else "slots"


def counted(number: float, unit: Unit) -> str:
    """`number` of `unit`, in a sentence."""
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
    """Node id -> type of its GPUs, for those whose type is known."""

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
    free: int
    """Units that are free, also those on nodes with too few of them for a tensor-parallel group."""
    total: int
    """Units of all nodes, free or not."""
    group: int
    """Units that must be on one node."""
    type: str | None = None
    """Type of the GPUs of those nodes, if it matters."""

    def __str__(self) -> str:
        together = f" in groups of {self.group} on one node" if self.group > 1 else ""
        typed = f" on nodes with {self.type}" if self.type is not None else ""
        needed = f"needs {counted(self.needed, self.unit)}{typed}{together}"
        if self.can_never_fit:
            return f"{needed}; the cluster has {self.possible}"
        free = f"{needed}; {self.free} of {self.total} {'is' if self.free == 1 else 'are'} free"
        return free if self.free < self.needed else f"{free}, but only {self.available} in such groups"

    @property
    def can_never_fit(self) -> bool:
        """Whether it would not fit even if no other job held any."""
        return self.possible < self.needed


def unit_of(accelerator: Accelerator, cluster_has_gpus: bool) -> Unit:
    """The resource that ranks of a job with `resources.accelerator` take."""
    if accelerator == "auto":
        return "GPU" if cluster_has_gpus else "manta_slot"
    return "GPU" if accelerator == "gpu" else "manta_slot"


def insufficient(unit: Unit) -> str:
    """Code for the reason why a job that does not get its ranks' `unit` waits."""
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
    """Name of its replica's placement group."""
    bundle: int
    """Index of its bundle in that group."""


def replica_of(layout: ParallelConfig, rank: int) -> int:
    """The data-parallel replica of `rank`."""
    return RankGrid(layout).coordinates(rank).data


def seats_of(layout: ParallelConfig, groups: Sequence[str]) -> dict[int, Seat]:
    """The seat of each rank, if `groups` are the placement groups of the replicas, in order."""
    grid = RankGrid(layout)
    places = {rank: grid.coordinates(rank) for rank in range(layout.world_size)}
    return {rank: Seat(groups[at.data], at.pipeline * layout.context + at.context) for rank, at in places.items()}


def missing(layout: ParallelConfig, capacity: Capacity) -> Shortage | None:
    """What `layout` lacks on this cluster now; None if it fits. A tensor-parallel group must share a node, so free
    units on nodes with fewer than `tensor` of them do not count. If nodes of several types are missing, the shortage is
    that of the type that would be missing most even if no other job held any."""
    shortages = list(_shortages(layout, capacity))
    return max(shortages, key=lambda each: (each.needed - each.possible, each.needed - each.available), default=None)


def _shortages(layout: ParallelConfig, capacity: Capacity) -> Iterator[Shortage]:
    each = layout.tensor * layout.data * layout.context
    for type, stages in Counter(stage_types(layout)).items():
        needed, nodes = stages * each, capacity.of_type(type)
        available = sum(free // layout.tensor for _, free in nodes) * layout.tensor
        if available < needed:
            possible = sum(total // layout.tensor for total, _ in nodes) * layout.tensor
            total, free = (sum(each) for each in zip(*nodes, strict=True)) if nodes else (0, 0)
            yield Shortage(capacity.unit, needed, available, possible, free, total, layout.tensor, type)


def without(capacity: Capacity, nodes: Collection[str]) -> Capacity:
    """`capacity` if `nodes` did not exist."""
    left = {node: units for node, units in capacity.nodes.items() if node not in nodes}
    total, free = (sum(each) for each in zip(*left.values(), strict=True)) if left else (0, 0)
    return replace(capacity, total=total, free=free, nodes=left)


def avoidable(layout: ParallelConfig, capacity: Capacity, nodes: Collection[str]) -> set[str]:
    """Which of `nodes` `layout` can do without: all of them if the others could hold it when no other job holds
    any of their units; none if they could not, since an untrusted node is better than none."""
    living = {node for node in nodes if node in capacity.nodes}
    shortage = missing(layout, without(capacity, living))
    return living if shortage is None or shortage.possible >= shortage.needed else set()


def anywhere_but(nodes: Collection[str]) -> dict[str, str]:
    """Ray's label selector for a bundle that may be on any node except `nodes`."""
    return {"ray.io/node-id": f"!in({','.join(sorted(nodes))})"} if nodes else {}


def placement_group_name(job: str, generation: int, replica: int) -> str:
    """Name of the placement group of one replica."""
    return f"replica/{job}/{generation}/{replica}"


def agent_name(job: str, generation: int, rank: int) -> str:
    """Name of one rank's agent; `generation` is the one that placed it."""
    return f"agent/{job}/{generation}/{rank}"


def node_daemon_name(node: str) -> str:
    """Name of the daemon of a Ray node."""
    return f"node-{node}"


def job_of(name: str) -> str | None:
    """The job to which an agent or a placement group belongs, by its name; None for other names."""
    parts = name.split("/")
    return parts[1] if len(parts) == 4 and parts[0] in ("replica", "agent") else None


def partners(node_of_rank: Sequence[str]) -> dict[int, int]:
    """For each rank the rank on another node that holds its backup; empty if all ranks share one node. No rank holds
    more backups than necessary: one, unless a node has more ranks than all others together."""
    groups: dict[str, list[int]] = {}
    for rank, node in enumerate(node_of_rank):
        groups.setdefault(node, []).append(rank)
    if len(groups) < 2:
        return {}
    nodes = sorted(groups, key=lambda node: (-len(groups[node]), node))
    largest, everyone = len(groups[nodes[0]]), [rank for node in nodes for rank in groups[node]]
    if 2 * largest <= len(everyone):
        # Ranks of one node are consecutive: this many places further another node begins.
        return {rank: everyone[(at + largest) % len(everyone)] for at, rank in enumerate(everyone)}
    crowd, others = everyone[:largest], everyone[largest:]
    return {rank: others[at % len(others)] for at, rank in enumerate(crowd)} | dict(zip(others, crowd, strict=False))


@dataclass(frozen=True)
class Reachable:
    """The newest step that all ranks can resume from, using memory only."""

    step: int
    fetched: tuple[int, ...]
    """Ranks that need their backup for it; the others have it themselves."""


def reachable(own: Sequence[Iterable[int]], backups: Mapping[int, Iterable[int]]) -> Reachable | None:
    """`own`: for each rank the steps in its own shared memory, none for a rank that lost it; `backups`: by rank the
    steps that its partner holds. None if there is no step that every rank can reach."""
    mine = [set(steps) for steps in own]
    held = [set(backups.get(rank, ())) for rank in range(len(mine))]
    common = set.intersection(*(a | b for a, b in zip(mine, held, strict=True))) if mine else set()
    if not common:
        return None
    step = max(common)
    return Reachable(step, tuple(rank for rank, steps in enumerate(mine) if step not in steps))
