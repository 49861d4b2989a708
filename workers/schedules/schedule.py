"""What the engine and the planner ask of a schedule. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from manta.workers.schedules.action import Action, forwards_by_groups

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
