"""The best layout for every number of GPUs that may be left of a cluster, computed in advance. Pure Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manta.service.cluster.sizes import largest_fitting_size, max_ranks, resized, shapes_of, sizes_of
from manta.service.planner.bounds import Bounds
from manta.service.planner.candidates import Candidate, candidates, is_complete
from manta.service.planner.hardware import Cluster
from manta.service.planner.memory import Fit, tightest, usable_bytes
from manta.service.planner.mixed_search import best_layouts
from manta.service.planner.search import Plan, fastest, placement_problem, plan_of, with_room
from manta.service.planner.software import Software
from manta.workers.config import JobSpec

MAX_SIZES = 64
"""Most sizes that are listed for one job."""
MOVED = 1.05
"""A layout up to this factor slower than the best with fewer GPUs may still become faster by moving layers."""


@dataclass(frozen=True)
class SizedPlan:
    """The best layout with `gpus` GPUs. It is also the best with more of them, up to `up_to`, and leaves the rest
    idle."""

    up_to: int
    plan: Plan
    cluster: Cluster
    """The cluster that it was planned for."""
    nodes: Mapping[str, int] | None = None
    """Nodes of each type, if they are unequal."""

    @property
    def gpus(self) -> int:
        """GPUs that the layout uses."""
        return self.plan.spec.layout.world_size

    def to_json(self) -> dict[str, Any]:
        """As JSON, in the form of `manta.api.schemas.PlanSize`."""
        spec, seconds = self.plan.spec, self.plan.time.seconds
        fit = Fit(*tightest(spec, self.cluster))
        return {
            "gpus": self.gpus,
            "up_to": self.up_to,
            "nodes": None if self.nodes is None else dict(self.nodes),
            "parallel": spec.layout.model_dump(mode="json"),
            "micro_batch_size": spec.train.micro_batch_size,
            "step_seconds": seconds,
            "tokens_per_second": spec.train.global_batch_size * spec.model.sequence_length / seconds,
            "memory_bytes": round(fit.memory.total),
            "fits": fit.fits,
        }


def best_by_size(job: JobSpec, cluster: Cluster, software: Software) -> tuple[SizedPlan, ...]:
    """From all GPUs of the cluster down to the fewest that the job fits on. If the search looks at every size
    (`candidates.is_complete`), every number of GPUs is answered; otherwise whole nodes are left out: one, two, four and
    so on."""
    if not is_complete(job, cluster):
        return tuple(_by_nodes(job, cluster, software))
    plans = list(_by_gpus(job, cluster, software))
    ends = [*(plan.spec.layout.world_size - 1 for plan in plans[1:]), cluster.gpus]
    return tuple(reversed([SizedPlan(end, plan, cluster) for plan, end in zip(plans, ends, strict=True)]))


def best_by_nodes(job: JobSpec, cluster: Cluster) -> tuple[SizedPlan, ...]:
    """The best layouts on unequal nodes: on all of them, and for each kind with one node less, with half of them, and
    with none."""
    parts = cluster.parts
    sizes = list(_best_of(job, parts, ()))
    of_all = sizes[0].plan if sizes else None
    for lost in parts:
        known = () if of_all is None else (of_all,)
        for nodes in sorted({lost.nodes - 1, lost.nodes // 2, 0}, reverse=True):
            left = [replace(part, nodes=nodes) if part is lost else part for part in parts]
            for sized in _best_of(job, [part for part in left if part.nodes], known):
                known = *known, sized.plan
                sizes.append(sized)
    return tuple(sizes)


def _best_of(job: JobSpec, parts: Sequence[Cluster], known: Sequence[Plan]) -> Iterator[SizedPlan]:
    """The best layout on these nodes, if any fits. `known`: the best layouts on more nodes; one of these that still has
    room is the best here too."""
    first, *others = parts
    cluster = replace(first, others=tuple(others))
    plans = [plan for plan in known if placement_problem(plan.spec, cluster) is None] or best_layouts(
        job, cluster, 1
    ).plans
    for plan in plans[:1]:
        nodes = {part.type or "": part.nodes for part in parts}
        yield SizedPlan(sum(part.gpus for part in parts), plan, cluster, nodes)


def elastic_sizes(spec: JobSpec, cluster: Cluster) -> tuple[SizedPlan, ...]:
    """The layouts that a job with a fixed layout continues in as it loses GPUs, according to its section `elastic`:
    most ranks first, at most `MAX_SIZES`. They need not fit."""
    shapes = [(shape, sizes_of(spec, shape.layout)) for shape in shapes_of(spec)]
    plans: list[SizedPlan] = []
    left = max_ranks(spec)
    while left > 0 and len(plans) < MAX_SIZES:
        chosen = next((fitting for shape, sizes in shapes if (fitting := _within(left, shape, sizes))), None)
        if chosen is None:
            break
        plans.append(SizedPlan(left, plan_of(chosen, cluster), cluster))
        left = chosen.layout.world_size - 1
    return tuple(plans)


def _within(ranks: int, shape: JobSpec, sizes: range) -> JobSpec | None:
    """`shape` with the most replicas of `sizes` that `ranks` suffice for; None if they do not suffice for any."""
    replicas = ranks // (shape.layout.world_size // shape.layout.data)
    size = largest_fitting_size(sizes, min(sizes.stop - 1, replicas), 0, replicas)
    return None if size is None else resized(shape, size)


def _by_gpus(job: JobSpec, cluster: Cluster, software: Software) -> Iterator[Plan]:
    """For each number of ranks, the best layout if it is faster than those of all smaller numbers."""
    bounds, usable = Bounds(job, cluster, software), usable_bytes(cluster)
    groups: dict[int, list[Candidate]] = defaultdict(list)
    for candidate in _with_room(job, cluster, bounds, usable):
        groups[candidate.ranks].append(candidate)
    most = float("inf")
    for ranks in sorted(groups):
        for plan in fastest(groups[ranks], bounds, 1, MOVED * most).plans():
            if plan.time.seconds < most:
                most = plan.time.seconds
                yield plan


def _with_room(job: JobSpec, cluster: Cluster, bounds: Bounds, usable: float) -> Iterator[Candidate]:
    """Layouts that may fit into `usable` bytes of a device."""
    for candidate in candidates(job, cluster):
        yield from with_room(candidate, bounds.min_bytes(candidate), bounds, usable)


def _by_nodes(job: JobSpec, cluster: Cluster, software: Software) -> Iterator[SizedPlan]:
    left, lost = cluster.nodes, 1
    bounds, usable = Bounds(job, cluster, software), usable_bytes(cluster)
    while left >= 1:
        smaller = replace(cluster, nodes=left)
        plans = fastest(_with_room(job, smaller, bounds, usable), bounds, 1).plans()
        if not plans:
            return
        yield SizedPlan(smaller.gpus, plans[0], smaller)
        left, lost = cluster.nodes - lost, 2 * lost
