"""Nodes that an autoscaler can add: their declared shapes, how far the cluster can grow with them, and what to request.
Pure arithmetic; `placement_groups.py` asks Ray."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from manta.service.cluster.placement import Capacity, Unit, bundle_of, counted, plural_of, stage_types
from manta.workers.config import ParallelConfig
from manta.workers.errors import MantaError

_ONE = re.compile(r"\s*(?P<type>[^=,\s]+)\s*=\s*(?P<most>\d+)\s*x\s*(?P<units>\d+)\s*(?P<unit>slots?|gpus?)\s*", re.I)


class InvalidNodeShapes(MantaError):
    """The text does not declare shapes of nodes."""

    def __init__(self, text: str):
        super().__init__(
            f"{text!r} is not a list of nodes; write TYPE=COUNT x UNITS slots or gpus, several with commas, such as "
            "workers=4x8 slots, accelerated=2x8 gpus"
        )


@dataclass(frozen=True)
class NodeShape:
    """A type of node of the autoscaler."""

    type: str
    """The autoscaler's name for it: of a node type, or of a KubeRay worker group."""
    max_nodes: int
    """The maximum number of such nodes."""
    unit: Unit
    """The unit that ranks take there."""
    units: int
    """Number of units of each node."""

    def __str__(self) -> str:
        return f"{self.max_nodes} {self.type} of {counted(self.units, self.unit)}"


def shapes_in(text: str) -> tuple[NodeShape, ...]:
    """The shapes that `text` declares, such as `workers=4x8 slots, accelerated=2x8 gpus`. Raises InvalidNodeShapes."""
    shapes = []
    for part in text.split(","):
        match = _ONE.fullmatch(part)
        if match is None or not int(match["units"]):
            raise InvalidNodeShapes(part.strip())
        unit: Unit = "GPU" if match["unit"].lower().startswith("gpu") else "manta_slot"
        shapes.append(NodeShape(match["type"], int(match["most"]), unit, int(match["units"])))
    twice = [type for type, count in Counter(shape.type for shape in shapes).items() if count > 1]
    if twice:
        raise InvalidNodeShapes(f"{twice[0]} twice")
    return tuple(shapes)


def grown(capacity: Capacity, shapes: Sequence[NodeShape], types: Collection[str]) -> Capacity:
    """`capacity` once the autoscaler has added everything that it may. `types`: those of the existing nodes, including
    nodes where nothing is placed."""
    there = Counter(types)
    more = {
        f"{shape.type}+{number}": (shape.units, shape.units)
        for shape in shapes
        if shape.unit == capacity.unit
        for number in range(max(0, shape.max_nodes - there[shape.type]))
    }
    units = sum(total for total, _ in more.values())
    nodes = {**capacity.nodes, **more}
    return replace(capacity, total=capacity.total + units, free=capacity.free + units, nodes=nodes)


def capacity_after_placing(capacity: Capacity, layout: ParallelConfig) -> Capacity | None:
    """What is left of `capacity` with `layout` in it, on the fullest nodes that can hold its tensor-parallel groups;
    None if it does not fit."""
    left = {node: free for node, (_, free) in capacity.nodes.items()}
    for type, stages in Counter(stage_types(layout)).items():
        groups = stages * layout.data * layout.context
        suitable = [node for node in left if type is None or capacity.types.get(node) == type]
        for node in sorted(suitable, key=lambda each: left[each]):
            fit = min(groups, left[node] // layout.tensor)
            left[node] -= fit * layout.tensor
            groups -= fit
        if groups:
            return None
    nodes = {node: (total, left[node]) for node, (total, _) in capacity.nodes.items()}
    return replace(capacity, free=sum(left.values()), nodes=nodes)


class Demand:
    """What the head of the queue needs, and those behind it that would fit as well."""

    def __init__(self, most: Mapping[Unit, Capacity]):
        """`max_nodes`: for each unit the largest capacity that the cluster could have free."""
        self._left = dict(most)
        self.is_over = False
        """Whether a job did not fit in addition to those before it."""
        self.bundles: list[dict[str, float]] = []
        """One bundle for each tensor-parallel group."""

    def left(self, unit: Unit) -> Capacity:
        """What could be free in addition to the jobs that were added."""
        return self._left[unit]

    def add(self, layout: ParallelConfig, unit: Unit) -> bool:
        """Whether nodes are requested for a job in `layout`; once one job does not fit, none behind it is added."""
        after = None if self.is_over else capacity_after_placing(self._left[unit], layout)
        if after is None:
            self.is_over = True
            return False
        self._left[unit] = after
        for type in stage_types(layout):
            self.bundles += [bundle_of(layout, unit, type)] * (layout.data * layout.context)
        return True


def describe_growth(shapes: Sequence[NodeShape], unit: Unit) -> str:
    """How far the cluster can grow, as part of a sentence."""
    ours = [str(shape) for shape in shapes if shape.unit == unit]
    none = f"the autoscaler has no nodes with {plural_of(unit)}"
    return f"the autoscaler can have {', '.join(ours)}" if ours else none
