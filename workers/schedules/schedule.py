"""Actions of a schedule, and what the engine and the planner ask of a schedule. Pure Python.

- forward, backward, backward_input and backward_weight compute. `backward` is both halves of the backward pass;
  the zero-bubble schedules run them apart, as nothing waits for the gradients of the weights.
- A send starts right behind the compute that made its message and never blocks.
- A receive only posts a buffer; the compute that needs the message waits for it. Messages from one rank to another,
  activations and gradients together, are one queue: receives are posted in the order of the sends.
- Where a micro-batch continues in another chunk of the same rank there is no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "receive_forward",
    "send_backward",
    "receive_backward",
]


class Action(NamedTuple):
    """One thing that a rank does for one micro-batch: a tuple, because the planner's searches create millions."""

    kind: Kind
    """What it does: compute, or pass activations (*_forward) or their gradients (*_backward) between ranks."""
    micro_batch: int
    """Micro-batch index within the replica's step, from 0."""
    chunk: int = 0
    """Which of this rank's model chunks computes, sends or receives."""


@lru_cache(maxsize=256)
def of_all(kind: Kind, micro_batches: int, chunk: int = 0) -> tuple[Action, ...]:
    """One action of this kind and chunk for each micro-batch in turn; shared by all ranks of a schedule."""
    return tuple(Action(kind, index, chunk) for index in range(micro_batches))


def forwards_by_groups(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """Forwards of every chunk: up to `stages` micro-batches through one chunk, then the same through the next."""
    of_chunks = [of_all("forward", micro_batches, chunk) for chunk in range(virtual_stages)]
    for first in range(0, micro_batches, stages):
        for of_chunk in of_chunks:
            yield from of_chunk[first : first + stages]


COMPUTE: frozenset[str] = frozenset({"forward", "backward", "backward_input", "backward_weight"})
"""Kinds of actions that compute; the others pass messages."""


Order = Callable[[int, int, int, int], Iterable[Action]]
"""(rank, stages, virtual stages, micro-batches) -> the passes of the rank in order, without messages."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A pipeline schedule: its order of passes, and what follows from it for placement, memory and rules."""

    name: str
    """Value of `parallel.schedule`."""
    passes: Order
    """Order of a training step."""
    forwards: Order = forwards_by_groups
    """Order of an evaluation."""
    virtual_stages: int | None = 1
    """Number of model chunks per rank; None: any number."""
    turns_back: bool = False
    """Whether every second chunk runs from the last rank to the first, so that with two chunks the first rank has both
    ends of the model; otherwise chunks go round robin over the ranks."""
    splits_backward: bool = False
    """Whether gradients of weights are computed in a pass of their own."""
    in_groups: bool = False
    """Whether micro-batches come in groups of one for each stage."""
    all_in_flight: bool = False
    """Whether a rank keeps the activations of all micro-batches of a step at once. The planner does not propose such a
    schedule: 1F1B takes as long."""
    runs: bool = True
    """Whether the engine runs it; otherwise it exists for comparing its time with the others."""
