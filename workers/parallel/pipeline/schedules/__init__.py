"""Pipeline schedules as data: for each pipeline rank, the list of actions it runs in one step. Pure Python.

One module per schedule gives the order of a rank's computations; `messages` adds the sends and receives; `check` proves
the lists complete, ordered and free of deadlock; `simulate` times them. The runtime executes them and is independent of
the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from workers.parallel.pipeline.schedules import interleaved, zero_bubble_v
from workers.parallel.pipeline.schedules.action import Action
from workers.parallel.pipeline.schedules.gpipe import gpipe
from workers.parallel.pipeline.schedules.messages import with_messages
from workers.parallel.pipeline.schedules.one_forward_one_backward import one_forward_one_backward
from workers.parallel.pipeline.schedules.zero_bubble_h1 import zero_bubble_h1

_Order = Callable[[int, int, int, int], Iterator[Action]]
"""(rank, stages, virtual stages, micro-batches) -> the rank's compute in order."""

_ORDERS: dict[str, _Order] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved.interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v.zero_bubble_v,
}

KINDS = tuple(_ORDERS)
"""Names of the schedules."""

SPLIT_BACKWARD = frozenset({"zb-h1", "zb-v"})
"""Schedules under which the gradients of the weights are computed in a pass of their own."""


def schedule(kind: str, stages: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
    """Actions of every pipeline rank for one training step of schedule `kind`: one of `KINDS`.

    `stages` ranks hold `virtual_stages` chunks each. Raises ValueError for what `kind` cannot do.
    """
    _check_sizes(kind, stages, virtual_stages, micro_batches)
    passes = [compute_of_rank(kind, rank, stages, virtual_stages, micro_batches) for rank in range(stages)]
    return with_messages(passes, kind, virtual_stages)


def compute_of_rank(kind: str, rank: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    """What one pipeline rank computes, in order, without its messages. Raises ValueError for what `kind` cannot do."""
    _check_sizes(kind, stages, virtual_stages, micro_batches)
    if kind == "interleaved" and micro_batches % stages:
        raise ValueError(
            f"schedule interleaved needs a number of micro-batches that is a multiple of the {stages} pipeline stages, "
            f"not {micro_batches}"
        )
    return list(_ORDERS[kind](rank, stages, virtual_stages, micro_batches))


def forward_only(kind: str, stages: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
    """Actions of every pipeline rank for an evaluation, with the chunks placed as schedule `kind` places them."""
    _check_sizes(kind, stages, virtual_stages, micro_batches)
    order = zero_bubble_v.forwards if kind == "zb-v" else interleaved.forwards
    passes = [list(order(rank, stages, virtual_stages, micro_batches)) for rank in range(stages)]
    return with_messages(passes, kind, virtual_stages)


def _check_sizes(kind: str, stages: int, virtual_stages: int, micro_batches: int) -> None:
    if kind not in _ORDERS:
        raise ValueError(f"unknown schedule {kind!r}; known: {', '.join(_ORDERS)}")
    for name, value in (("stages", stages), ("virtual_stages", virtual_stages), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if kind in ("gpipe", "1f1b", "zb-h1") and virtual_stages != 1:
        raise ValueError(f"schedule {kind} has 1 virtual stage per rank, not {virtual_stages}; interleaved has more")
    if kind == "zb-v" and virtual_stages != 2:
        raise ValueError(f"schedule zb-v has 2 virtual stages per rank, not {virtual_stages}")
