"""Adds sends and receives to the compute of a schedule's ranks. Pure Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from workers.parallel.pipeline.schedules.action import Action, Kind
from workers.parallel.pipeline.stages import neighbours

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
            before, behind = places[rank, action.chunk]
            onward = {"forward": behind, "backward": before, "backward_input": before}.get(action.kind)
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
