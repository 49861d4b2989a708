"""With how many data-parallel replicas a job may run, and for how many there is room. Pure arithmetic."""

from __future__ import annotations

from service.placement import Capacity
from workers.config import JobSpec, ParallelConfig
from workers.errors import MantaError


class SizeOutOfBounds(MantaError):
    """A number of replicas that the job's spec does not allow."""

    def __init__(self, job_id: str, replicas: int, sizes: range):
        bounds = f"{sizes.start}..{sizes.stop - 1}"
        super().__init__(
            f"{job_id} cannot run with {replicas} replicas: its elastic.min_data..max_data is {bounds}"
            + (", so its size is fixed; submit it with wider bounds" if len(sizes) == 1 else "")
        )


def sizes_of(spec: JobSpec) -> range:
    """The numbers of replicas that `elastic` allows."""
    data = spec.layout.data
    return range(spec.elastic.min_data or data, (spec.elastic.max_data or data) + 1)


def resized(spec: JobSpec, replicas: int) -> JobSpec:
    """`spec` with another number of replicas; all else stays, the global batch included."""
    if replicas == spec.layout.data:
        return spec
    return spec.model_copy(update={"parallel": spec.layout.model_copy(update={"data": replicas})})


def room_for(layout: ParallelConfig, capacity: Capacity) -> int:
    """How many more whole replicas of `layout` would fit into what is free: a tensor-parallel group lies on one
    node."""
    groups = sum(free // layout.tensor for _, free in capacity.nodes.values())
    return groups // (layout.pipeline * layout.context)


def size_within(sizes: range, wanted: int, held: int, room: int) -> int | None:
    """The number of replicas to run with: as near to `wanted` as `held` ones and `room` for more allow. None when not
    even the smallest size fits."""
    possible = min(wanted, held + room)
    return possible if possible in sizes else None
