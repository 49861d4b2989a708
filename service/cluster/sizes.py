"""The layouts in which a job may run: with how many replicas, of how many ranks; and for how many there is room. Pure
arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Protocol

from manta.service.cluster.placement import Capacity, stage_types
from manta.service.errors import ErrorKind, ServiceError
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.schedules.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from manta.workers.spec.divisors import divisors
from manta.workers.spec.expert_rules import replica_unit
from manta.workers.spec.rules import find_problems


class SizeOutOfBounds(ServiceError):
    """A number of replicas that the job's spec does not permit."""

    kind = ErrorKind("size_out_of_bounds", 422, "the job cannot have this size")

    def __init__(self, job_id: str, replicas: int, sizes: range):
        bounds = f"{sizes[0]}..{sizes[-1]}"
        in_steps = f" in steps of {sizes.step}, whole groups of parallel.expert" if sizes.step > 1 else ""
        super().__init__(
            f"{job_id} cannot run with {replicas} replicas: its elastic.min_data..max_data is {bounds}{in_steps}"
            + (", so its size is fixed; submit it with wider bounds" if len(sizes) == 1 else "")
        )


class Sized(Protocol):
    """The stored choices of the layout that a job runs in; None: as in its spec."""

    tensor: Any
    pipeline: Any
    context: Any
    expert: Any
    replicas: Any


def sizes_of(spec: JobSpec, shape: ParallelConfig | None = None) -> range:
    """The numbers of replicas that `elastic` permits, in which the expert groups of `shape`, or else of the spec's
    layout, are whole."""
    data, unit = spec.layout.data, replica_unit(shape or spec.layout)
    least = -(-(spec.elastic.min_data or data) // unit) * unit
    return range(least, (spec.elastic.max_data or data) + 1, unit)


def max_ranks(spec: JobSpec) -> int:
    """The most ranks that the job may ever have: all replicas that `elastic` permits, since other shapes are
    smaller."""
    return resized(spec, sizes_of(spec)[-1]).layout.world_size


def shapes_of(spec: JobSpec) -> list[JobSpec]:
    """`spec`, and if `elastic.reshape` permits it, a variant with each smaller tensor x pipeline x context that divides
    its own, and experts spread over as many ranks or a divisor of that, which is compatible with the rest of the spec:
    those with more ranks first, and for the same number those with the larger tensor size, then the larger number of
    stages, then of ranks that experts are spread over."""
    own = spec.layout
    if not spec.elastic.reshape:
        return [spec]
    shapes = product(*(divisors(size) for size in sizes_of_shape(own)))
    largest_first = sorted(shapes, key=lambda shape: (-math.prod(shape[:3]), -shape[0], -shape[1], -shape[3]))
    layouts = [_reshaped(own, *shape) for shape in largest_first[1:]]
    smaller = [spec.model_copy(update={"parallel": layout}) for layout in layouts]
    return [spec, *(shape for shape in smaller if not find_problems(shape))]


def sizes_of_shape(layout: ParallelConfig) -> tuple[int, int, int, int]:
    """The sizes that `elastic.reshape` may change: tensor, pipeline, context, expert."""
    return layout.tensor, layout.pipeline, layout.context, layout.expert_size


def _reshaped(layout: ParallelConfig, tensor: int, pipeline: int, context: int, expert: int) -> ParallelConfig:
    """`layout` with other tensor-, pipeline-, context- and expert-parallel sizes. The types of node of its stages do
    not apply to another number of stages."""
    changed: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context}
    if pipeline != layout.pipeline:
        changed |= {"stage_layers": None, "stage_accelerators": None}
    if pipeline == 1 < layout.pipeline:  # nothing is left to schedule
        changed |= {"schedule": ONE_FORWARD_ONE_BACKWARD.name, "virtual_stages": 1}
    if tensor == 1 < layout.tensor:
        changed |= {"sequence_parallel": None}
    if context == 1 < layout.context:  # no other rank has keys and values
        changed |= {"context_method": None, "context_order": None}
    if expert != layout.expert_size:
        changed |= {"expert": expert if expert > 1 else None}
    if tensor == 1 or expert == 1:  # no tensor ranks are left that could have different experts
        changed |= {"expert_tensor": None}
    shape = layout.model_copy(update=changed)
    # Of dispatch nothing is left either if a tensor group has all experts.
    return shape if shape.exchange_size > 1 else shape.model_copy(update={"expert_dispatch": None})


