"""Schedules do every piece of work once, run to their end and hold no more than they may; the checker proves it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.parallel.pipeline.schedule_check import ScheduleError, check
from workers.parallel.pipeline.schedule_times import PassTimes, simulate
from workers.parallel.pipeline.schedules import (
    COMPUTE,
    KINDS,
    Action,
    forward_only,
    most_in_flight,
    neighbours,
    schedule,
)

LETTERS = {
    "forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W", "send_forward": ">",
    "receive_forward": "r", "send_backward": "<", "receive_backward": "g",
}  # fmt: skip

Size = tuple[str, int, int, int]
"""Schedule, pipeline stages, virtual stages, micro-batches."""


def written(actions: list[Action], chunks: bool = False) -> str:
    """Actions as letters with micro-batch and, behind a letter a or b, chunk."""
    return " ".join(
        LETTERS[action.kind] + str(action.micro_batch) + ("ab"[action.chunk] if chunks else "") for action in actions
    )


def virtual_stages_of(kind: str) -> range:
    return {"interleaved": range(1, 5), "zb-v": range(2, 3)}.get(kind, range(1, 2))


@st.composite
def sizes(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, stages: int = 16, micro_batches: int = 64) -> Size:
    kind = draw(st.sampled_from(kinds))
    p = draw(st.integers(1, stages))
    v = draw(st.sampled_from(virtual_stages_of(kind)))
    m = p * draw(st.integers(1, micro_batches // p)) if kind == "interleaved" else draw(st.integers(1, micro_batches))
    return kind, p, v, m


def lists_of(size: Size, training: bool) -> list[list[Action]]:
    return schedule(*size) if training else forward_only(*size)


def edge_counts(kind: str, stages: int) -> list[int]:
    """Numbers of micro-batches around which a schedule changes its form, and the largest."""
    if kind == "interleaved":
        return [stages, 2 * stages, 3 * stages, 64 // stages * stages]
    return [m for m in (1, 2, stages - 1, stages, stages + 1, 2 * stages - 1, 2 * stages, 64) if 0 < m <= 64]


@pytest.mark.parametrize("stages", range(1, 17))
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_stages_is_sound(kind, stages):
    for virtual_stages in virtual_stages_of(kind):
        for micro_batches in sorted({*edge_counts(kind, stages)}):
            size = (kind, stages, virtual_stages, micro_batches)
            check(schedule(*size), *size)
            check(forward_only(*size), *size, training=False)


@settings(max_examples=150, deadline=None)
@given(sizes(), st.booleans())
def test_every_size_is_sound(size, training):
    check(lists_of(size, training), *size, training=training)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 64))
def test_an_evaluation_takes_any_number_of_micro_batches(stages, virtual_stages, micro_batches):
    size = ("interleaved", stages, virtual_stages, micro_batches)
    check(forward_only(*size), *size, training=False)


@settings(max_examples=100, deadline=None)
@given(sizes(), st.booleans())
def test_receives_are_posted_one_compute_ahead(size, training):
    """What is posted between two computes ends, for each sender, with what the next compute or the one behind needs."""
    kind, stages, virtual_stages, _ = size
    for rank, actions in enumerate(lists_of(size, training)):
        compute = [action for action in actions if action.kind in COMPUTE]
        done, posted = 0, {}
        for action in actions:
            if action.kind in ("receive_forward", "receive_backward"):
                before, behind = neighbours(kind, stages, virtual_stages, rank, action.chunk)
                source = before if action.kind == "receive_forward" else behind
                assert source is not None
                posted[source[0]] = action
            elif action.kind in COMPUTE:
                for last in posted.values():
                    assert any(feeds(last, user) for user in compute[done : done + 2])
                done, posted = done + 1, {}


def feeds(receive: Action, user: Action) -> bool:
    kinds = {"receive_forward": ("forward",), "receive_backward": ("backward", "backward_input")}[receive.kind]
    return user.kind in kinds and (user.micro_batch, user.chunk) == (receive.micro_batch, receive.chunk)


@given(sizes(("gpipe", "1f1b", "interleaved", "zb-h1")))
def test_most_micro_batches_in_flight(size):
    kind, stages, virtual_stages, micro_batches = size
    most = [most_in_flight(actions) for actions in schedule(*size)]
    if kind == "gpipe":
        assert most == [micro_batches] * stages
    elif kind == "zb-h1":
        assert most == [min(stages, micro_batches)] * stages
    elif virtual_stages == 1:
        assert most == [min(stages - rank, micro_batches) for rank in range(stages)]
    else:
        warm_up = [2 * (stages - rank - 1) + (virtual_stages - 1) * stages for rank in range(stages)]
        assert most == [min(count + 1, micro_batches * virtual_stages) for count in warm_up]


@given(sizes(("zb-v",)))
def test_zb_v_holds_at_most_as_many_micro_batches_as_1f1b(size):
    """2 p of its chunks, each half as large (arXiv:2401.10241, section 6)."""
    _, stages, _, micro_batches = size
    assert all(most_in_flight(actions) <= 2 * min(stages, micro_batches) for actions in schedule(*size))


@given(sizes(("zb-h1",)))
def test_zb_h1_postpones_at_most_as_many_weight_passes_as_ranks_come_before(size):
    """Rank r holds (p - r) M_B + r M_W (arXiv:2401.10241, table 2, there counted from 1)."""
    _, stages, _, micro_batches = size
    for rank, actions in enumerate(schedule(*size)):
        whole = halves = most_whole = most_halves = 0
        for action in actions:
            whole += {"forward": 1, "backward_input": -1}.get(action.kind, 0)
            halves += {"backward_input": 1, "backward_weight": -1}.get(action.kind, 0)
            most_whole = max(most_whole, whole)
            if action.kind in ("forward", "backward_weight"):  # behind backward_input its other half may follow at once
                most_halves = max(most_halves, halves)
        assert most_whole == min(stages - rank, micro_batches)
        assert most_halves <= rank


def test_1f1b_of_two_stages_and_three_micro_batches_is_the_one_of_the_paper():
    first, last = (written(actions) for actions in schedule("1f1b", 2, 1, 3))
    assert first == "F0 >0 g0 F1 >1 B0 g1 F2 >2 g2 B1 B2"
    assert last == "r0 F0 r1 B0 <0 F1 r2 B1 <1 F2 B2 <2"


def test_zb_h1_of_two_stages():
    first, last = (written(actions) for actions in schedule("zb-h1", 2, 1, 3))
    assert first == "F0 >0 g0 F1 >1 I0 W0 g1 F2 >2 I1 g2 W1 I2 W2"
    assert last == "r0 F0 r1 I0 <0 F1 I1 <1 r2 W0 F2 I2 <2 W1 W2"


def test_zb_v_of_two_stages_hands_over_in_place_where_it_turns():
    first, last = (written(actions, chunks=True) for actions in schedule("zb-v", 2, 2, 1))
    assert first == "r0b F0a >0a F0b I0b <0b g0a W0b I0a W0a"
    assert last == "r0a F0a g0b F0b >0b I0b W0b I0a <0a W0a"


def test_interleaved_goes_through_a_chunk_with_as_many_micro_batches_as_stages():
    first, _ = schedule("interleaved", 2, 2, 4)
    compute = [action for action in first if action.kind in COMPUTE]
    assert written(compute, chunks=True) == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"


@given(sizes(("interleaved",)))
def test_interleaved_with_one_chunk_is_1f1b(size):
    _, stages, _, micro_batches = size
    assert schedule("interleaved", stages, 1, micro_batches) == schedule("1f1b", stages, 1, micro_batches)


def test_one_stage_passes_no_messages():
    for kind in KINDS:
        for virtual_stages in virtual_stages_of(kind):
            assert all(action.kind in COMPUTE for action in schedule(kind, 1, virtual_stages, 3)[0])


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (("zb-h3", 2, 1, 2), "unknown schedule 'zb-h3'; known: gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        (("gpipe", 2, 2, 2), "schedule gpipe has 1 virtual stage per rank, not 2"),
        (("1f1b", 2, 2, 2), "schedule 1f1b has 1 virtual stage per rank, not 2"),
        (("zb-h1", 2, 4, 2), "schedule zb-h1 has 1 virtual stage per rank, not 4"),
        (("zb-v", 2, 1, 2), "schedule zb-v has 2 virtual stages per rank, not 1"),
        (("interleaved", 4, 2, 6), "a multiple of the 4 pipeline stages, not 6"),
        (("1f1b", 2, 1, 0), "micro_batches must be at least 1, not 0"),
        (("1f1b", 0, 1, 2), "stages must be at least 1, not 0"),
        (("interleaved", 2, 0, 2), "virtual_stages must be at least 1, not 0"),
    ],
)
def test_impossible_sizes_are_refused(size, message):
    with pytest.raises(ValueError, match=message):
        schedule(*size)
    if "multiple" not in message:
        with pytest.raises(ValueError, match=message):
            forward_only(*size)


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
    for rank, actions in enumerate(schedule(*size)):
        for index, action in enumerate(actions):
            yield rank, index, action, schedule(*size)


@by_size
def test_a_missing_action_is_noticed(size):
    for rank, index, action, lists in mutants(size):
        del lists[rank][index]
        with pytest.raises(ScheduleError, match=rf"rank {rank} (never does|has no reason for) \w+ of micro-batch"):
            check(lists, *size)
        if action.kind != "backward_input":  # without it, the checker wants the whole backward
            with pytest.raises(ScheduleError, match=rf"never does {action.kind} of micro-batch {action.micro_batch}, "):
                check(lists, *size)


@by_size
def test_an_action_too_many_is_noticed(size):
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
def test_a_compute_before_its_receive_and_a_send_before_its_compute_are_noticed(size):
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
def test_messages_in_another_order_than_received_are_noticed(side):
    size = ("gpipe", 2, 1, 3)
    lists = schedule(*size)
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
    lists = schedule(*size)
    received = [action for action in lists[0] if action.kind.startswith("receive")]
    assert {action.kind for action in received} == {"receive_forward", "receive_backward"}
    pair = next(index for index, action in enumerate(received[:-1]) if action.kind != received[index + 1].kind)
    first, second = received[pair], received[pair + 1]
    lists[0].remove(second)
    lists[0].insert(lists[0].index(first), second)
    with pytest.raises(ScheduleError, match=f"rank 0 posts {second.kind} .* as number {pair} from rank 1"):
        check(lists, *size)


def test_a_deadlock_is_noticed():
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
    with pytest.raises(ValueError, match="rank 0 waits for ever"):
        simulate(lists, "1f1b", 1, PassTimes(1, 1, 1))


def test_another_number_of_ranks_is_noticed():
    with pytest.raises(ScheduleError, match="there are actions for 2 ranks, not 3"):
        check(schedule("1f1b", 2, 1, 2), "1f1b", 3, 1, 2)


def test_an_evaluation_is_no_training_step():
    with pytest.raises(ScheduleError, match="rank 0 never does backward of micro-batch 0, chunk 0"):
        check(forward_only("1f1b", 2, 1, 2), "1f1b", 2, 1, 2)
    with pytest.raises(ScheduleError, match="rank 0 has no reason for"):
        check(schedule("1f1b", 2, 1, 2), "1f1b", 2, 1, 2, training=False)


@settings(deadline=None)
@given(sizes(stages=4, micro_batches=8), st.data())
def test_what_the_checker_accepts_runs_to_its_end(size, data):
    """Two actions of a rank change places: the checker refuses it, or an event simulation runs it."""
    lists = schedule(*size)
    actions = data.draw(st.sampled_from(lists))
    if len(actions) < 2:
        return
    first, second = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    actions[first], actions[second] = actions[second], actions[first]
    try:
        check(lists, *size)
    except ScheduleError:
        return
    simulate(lists, size[0], size[2], PassTimes(1, 1, 1))
