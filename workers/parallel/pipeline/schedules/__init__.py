"""Pipeline schedules as data: for each pipeline rank, the list of actions it runs in one step. Pure Python.

One module per schedule gives the order of a rank's computations, to which sends and receives are added here; `check`
proves the lists complete, ordered and free of deadlock; `simulate` times them. The runtime executes them and is
independent of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from manta.workers.parallel.pipeline.schedules import interleaved, zero_bubble_v
from manta.workers.parallel.pipeline.schedules.action import Action, Kind
from manta.workers.parallel.pipeline.schedules.gpipe import gpipe
from manta.workers.parallel.pipeline.schedules.one_forward_one_backward import one_forward_one_backward
from manta.workers.parallel.pipeline.schedules.zero_bubble_h1 import zero_bubble_h1
from manta.workers.parallel.pipeline.stages import neighbours

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


_MESSAGES: dict[str, tuple[Kind, Kind, Kind]] = {
    "forward": ("send_forward", "receive_forward", "forward"),
    "backward": ("send_backward", "receive_backward", "backward"),
    "backward_input": ("send_backward", "receive_backward", "backward_input"),
}
"""For each compute that produces a message: its send, its receive, and the compute that needs it."""


def with_messages(passes: list[list[Action]], kind: str, virtual_stages: int) -> list[list[Action]]:
    """The compute of every rank with its sends and receives.

    A receive is posted one compute ahead of the one that needs it, so that the transfer overlaps compute and few
    buffers wait; the receives that come before it in the queue from the same sender are posted with it.
    """
    stages = len(passes)
    places = {
        (rank, chunk): neighbours(kind, stages, virtual_stages, rank, chunk)
        for rank in range(stages)
        for chunk in range(virtual_stages)
    }
    sends: list[dict[Action, Action]] = [{} for _ in passes]
    sources: list[dict[Action, tuple[int, Action]]] = [{} for _ in passes]
    queues: dict[tuple[int, int], deque[Action]] = {}
    for rank, compute in enumerate(passes):
        for action in compute:
            before, following = places[rank, action.chunk]
            onward = {"forward": following, "backward": before, "backward_input": before}.get(action.kind)
            if onward is None or onward[0] == rank:
                continue
            to, chunk = onward
            send, receive, user = _MESSAGES[action.kind]
            sends[rank][action] = Action(send, action.micro_batch, action.chunk)
            message = Action(receive, action.micro_batch, chunk)
            queues.setdefault((rank, to), deque()).append(message)
            sources[to][Action(user, action.micro_batch, chunk)] = (rank, message)
    return [
        list(_of_one_rank(rank, compute, sends[rank], sources[rank], queues)) for rank, compute in enumerate(passes)
    ]


def _of_one_rank(
    rank: int,
    compute: list[Action],
    sends: dict[Action, Action],
    sources: dict[Action, tuple[int, Action]],
    queues: dict[tuple[int, int], deque[Action]],
) -> Iterator[Action]:
    """Actions of one rank: `sends` of its passes, `sources` (sender, receive) of its inputs, `queues` of receives."""
    posted: set[Action] = set()
    for index, action in enumerate(compute):
        for user in compute[index : index + 2]:
            if user not in sources:
                continue
            source, receive = sources[user]
            while receive not in posted:
                first = queues[source, rank].popleft()
                posted.add(first)
                yield first
        yield action
        if action in sends:
            yield sends[action]
