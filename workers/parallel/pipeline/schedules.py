"""Pipeline schedules as data: for each pipeline rank, the list of actions it runs in one step. Pure Python.

The runtime executes the actions, `schedule_times` times them, `schedule_check` proves them complete, ordered and
free of deadlock. What the actions mean:

- forward, backward, backward_input and backward_weight compute. `backward` is both halves of the backward pass;
  the zero-bubble schedules run them apart, as nobody waits for the gradients of the weights.
- A send starts right behind the compute that made its message and never blocks.
- A receive only posts a buffer; the compute that needs the message waits for it. Messages from one rank to another,
  activations and gradients together, are one queue: receives are posted in the order of the sends.
- Where a micro-batch goes on in another chunk of the same rank there is no message.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from workers.parallel.pipeline.stages import place, virtual_stage

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


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a pipeline rank does for one micro-batch."""

    kind: Kind
    """What it does: compute, or pass activations (*_forward) or their gradients (*_backward) between ranks."""
    micro_batch: int
    """Micro-batch index within the replica's step, from 0."""
    chunk: int = 0
    """Which of this rank's model chunks computes, sends or receives."""


COMPUTE: frozenset[str] = frozenset({"forward", "backward", "backward_input", "backward_weight"})
"""Kinds of action that compute; the others pass messages."""


