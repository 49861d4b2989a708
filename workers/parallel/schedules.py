"""Pipeline schedules as data: for each stage, the list of actions it runs in one step. Pure Python.

The runtime executes the actions, a simulator can time them, and the tests prove them complete, ordered and free
of deadlock. A send never blocks; a receive waits for its message; messages between two stages in one direction
arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward"]


@dataclass(frozen=True)
class Action:
    """One thing a stage does for one micro-batch."""

    kind: Kind
    """forward / backward: compute; *_forward: activations to or from the neighbour; *_backward: their gradients."""
    micro_batch: int
    """Micro-batch index within the replica's step, from 0."""


def schedule(kind: str, stages: int, micro_batches: int) -> list[list[Action]]:
    """Actions of every stage for one step of `kind` (gpipe, 1f1b or forward_only). Raises ValueError otherwise."""
    makers = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "forward_only": _forward_only}
    if kind not in makers:
        raise ValueError(f"unknown schedule {kind!r}; known: {', '.join(makers)}")
    return [list(makers[kind](stage, stages, micro_batches)) for stage in range(stages)]


def most_in_flight(actions: list[Action]) -> int:
    """Most micro-batches whose activations a stage holds at once."""
    held = most = 0
    for action in actions:
        held += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def _gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965, section 2.3)."""
    for index in range(micro_batches):
        yield from _forward(index, stage, stages)
    for index in range(micro_batches):
        yield from _backward(index, stage, stages)


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """1F1B with a flush (arXiv:2104.04473, section 2.2.1): at most `stages - stage` micro-batches in flight."""
    warm_up = min(stages - stage - 1, micro_batches)
    for index in range(warm_up):
        yield from _forward(index, stage, stages)
    for index in range(warm_up, micro_batches):
        yield from _forward(index, stage, stages)
        yield from _backward(index - warm_up, stage, stages)
    for index in range(micro_batches - warm_up, micro_batches):
        yield from _backward(index, stage, stages)


def _forward_only(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Evaluation: forwards alone."""
    for index in range(micro_batches):
        yield from _forward(index, stage, stages)


def _forward(index: int, stage: int, stages: int) -> Iterator[Action]:
    if stage > 0:
        yield Action("receive_forward", index)
    yield Action("forward", index)
    if stage < stages - 1:
        yield Action("send_forward", index)


def _backward(index: int, stage: int, stages: int) -> Iterator[Action]:
    if stage < stages - 1:
        yield Action("receive_backward", index)
    yield Action("backward", index)
    if stage > 0:
        yield Action("send_backward", index)
