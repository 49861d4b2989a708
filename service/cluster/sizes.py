"""The layouts in which a job may run: with how many replicas, of how many ranks; and for how many there is room. Pure
arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from manta.service.cluster.placement import Capacity, stage_types
from manta.service.errors import ErrorKind, ServiceError
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.schedules.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from manta.workers.spec.divisors import divisors
from manta.workers.spec.rules import find_problems


class SizeOutOfBounds(ServiceError):
    """A number of replicas that the job's spec does not permit."""

    kind = ErrorKind("size_out_of_bounds", 422, "the job cannot have this size")

    def __init__(self, job_id: str, replicas: int, sizes: range):
        bounds = f"{sizes.start}..{sizes.stop - 1}"
        super().__init__(
            f"{job_id} cannot run with {replicas} replicas: its elastic.min_data..max_data is {bounds}"
            + (", so its size is fixed; submit it with wider bounds" if len(sizes) == 1 else "")
        )


class Sized(Protocol):
    """The stored choices of the layout that a job runs in; None: as in its spec."""

    tensor: Any
    pipeline: Any
    replicas: Any


def sizes_of(spec: JobSpec) -> range:
    """The numbers of replicas that `elastic` permits."""
    data = spec.layout.data
    return range(spec.elastic.min_data or data, (spec.elastic.max_data or data) + 1)


def max_ranks(spec: JobSpec) -> int:
    """The most ranks that the job may ever have: all replicas that `elastic` permits, since other shapes are
    smaller."""
    return resized(spec, sizes_of(spec).stop - 1).layout.world_size


def shapes_of(spec: JobSpec) -> list[JobSpec]:
    """`spec`, and if `elastic.reshape` permits it, a variant with each smaller tensor x pipeline that divides its own
    and is compatible with the rest of the spec: those with more ranks first, and for the same number those with the
    larger tensor size."""
    own = spec.layout
    if not spec.elastic.reshape:
        return [spec]
    pairs = [(t, p) for t in divisors(own.tensor) for p in divisors(own.pipeline)]
    largest_first = sorted(pairs, key=lambda pair: (-pair[0] * pair[1], -pair[0]))
    layouts = [_reshaped(own, *pair) for pair in largest_first[1:]]
    smaller = [spec.model_copy(update={"parallel": layout}) for layout in layouts]
    return [spec, *(shape for shape in smaller if not find_problems(shape))]


def _reshaped(layout: ParallelConfig, tensor: int, pipeline: int) -> ParallelConfig:
    """`layout` with other tensor- and pipeline-parallel sizes. The types of node of its stages do not apply to another
    number of stages."""
    changed: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline}
    if pipeline != layout.pipeline:
        changed |= {"stage_layers": None, "stage_accelerators": None}
    if pipeline == 1 < layout.pipeline:  # nothing is left to schedule
        changed |= {"schedule": ONE_FORWARD_ONE_BACKWARD.name, "virtual_stages": 1}
    if tensor == 1 < layout.tensor:
        changed |= {"sequence_parallel": None}
    return layout.model_copy(update=changed)


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
    shape = _reshaped(submitted, job.tensor or submitted.tensor, job.pipeline or submitted.pipeline)
    return shape.model_copy(update={"data": job.replicas or submitted.data})


def smallest(spec: JobSpec) -> JobSpec:
    """`spec` in the smallest layout that it permits."""
    return resized(shapes_of(spec)[-1], sizes_of(spec).start)


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
    return possible if possible in sizes else None


def fitting(shapes: Sequence[JobSpec], wanted: int, capacity: Capacity) -> JobSpec | None:
    """The first of `shapes` of which a permitted number of replicas fits, with as many of the `wanted` ones as fit;
    None if none fits."""
    sizes = sizes_of(shapes[0])
    for shape in shapes:
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
