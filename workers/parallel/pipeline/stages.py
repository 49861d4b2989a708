"""Where the parts of the model live: virtual stages on pipeline ranks, layers in virtual stages. Pure Python.

A model is cut into as many virtual stages as there are pipeline ranks times model chunks per rank. Virtual stage 0
has the embedding, the last one the logits; micro-batches go forward through them in order.
"""

from __future__ import annotations

Place = tuple[int, int]
"""Pipeline rank and chunk of it."""


def place(kind: str, stages: int, virtual_stages: int, index: int) -> Place:
    """Pipeline rank and chunk of that rank which hold virtual stage `index` under schedule `kind`.

    Chunks go round robin over the ranks (arXiv:2104.04473, section 2.2.2), but under zb-v forth and back, so that
    rank 0 holds both ends of the model (arXiv:2401.10241, section 6).
    """
    _check_in_range("virtual stage", index, stages * virtual_stages)
    chunk, position = divmod(index, stages)
    if _turns_back(kind, virtual_stages, chunk):
        return stages - 1 - position, chunk
    return position, chunk


def virtual_stage(kind: str, stages: int, virtual_stages: int, rank: int, chunk: int) -> int:
    """Index of the virtual stage that is chunk `chunk` of pipeline rank `rank`: the inverse of `place`."""
    _check_in_range("rank", rank, stages)
    _check_in_range("chunk", chunk, virtual_stages)
    if _turns_back(kind, virtual_stages, chunk):
        return chunk * stages + stages - 1 - rank
    return chunk * stages + rank


def neighbours(kind: str, stages: int, virtual_stages: int, rank: int, chunk: int) -> tuple[Place | None, Place | None]:
    """Places of the virtual stages before and behind the one on (`rank`, `chunk`); None at the model's ends."""
    index = virtual_stage(kind, stages, virtual_stages, rank, chunk)
    before = place(kind, stages, virtual_stages, index - 1) if index > 0 else None
    behind = place(kind, stages, virtual_stages, index + 1) if index < stages * virtual_stages - 1 else None
    return before, behind


def stage_layers(layers: int, virtual_stages_total: int, index: int) -> range:
    """Indices of the layers in virtual stage `index` of `virtual_stages_total`.

    Where the layers do not divide evenly, the extra ones go to virtual stages 1, 2, ..., last but one, then 0: the
    last one has the logits already, which cost about as much as a layer, the first one the embedding.
    """
    _check_in_range("virtual stage", index, virtual_stages_total)
    if layers < virtual_stages_total:
        raise ValueError(f"{layers} layers do not fill {virtual_stages_total} virtual stages: each needs one or more")
    base, extra = divmod(layers, virtual_stages_total)
    takers = [*range(1, virtual_stages_total - 1), 0][:extra]
    first = base * index + sum(taker < index for taker in takers)
    return range(first, first + base + (index in takers))


def _turns_back(kind: str, virtual_stages: int, chunk: int) -> bool:
    """Whether `chunk` runs from the last rank to the first."""
    if kind != "zb-v":
        return False
    if virtual_stages != 2:
        raise ValueError(f"schedule zb-v has 2 virtual stages per rank, not {virtual_stages}")
    return chunk == 1


def _check_in_range(name: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{name} {value} is outside 0..{count - 1}")
