"""Sizes of schedules to draw from, and how much a schedule holds at once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.action_lists import evaluation_actions, training_actions
from manta.workers.schedules.schedule import Action

Size = tuple[str, int, int, int]
"""Schedule, pipeline stages, virtual stages, micro-batches."""


def virtual_stages_of(kind: str) -> range:
    fixed = SCHEDULES[kind].virtual_stages
    return range(1, 5) if fixed is None else range(fixed, fixed + 1)


@st.composite
def sizes(draw: st.DrawFn, kinds: Sequence[str] = tuple(SCHEDULES), stages: int = 16, micro_batches: int = 64) -> Size:
    kind = draw(st.sampled_from(kinds))
    p = draw(st.integers(1, stages))
    v = draw(st.sampled_from(virtual_stages_of(kind)))
    unit = p if SCHEDULES[kind].in_groups else 1
    return kind, p, v, unit * draw(st.integers(1, micro_batches // unit))


def lists_of(size: Size, training: bool) -> list[list[Action]]:
    return training_actions(*size) if training else evaluation_actions(*size)


def most_in_flight(actions: list[Action]) -> int:
    """Most (micro-batch, chunk) pairs whose activations a rank holds at once: from the forward to the last backward.

    Between backward_input and backward_weight a pair counts in full, though only the inputs of the weights are left.
    """
    held = most = 0
    for action in actions:
        held += {"forward": 1, "backward": -1, "backward_weight": -1}.get(action.kind, 0)
        most = max(most, held)
    return most
