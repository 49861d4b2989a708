"""Where the parts of the model are: virtual stages on pipeline ranks, layers in virtual stages. Pure Python.

A model is divided into as many virtual stages as there are pipeline ranks times chunks per rank. Virtual stage 0 has
the embedding, the last one the logits; micro-batches go through them in order. `parallel.stage_layers` says how many
layers each has; otherwise layers are shared out evenly. All code gets the layers of a stage from `layers_of`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from manta.workers.schedules import SCHEDULES

if TYPE_CHECKING:
    from manta.workers.config import ParallelConfig

ChunkLocation = tuple[int, int]
"""Pipeline rank, and chunk on it."""


def chunk_location(kind: str, stages: int, virtual_stages: int, index: int) -> ChunkLocation:
    """The pipeline rank and its chunk that hold virtual stage `index` under schedule `kind`.

    Chunks go round robin over the ranks (arXiv:2104.04473, section 2.2.2), or forward and then back, so that rank 0
    holds both ends of the model (arXiv:2401.10241, section 6).
    """
    _check_in_range("virtual stage", index, stages * virtual_stages)
    chunk, position = divmod(index, stages)
    if _is_reversed(kind, virtual_stages, chunk):
        return stages - 1 - position, chunk
    return position, chunk


def virtual_stage(kind: str, stages: int, virtual_stages: int, rank: int, chunk: int) -> int:
    """Index of the virtual stage that is chunk `chunk` of pipeline rank `rank`: the inverse of `chunk_location`."""
    _check_in_range("rank", rank, stages)
    _check_in_range("chunk", chunk, virtual_stages)
    if _is_reversed(kind, virtual_stages, chunk):
        return chunk * stages + stages - 1 - rank
    return chunk * stages + rank


@lru_cache(maxsize=4096)
def stages_of_rank(kind: str, stages: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """The virtual stages that are the chunks of pipeline rank `rank`."""
    return tuple(virtual_stage(kind, stages, virtual_stages, rank, chunk) for chunk in range(virtual_stages))


def end_ranks(layout: ParallelConfig) -> list[int]:
    """The pipeline ranks that hold the embedding or the logits; one if it holds both."""
    ends = 0, layout.pipeline * layout.virtual_stages - 1
    shape = layout.schedule, layout.pipeline, layout.virtual_stages
    return sorted({chunk_location(*shape, index)[0] for index in ends})


def neighbours(
    kind: str, stages: int, virtual_stages: int, rank: int, chunk: int
) -> tuple[ChunkLocation | None, ChunkLocation | None]:
    """Places of the virtual stages before and after the one at (`rank`, `chunk`); None at the model's ends."""
    index = virtual_stage(kind, stages, virtual_stages, rank, chunk)
    preceding = chunk_location(kind, stages, virtual_stages, index - 1) if index > 0 else None
    following = chunk_location(kind, stages, virtual_stages, index + 1) if index < stages * virtual_stages - 1 else None
    return preceding, following


def layers_of(layers: int, layout: ParallelConfig, index: int) -> range:
    """Indices of the layers in virtual stage `index` of a model of `layers` under `layout`. Raises ValueError if there
    is no such stage, or `parallel.stage_layers` does not have one number for each (the rules of the spec prevent
    that)."""
    count = layout.pipeline * layout.virtual_stages
    _check_in_range("virtual stage", index, count)
    ends = _ends(layout.stage_layers) if layout.stage_layers else _even_ends(layers, count)
    if (len(ends), ends[-1]) != (count, layers):
        counts = list(layer_counts(layers, layout))
        raise ValueError(f"stage_layers {counts} are not {layers} layers in {count} virtual stages")
    return range(ends[index - 1] if index else 0, ends[index])


def layer_counts(layers: int, layout: ParallelConfig) -> tuple[int, ...]:
    """How many layers each virtual stage has, in the model's order."""
    return layout.stage_layers or even_counts(layers, layout.pipeline * layout.virtual_stages)


@lru_cache(maxsize=4096)
def even_counts(layers: int, virtual_stages: int) -> tuple[int, ...]:
    """Number of layers of each virtual stage if they are shared out evenly.

    If layers do not divide evenly, the extra ones go to virtual stages 1, 2, ..., last but one, then 0: the last one
    also has the logits, which cost about as much as a layer, and the first one the embedding. Raises ValueError if
    there are fewer layers than virtual stages.
    """
    if layers < virtual_stages:
        raise ValueError(f"{layers} layers do not fill {virtual_stages} virtual stages: each needs one or more")
    base, extra = divmod(layers, virtual_stages)
    takers = {*[*range(1, virtual_stages - 1), 0][:extra]}
    return tuple(base + (index in takers) for index in range(virtual_stages))


@lru_cache(maxsize=4096)
def _even_ends(layers: int, virtual_stages: int) -> tuple[int, ...]:
    return _ends(even_counts(layers, virtual_stages))


@lru_cache(maxsize=4096)
def _ends(counts: tuple[int, ...]) -> tuple[int, ...]:
    """For each virtual stage, one past its last layer."""
    return tuple(accumulate(counts))


def _is_reversed(kind: str, virtual_stages: int, chunk: int) -> bool:
    """Whether `chunk` runs from the last rank to the first."""
    schedule = SCHEDULES[kind]
    if not schedule.turns_back:
        return False
    if virtual_stages != schedule.virtual_stages:
        raise ValueError(f"schedule {kind} has chunks per rank: {schedule.virtual_stages}, not {virtual_stages}")
    return chunk % 2 == 1


def _check_in_range(name: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{name} {value} is outside 0..{count - 1}")