def resized(spec: JobSpec, replicas: int) -> JobSpec:
    """`spec` with another number of replicas; everything else stays, including the global batch."""
    if replicas == spec.layout.data:
        return spec
    return spec.model_copy(update={"parallel": spec.layout.model_copy(update={"data": replicas})})


def in_use(spec: JobSpec, job: Sized) -> JobSpec:
    """`spec` as submitted, in the layout that the job runs in."""
    return spec.model_copy(update={"parallel": layout_in_use(spec.layout, job)})


def layout_in_use(submitted: ParallelConfig, job: Sized) -> ParallelConfig:
    """The layout that the job runs in, which was `submitted` with another."""
    sizes = zip((job.tensor, job.pipeline, job.context, job.expert), sizes_of_shape(submitted), strict=True)
    shape = _reshaped(submitted, *(used or own for used, own in sizes))
    return shape.model_copy(update={"data": job.replicas or submitted.data})


def smallest(spec: JobSpec) -> JobSpec:
    """`spec` in the smallest layout that it permits."""
    shape = shapes_of(spec)[-1]
    return resized(shape, sizes_of(spec, shape.layout).start)


def room_for(layout: ParallelConfig, capacity: Capacity) -> int:
    """How many more complete replicas of `layout` would fit into what is free: a tensor-parallel group is on one
    node."""
    return min(
        sum(free // layout.tensor for _, free in capacity.of_type(type)) // (stages * layout.context)
        for type, stages in Counter(stage_types(layout)).items()
    )


def largest_fitting_size(sizes: range, wanted: int, held: int, room: int) -> int | None:
    """The number of replicas to run with: as close to `wanted` as `held` ones and `room` for more permit. None if not
    even the smallest size fits."""
    possible = min(wanted, held + room)
    whole = possible - (possible - sizes.start) % sizes.step
    return whole if whole in sizes else None


def staying_replicas(sizes: range, layout: ParallelConfig, left: Sequence[int]) -> tuple[int, ...] | None:
    """Of the replicas `left` of `layout` those that the job continues with, as many as `sizes` permits: first those of
    expert groups that lost none, where all experts still are. None if there are too few."""
    count, unit = largest_fitting_size(sizes, len(left), 0, len(left)), replica_unit(layout)
    if count is None:
        return None
    living = Counter(replica // unit for replica in left)
    return tuple(sorted(sorted(left, key=lambda replica: living[replica // unit] < unit)[:count]))


def fitting(shapes: Sequence[JobSpec], wanted: int, capacity: Capacity) -> JobSpec | None:
    """The first of `shapes` of which a permitted number of replicas fits, with as many of the `wanted` ones as fit;
    None if none fits."""
    for shape in shapes:
        sizes = sizes_of(shapes[0], shape.layout)
        size = largest_fitting_size(sizes, wanted, 0, room_for(shape.layout, capacity))
        if size is not None:
            return resized(shape, size)
    return None


def with_freed_units(capacity: Capacity, nodes: Iterable[str | None]) -> Capacity:
    """`capacity` once a unit on each of `nodes` is free again; nodes that are not in it are ignored."""
    free = {node: count for node, (_, count) in capacity.nodes.items()}
    for node in nodes:
        if node in free:
            free[node] += 1
    held = {node: (total, min(total, free[node])) for node, (total, _) in capacity.nodes.items()}
    return replace(capacity, free=sum(count for _, count in held.values()), nodes=held)
