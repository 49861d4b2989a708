"""The checker refuses every spoiled schedule."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_check import ScheduleError, check
from schedule_sizes import Size, sizes

from manta.workers.schedules.action_lists import evaluation_actions, training_actions
from manta.workers.schedules.schedule import Action
from manta.workers.schedules.stages import neighbours

SMALL: list[Size] = [
    ("gpipe", 2, 1, 2),
    ("1f1b", 3, 1, 4),
    ("interleaved", 2, 2, 4),
    ("zb-h1", 3, 1, 4),
    ("zb-v", 2, 2, 4),
]
by_size = pytest.mark.parametrize("size", SMALL)


def mutants(size: Size):
    """(rank, index, action, a copy of the schedule to spoil) for every action."""
    for rank, actions in enumerate(training_actions(*size)):
        for index, action in enumerate(actions):
            yield rank, index, action, training_actions(*size)


@by_size
def test_schedule_check_notices_a_missing_action(size):
    for rank, index, action, lists in mutants(size):
        del lists[rank][index]
        with pytest.raises(ScheduleError, match=rf"rank {rank} (never does|has no reason for) \w+ of micro-batch"):
            check(lists, *size)
        if action.kind != "backward_input":  # without it, the checker wants the whole backward
            with pytest.raises(ScheduleError, match=rf"never does {action.kind} of micro-batch {action.micro_batch}, "):
                check(lists, *size)


@by_size
def test_schedule_check_notices_a_repeated_or_extra_action(size):
    for rank, index, action, lists in mutants(size):
        lists[rank].insert(index, action)
        with pytest.raises(ScheduleError, match=rf"rank {rank} does {action.kind} .* 2 times"):
            check(lists, *size)
        lists[rank][index] = Action(action.kind, size[3], action.chunk)
        with pytest.raises(
            ScheduleError, match=rf"rank {rank} has no reason for {action.kind} of micro-batch {size[3]}"
        ):
            check(lists, *size)


@by_size
def test_schedule_check_notices_compute_before_receive_and_send_before_compute(size):
    for rank, _, action, lists in mutants(size):
        lists[rank].remove(action)
        if action.kind.startswith("send"):
            lists[rank].insert(0, action)
        elif action.kind.startswith("receive"):
            lists[rank].append(action)
        else:
            continue
        with pytest.raises(ScheduleError, match=rf"rank {rank}, action \d+: .* comes before "):
            check(lists, *size)


@pytest.mark.parametrize("side", ["send", "receive"])
def test_schedule_check_notices_messages_received_in_another_order(side):
    size = ("gpipe", 2, 1, 3)
    lists = training_actions(*size)
    actions = lists[0] if side == "send" else lists[1]
    first, second = Action(f"{side}_forward", 0), Action(f"{side}_forward", 1)
    actions.remove(first)
    actions.remove(second)
    at = actions.index(Action("forward", 1)) + 1 if side == "send" else 0
    actions[at:at] = [second, first]
    with pytest.raises(
        ScheduleError, match=r"rank 1 posts receive_forward of micro-batch ., chunk 0 as number 0 from rank 0"
    ):
        check(lists, *size)


def test_activations_and_gradients_share_a_queue():
    """With two ranks and two chunks both go from rank 1 to rank 0."""
    size = ("interleaved", 2, 2, 4)
    lists = training_actions(*size)
    received = [action for action in lists[0] if action.kind.startswith("receive")]
    assert {action.kind for action in received} == {"receive_forward", "receive_backward"}
    pair = next(index for index, action in enumerate(received[:-1]) if action.kind != received[index + 1].kind)
    first, second = received[pair], received[pair + 1]
    lists[0].remove(second)
    lists[0].insert(lists[0].index(first), second)
    with pytest.raises(ScheduleError, match=f"rank 0 posts {second.kind} .* as number {pair} from rank 1"):
        check(lists, *size)


def test_schedule_check_notices_a_deadlock():
    """Rank 0 wants a gradient before it sends micro-batch 1, rank 1 micro-batch 1 before it sends the gradient."""
    first = ["forward", "send_forward", "receive_backward", "backward"]
    lists = [
        [Action(kind, index) for index in range(2) for kind in first],
        [Action(kind, index) for kind in ("receive_forward", "forward") for index in range(2)]
        + [Action(kind, index) for index in range(2) for kind in ("backward", "send_backward")],
    ]
    with pytest.raises(
        ScheduleError, match=r"deadlock: rank 0 at action 3, backward .* 0; rank 1 at action 3, forward"
    ):
        check(lists, "1f1b", 2, 1, 2)


def test_schedule_check_notices_a_wrong_number_of_ranks():
    with pytest.raises(ScheduleError, match="there are actions for 2 ranks, not 3"):
        check(training_actions("1f1b", 2, 1, 2), "1f1b", 3, 1, 2)


def test_schedule_check_tells_evaluation_from_training():
    with pytest.raises(ScheduleError, match="rank 0 never does backward of micro-batch 0, chunk 0"):
        check(evaluation_actions("1f1b", 2, 1, 2), "1f1b", 2, 1, 2)
    with pytest.raises(ScheduleError, match="rank 0 has no reason for"):
        check(training_actions("1f1b", 2, 1, 2), "1f1b", 2, 1, 2, training=False)


@settings(deadline=None)
@given(sizes(stages=4, micro_batches=8), st.data())
def test_schedule_check_accepts_only_schedules_that_run_to_their_end(size, data):
    """Two actions of a rank change places: the checker refuses it, or ranks with queues between them finish."""
    lists = training_actions(*size)
    actions = data.draw(st.sampled_from(lists))
    if len(actions) < 2:
        return
    first, second = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    actions[first], actions[second] = actions[second], actions[first]
    try:
        check(lists, *size)
    except ScheduleError:
        return
    assert finishes(lists, size)


def finishes(lists: list[list[Action]], size: Size) -> bool:
    """Whether every rank gets to its end: sends append to a queue, the next message is taken by the next receive
    posted, and a pass waits for its message."""
    kind, stages, virtual_stages, _ = size
    queues = {(source, to): deque[tuple[str, int]]() for source in range(stages) for to in range(stages)}
    posted: dict[tuple[int, int], deque[Action]] = {ends: deque() for ends in queues}
    todo, moved = [deque(actions) for actions in lists], True
    while moved:
        moved = False
        for rank, actions in enumerate(todo):
            while actions:
                action = actions[0]
                way = action.kind.removeprefix("send_").removeprefix("receive_")
                before, following = neighbours(kind, stages, virtual_stages, rank, action.chunk)
                source, to = (before, following) if way == "forward" else (following, before)
                if action.kind.startswith("send_"):
                    assert to is not None
                    queues[rank, to[0]].append((way, action.micro_batch))
                elif action.kind.startswith("receive_"):
                    assert source is not None
                    posted[source[0], rank].append(action)
                elif action.kind != "backward_weight" and source is not None and source[0] != rank:
                    ends = source[0], rank
                    wanted = Action("receive_forward" if way == "forward" else "receive_backward", *action[1:])
                    while wanted in posted[ends] and queues[ends]:
                        received = posted[ends].popleft()
                        assert queues[ends].popleft() == (received.kind.removeprefix("receive_"), received.micro_batch)
                    if wanted in posted[ends]:
                        break
                actions.popleft()
                moved = True
    return not any(todo)
