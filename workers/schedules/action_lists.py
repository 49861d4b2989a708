"""For each pipeline rank, the list of actions that it runs in one step: the passes of a schedule, with their messages.
Pure Python.

`tests/workers/support/schedule_check.py` proves the lists complete, ordered and free of deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache

from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.schedule import Action, Kind
from manta.workers.schedules.stages import neighbours


def training_actions(kind: str, stages: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
    """Actions of every pipeline rank for one training step of schedule `kind`, a name in `SCHEDULES`.

    `stages` ranks hold `virtual_stages` chunks each. Raises ValueError for what the schedule cannot do.
    """
    _check_sizes(kind, stages, virtual_stages, micro_batches)
    passes = [passes_of_rank(kind, rank, stages, virtual_stages, micro_batches) for rank in range(stages)]
    return _with_messages(passes, kind, virtual_stages)


def evaluation_actions(kind: str, stages: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
    """Actions of every pipeline rank for an evaluation, with the chunks placed as schedule `kind` places them."""
    _check_sizes(kind, stages, virtual_stages, micro_batches)
    order = SCHEDULES[kind].forwards
    passes = [tuple(order(rank, stages, virtual_stages, micro_batches)) for rank in range(stages)]
    return _with_messages(passes, kind, virtual_stages)


@lru_cache(maxsize=256)
def passes_of_rank(kind: str, rank: int, stages: int, virtual_stages: int, micro_batches: int) -> tuple[Action, ...]:
    """What one pipeline rank computes in a training step, in order, without its messages. Raises ValueError for what
    schedule `kind` cannot do."""
    _check_sizes(kind, stages, virtual_stages, micro_batches)
    if SCHEDULES[kind].in_groups and micro_batches % stages:
        raise ValueError(
            f"schedule {kind} needs a number of micro-batches that is a multiple of the {stages} pipeline stages, "
            f"not {micro_batches}"
        )
    return tuple(SCHEDULES[kind].passes(rank, stages, virtual_stages, micro_batches))


def _check_sizes(kind: str, stages: int, virtual_stages: int, micro_batches: int) -> None:
    if kind not in SCHEDULES:
        raise ValueError(f"unknown schedule {kind!r}; known: {', '.join(SCHEDULES)}")
    for name, value in (("stages", stages), ("virtual_stages", virtual_stages), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    expected = SCHEDULES[kind].virtual_stages
    if expected not in (None, virtual_stages):
        raise ValueError(f"schedule {kind} has chunks per rank: {expected}, not {virtual_stages}")


_MESSAGES: dict[str, tuple[Kind, Kind, Kind]] = {
    "forward": ("send_forward", "receive_forward", "forward"),
    "backward": ("send_backward", "receive_backward", "backward"),
    "backward_input": ("send_backward", "receive_backward", "backward_input"),
}
"""For each compute that produces a message: its send, its receive, and the compute that needs it."""


def _with_messages(passes: Sequence[Sequence[Action]], kind: str, virtual_stages: int) -> list[list[Action]]:
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
    compute: Sequence[Action],
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