def schedule(kind: str, stages: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
    """Actions of every pipeline rank for one training step of schedule `kind`: one of `KINDS`.

    `stages` ranks hold `virtual_stages` chunks each. Raises ValueError for what `kind` cannot do.
    """
    _check_sizes(kind, stages, virtual_stages, micro_batches)
    if kind == "interleaved" and micro_batches % stages:
        raise ValueError(
            f"schedule interleaved needs a number of micro-batches that is a multiple of the {stages} pipeline stages, "
            f"not {micro_batches}"
        )
    order = _ORDERS[kind]
    passes = [list(order(rank, stages, virtual_stages, micro_batches)) for rank in range(stages)]
    return _with_messages(passes, kind, virtual_stages)


def forward_only(kind: str, stages: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
    """Actions of every pipeline rank for an evaluation, with the chunks placed as schedule `kind` places them."""
    _check_sizes(kind, stages, virtual_stages, micro_batches)
    order = _forwards_of_zb_v if kind == "zb-v" else _forwards
    passes = [list(order(rank, stages, virtual_stages, micro_batches)) for rank in range(stages)]
    return _with_messages(passes, kind, virtual_stages)


def most_in_flight(actions: list[Action]) -> int:
    """Most (micro-batch, chunk) pairs whose activations a rank holds at once: from the forward to the last backward.

    Between backward_input and backward_weight a pair counts in full, though only the inputs of the weights are left.
    """
    held = most = 0
    for action in actions:
        held += {"forward": 1, "backward": -1, "backward_weight": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


Place = tuple[int, int]
"""Pipeline rank and chunk of it."""


def neighbours(kind: str, stages: int, virtual_stages: int, rank: int, chunk: int) -> tuple[Place | None, Place | None]:
    """Places of the virtual stages before and behind the one on (`rank`, `chunk`); None at the model's ends."""
    index = virtual_stage(kind, stages, virtual_stages, rank, chunk)
    before = place(kind, stages, virtual_stages, index - 1) if index > 0 else None
    behind = place(kind, stages, virtual_stages, index + 1) if index < stages * virtual_stages - 1 else None
    return before, behind


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


def _gpipe(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965, section 2.3)."""
    for index in range(micro_batches):
        yield Action("forward", index)
    for index in range(micro_batches):
        yield Action("backward", index)


def _one_forward_one_backward(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """1F1B with a flush (arXiv:2104.04473, section 2.2.1): at most `stages - rank` micro-batches in flight."""
    forwards = [Action("forward", index) for index in range(micro_batches)]
    backwards = [Action("backward", index) for index in range(micro_batches)]
    return _alternate(forwards, backwards, stages - rank - 1)


def _interleaved(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """Interleaved 1F1B (arXiv:2104.04473, section 2.2.2): `stages` micro-batches through one chunk, then the next."""
    if virtual_stages == 1:
        return _one_forward_one_backward(rank, stages, virtual_stages, micro_batches)
    forwards = list(_forwards(rank, stages, virtual_stages, micro_batches))
    backwards = [Action("backward", action.micro_batch, virtual_stages - 1 - action.chunk) for action in forwards]
    return _alternate(forwards, backwards, 2 * (stages - rank - 1) + (virtual_stages - 1) * stages)


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


def _zb_h1(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """ZB-H1 (arXiv:2401.10241, section 2.1): 1F1B whose rank r does the weights' half r micro-batches later.

    So gradients reach the ranks before sooner, the activations of 1F1B's first rank are the most any rank holds, and
    the weights' halves put off fill what was 1F1B's bubble at the end.
    """
    for action in _one_forward_one_backward(rank, stages, virtual_stages, micro_batches):
        if action.kind == "forward":
            yield action
            continue
        yield Action("backward_input", action.micro_batch)
        if action.micro_batch >= rank:
            yield Action("backward_weight", action.micro_batch - rank)
    for index in range(max(0, micro_batches - rank), micro_batches):
        yield Action("backward_weight", index)


def _zb_v(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """ZB-V (arXiv:2401.10241, section 6): no bubble where forward and both halves of backward take equally long.

    Chunk 0 runs from the first rank to the last, chunk 1 back. A rank holds at most 2 x `stages` chunk activations.
    Made for the 2 x `stages` - 1 micro-batches that fill the pipeline or more; fewer leave out what is not there.
    """
    counts: Counter[tuple[Kind, int]] = Counter()
    for kind, chunk in _zb_v_passes(rank, stages, max(micro_batches, 2 * stages - 1)):
        index = counts[kind, chunk]
        counts[kind, chunk] += 1
        if index < micro_batches:
            yield Action(kind, index, chunk)


def _zb_v_passes(rank: int, stages: int, micro_batches: int) -> Iterator[tuple[Kind, int]]:
    """(kind, chunk) of every pass of a rank under ZB-V; each kind takes a chunk's micro-batches in order."""
    forward, backward, weight = _HALVES
    behind = stages - rank
    # Warm-up: forwards alone, until the first micro-batch comes back from the last rank, then until its gradient does.
    yield from [(forward, 0)] * (2 * behind - 1)
    yield from [(forward, 1), (forward, 0)] * rank
    yield from [(forward, 1), (backward, 1), (weight, 1)] * behind
    # Steady: every pass of both chunks in turn, as long as there are micro-batches to go forward.
    steady: list[tuple[Kind, int]] = [
        (forward, 0),
        (backward, 0),
        (weight, 0),
        (forward, 1),
        (backward, 1),
        (weight, 1),
    ]
    new = micro_batches - (2 * stages - 1 - rank)
    yield from steady * new
    yield from steady[1:] * (micro_batches - stages - new)
    # Cool-down: the weights' halves wait where that lets gradients leave earlier, and fill the end.
    yield from [(backward, 0), (backward, 1)] * rank
    yield from [(backward, 0), (weight, 0)] * behind
    yield from [(weight, 1)] * rank
    yield from [(weight, 0)] * rank


def _forwards(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """Forwards of every chunk: up to `stages` micro-batches through one chunk, then the same through the next."""
    for first in range(0, micro_batches, stages):
        for chunk in range(virtual_stages):
            for index in range(first, min(first + stages, micro_batches)):
                yield Action("forward", index, chunk)


def _forwards_of_zb_v(rank: int, stages: int, virtual_stages: int, micro_batches: int) -> Iterator[Action]:
    """Forwards of both chunks of ZB-V: chunk 0 until the first micro-batch is back on this rank, then in turn."""
    ahead = min(2 * (stages - rank) - 1, micro_batches)
    for index in range(micro_batches + ahead):
        if index >= ahead:
            yield Action("forward", index - ahead, 1)
        if index < micro_batches:
            yield Action("forward", index, 0)


def _with_messages(passes: list[list[Action]], kind: str, virtual_stages: int) -> list[list[Action]]:
    """The compute of every rank with its sends and receives.

    A receive is posted one compute ahead of the one that needs it, so that the transfer runs beside compute and few
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


_HALVES: tuple[Kind, Kind, Kind] = ("forward", "backward_input", "backward_weight")

_Order = Callable[[int, int, int, int], Iterator[Action]]
"""(rank, stages, virtual stages, micro-batches) -> the rank's compute in order."""

_ORDERS: dict[str, _Order] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}

_MESSAGES: dict[str, tuple[Kind, Kind, Kind]] = {
    "forward": ("send_forward", "receive_forward", "forward"),
    "backward": ("send_backward", "receive_backward", "backward"),
    "backward_input": ("send_backward", "receive_backward", "backward_input"),
}
"""By the compute that makes the message: its send, its receive, the compute that needs it."""

KINDS = tuple(_ORDERS)
"""Names of the schedules."""
