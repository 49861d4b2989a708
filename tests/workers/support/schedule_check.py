"""Proves that a pipeline schedule does all the work, in an order that cannot deadlock. Pure Python.

It knows what the actions mean (see `schedules`) and where the chunks live (see `stages`), not how schedules are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from manta.workers.schedules.schedule import Action, Kind
from manta.workers.schedules.stages import chunk_location, virtual_stage


class ScheduleError(ValueError):
    """What is wrong with a schedule, and where."""


def check(
    lists: list[list[Action]], kind: str, stages: int, virtual_stages: int, micro_batches: int, *, training: bool = True
) -> None:
    """Raise ScheduleError unless `lists`, the actions of every rank, are one valid step.

    A step is valid if every rank takes every micro-batch through each of its chunks forward once and, with `training`,
    backward once, as a whole or in halves; sends what its neighbours need and posts receives for what they send; uses
    nothing before it is there; receives messages in the order in which they are sent; and if all ranks finish, given
    that sends never block and computes wait for their messages.
    """
    if len(lists) != stages:
        raise ScheduleError(f"there are actions for {len(lists)} ranks, not {stages}")
    pipeline = _Pipeline(kind, stages, virtual_stages, micro_batches, training)
    for rank, actions in enumerate(lists):
        pipeline.check_complete(rank, actions)
        pipeline.check_order(rank, actions)
    pipeline.check_queues(lists)
    pipeline.check_progress(lists)


class _Pipeline:
    """One schedule's sizes and the neighbours of every chunk. Its checks raise ScheduleError."""

    def __init__(self, kind: str, stages: int, virtual_stages: int, micro_batches: int, training: bool):
        self.stages, self.virtual_stages, self.micro_batches = stages, virtual_stages, micro_batches
        self.training = training
        total = stages * virtual_stages
        places = [chunk_location(kind, stages, virtual_stages, index) for index in range(total)]
        self.before: dict[tuple[int, int], tuple[int, int] | None] = {}
        self.following: dict[tuple[int, int], tuple[int, int] | None] = {}
        for rank in range(stages):
            for chunk in range(virtual_stages):
                index = virtual_stage(kind, stages, virtual_stages, rank, chunk)
                self.before[rank, chunk] = places[index - 1] if index > 0 else None
                self.following[rank, chunk] = places[index + 1] if index < total - 1 else None

    def check_complete(self, rank: int, actions: list[Action]) -> None:
        """Every required action is there exactly once, and there are no others."""
        counts = Counter(actions)
        for action, count in counts.items():
            if count > 1:
                raise ScheduleError(f"rank {rank} does {_name(action)} {count} times")
        for chunk in range(self.virtual_stages):
            for micro_batch in range(self.micro_batches):
                for action in self._wanted(rank, chunk, micro_batch, counts):
                    if not counts.pop(action, 0):
                        raise ScheduleError(f"rank {rank} never does {_name(action)}")
        for action in counts:
            raise ScheduleError(f"rank {rank} has no reason for {_name(action)}")

    def _wanted(self, rank: int, chunk: int, micro_batch: int, counts: Counter[Action]) -> Iterator[Action]:
        """Actions that `rank` must do for one micro-batch on one chunk."""
        before = self._is_remote(rank, self.before[rank, chunk])
        following = self._is_remote(rank, self.following[rank, chunk])
        halves = Action("backward_input", micro_batch, chunk) in counts
        kinds: dict[Kind, bool] = {
            "forward": True,
            "receive_forward": before,
            "send_forward": following,
            "backward": self.training and not halves,
            "backward_input": self.training and halves,
            "backward_weight": self.training and halves,
            "receive_backward": self.training and following,
            "send_backward": self.training and before,
        }
        for kind, owed in kinds.items():
            if owed:
                yield Action(kind, micro_batch, chunk)

    @staticmethod
    def _is_remote(rank: int, other: tuple[int, int] | None) -> bool:
        return other is not None and other[0] != rank

    def check_order(self, rank: int, actions: list[Action]) -> None:
        """On its own rank every action comes after those that it depends on."""
        at = {action: index for index, action in enumerate(actions)}
        for index, action in enumerate(actions):
            for kind in _NEEDS[action.kind]:
                needed = Action(kind, action.micro_batch, action.chunk)
                if at.get(needed, -1) > index:
                    raise ScheduleError(f"rank {rank}, action {index}: {_name(action)} comes before {_name(needed)}")

    def check_queues(self, lists: list[list[Action]]) -> None:
        """Between any two ranks, receives are posted in the order of the sends."""
        sent: dict[tuple[int, int], list[Action]] = {}
        posted: dict[tuple[int, int], list[Action]] = {}
        for rank, actions in enumerate(lists):
            for action in actions:
                if action.kind in ("send_forward", "send_backward"):
                    to = (self.following if action.kind == "send_forward" else self.before)[rank, action.chunk]
                    assert to is not None
                    kind: Kind = "receive_forward" if action.kind == "send_forward" else "receive_backward"
                    sent.setdefault((rank, to[0]), []).append(Action(kind, action.micro_batch, to[1]))
                elif action.kind in ("receive_forward", "receive_backward"):
                    source = (self.before if action.kind == "receive_forward" else self.following)[rank, action.chunk]
                    assert source is not None
                    posted.setdefault((source[0], rank), []).append(action)
        for (source_rank, rank), receives in posted.items():
            for index, (got, want) in enumerate(zip(receives, sent[source_rank, rank], strict=True)):
                if got != want:
                    raise ScheduleError(
                        f"rank {rank} posts {_name(got)} as number {index} from rank {source_rank}, "
                        f"whose message number {index} is for {_name(want)}"
                    )

    def check_progress(self, lists: list[list[Action]]) -> None:
        """All ranks finish, given that sends never block and computes wait for their input."""
        reached = [0] * self.stages
        finished: set[tuple[str, tuple[int, int], int]] = set()
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(lists):
                start = reached[rank]
                while reached[rank] < len(actions) and self._act(rank, actions[reached[rank]], finished):
                    reached[rank] += 1
                moved |= reached[rank] > start
        stuck = [
            f"rank {rank} at action {index}, {_name(lists[rank][index])}"
            for rank, index in enumerate(reached)
            if index < len(lists[rank])
        ]
        if stuck:
            raise ScheduleError(f"deadlock: {'; '.join(stuck)}")

    def _act(self, rank: int, action: Action, finished: set[tuple[str, tuple[int, int], int]]) -> bool:
        """Do `action`; False if its input is missing. `finished`: direction, destination, micro-batch."""
        here = (rank, action.chunk)
        if action.kind in ("forward", "backward", "backward_input"):
            way = "forward" if action.kind == "forward" else "backward"
            source, to = self.before[here], self.following[here]
            if way == "backward":
                source, to = to, source
            if source is not None and (way, here, action.micro_batch) not in finished:
                return False
            if to is not None and to[0] == rank:
                finished.add((way, to, action.micro_batch))
        elif action.kind in ("send_forward", "send_backward"):
            way = action.kind.removeprefix("send_")
            to = (self.following if way == "forward" else self.before)[here]
            assert to is not None
            finished.add((way, to, action.micro_batch))
        return True


_NEEDS: dict[Kind, tuple[Kind, ...]] = {
    "forward": ("receive_forward",),
    "backward": ("forward", "receive_backward"),
    "backward_input": ("forward", "receive_backward"),
    "backward_weight": ("backward_input",),
    "send_forward": ("forward",),
    "send_backward": ("backward", "backward_input"),
    "receive_forward": (),
    "receive_backward": (),
}
"""For each kind of action, the kinds that come before it for the same micro-batch and chunk, if the rank has them."""


def _name(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.micro_batch}, chunk {action.chunk}"
