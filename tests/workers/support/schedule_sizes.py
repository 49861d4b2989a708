"""Sizes of schedules to draw from, and how much a schedule holds at once."""

from __future__ import annotations

from hypothesis import strategies as st

from manta.workers.parallel.pipeline.schedules import KINDS, forward_only, schedule
from manta.workers.parallel.pipeline.schedules.action import Action

Size = tuple[str, int, int, int]
"""Schedule, pipeline stages, virtual stages, micro-batches."""


def virtual_stages_of(kind: str) -> range:
    return {"interleaved": range(1, 5), "zb-v": range(2, 3)}.get(kind, range(1, 2))


@st.composite
def sizes(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, stages: int = 16, micro_batches: int = 64) -> Size:
    kind = draw(st.sampled_from(kinds))
    p = draw(st.integers(1, stages))
    v = draw(st.sampled_from(virtual_stages_of(kind)))
    m = p * draw(st.integers(1, micro_batches // p)) if kind == "interleaved" else draw(st.integers(1, micro_batches))
    return kind, p, v, m


def lists_of(size: Size, training: bool) -> list[list[Action]]:
    return schedule(*size) if training else forward_only(*size)


def most_in_flight(actions: list[Action]) -> int:
    """Most (micro-batch, chunk) pairs whose activations a rank holds at once: from the forward to the last backward.

    Between backward_input and backward_weight a pair counts in full, though only the inputs of the weights are left.
    """
    held = most = 0
    for action in actions:
        held += {"forward": 1, "backward": -1, "backward_weight": -1}.get(action.kind, 0)
        most = max(most, held)
    return most
