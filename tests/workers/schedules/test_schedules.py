"""Schedules do every piece of work once, run to their end and hold no more than they may; the checker proves it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_check import check
from schedule_sizes import lists_of, most_in_flight, sizes, virtual_stages_of

from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.action_lists import evaluation_actions, training_actions
from manta.workers.schedules.schedule import COMPUTE, Action
from manta.workers.schedules.stages import neighbours

LETTERS = {
    "forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W", "send_forward": ">",
    "receive_forward": "r", "send_backward": "<", "receive_backward": "g",
}  # fmt: skip


def written(actions: list[Action], chunks: bool = False) -> str:
    """Actions as letters with micro-batch and, behind a letter a or b, chunk."""
    return " ".join(
        LETTERS[action.kind] + str(action.micro_batch) + ("ab"[action.chunk] if chunks else "") for action in actions
    )


def edge_counts(kind: str, stages: int) -> list[int]:
    """Numbers of micro-batches around which a schedule changes its form, and the largest."""
    if SCHEDULES[kind].in_groups:
        return [stages, 2 * stages, 3 * stages, 64 // stages * stages]
    return [m for m in (1, 2, stages - 1, stages, stages + 1, 2 * stages - 1, 2 * stages, 64) if 0 < m <= 64]


@pytest.mark.parametrize(
    "stages", [*range(1, 9), *(pytest.param(stages, marks=pytest.mark.soak) for stages in range(9, 17))]
)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_number_of_stages_is_sound(kind, stages):
    for virtual_stages in virtual_stages_of(kind):
        for micro_batches in sorted({*edge_counts(kind, stages)}):
            size = (kind, stages, virtual_stages, micro_batches)
            check(training_actions(*size), *size)
            check(evaluation_actions(*size), *size, training=False)


@settings(max_examples=100)
@given(sizes(), st.booleans())
def test_schedule_of_every_size_is_valid(size, training):
    check(lists_of(size, training), *size, training=training)


@settings(max_examples=50)
@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 64))
def test_an_evaluation_takes_any_number_of_micro_batches(stages, virtual_stages, micro_batches):
    size = ("interleaved", stages, virtual_stages, micro_batches)
    check(evaluation_actions(*size), *size, training=False)


@settings(max_examples=50)
@given(sizes(), st.booleans())
def test_schedules_post_receives_one_compute_ahead(size, training):
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


@settings(max_examples=50)
@given(sizes(("gpipe", "1f1b", "interleaved", "zb-h1")))
def test_micro_batches_in_flight_are_those_each_schedule_promises(size):
    kind, stages, virtual_stages, micro_batches = size
    most = [most_in_flight(actions) for actions in training_actions(*size)]
    if kind == "gpipe":
        assert most == [micro_batches] * stages
    elif kind == "zb-h1":
        assert most == [min(stages, micro_batches)] * stages
    elif virtual_stages == 1:
        assert most == [min(stages - rank, micro_batches) for rank in range(stages)]
    else:
        warm_up = [2 * (stages - rank - 1) + (virtual_stages - 1) * stages for rank in range(stages)]
        assert most == [min(count + 1, micro_batches * virtual_stages) for count in warm_up]


@settings(max_examples=50)
@given(sizes(("zb-v",)))
def test_zb_v_holds_at_most_as_many_micro_batches_as_1f1b(size):
    """2 p of its chunks, each half as large (arXiv:2401.10241, section 6)."""
    _, stages, _, micro_batches = size
    assert all(most_in_flight(actions) <= 2 * min(stages, micro_batches) for actions in training_actions(*size))


@settings(max_examples=50)
@given(sizes(("zb-h1",)))
def test_zb_h1_postpones_at_most_as_many_weight_passes_as_ranks_come_before(size):
    """Rank r holds (p - r) M_B + r M_W (arXiv:2401.10241, table 2, there counted from 1)."""
    _, stages, _, micro_batches = size
    for rank, actions in enumerate(training_actions(*size)):
        whole = halves = most_whole = most_halves = 0
        for action in actions:
            whole += {"forward": 1, "backward_input": -1}.get(action.kind, 0)
            halves += {"backward_input": 1, "backward_weight": -1}.get(action.kind, 0)
            most_whole = max(most_whole, whole)
            if action.kind in ("forward", "backward_weight"):  # behind backward_input its other half may follow at once
                most_halves = max(most_halves, halves)
        assert most_whole == min(stages - rank, micro_batches)
        assert most_halves <= rank


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_first_rank_of_zb_h2_holds_twice_the_micro_batches_of_1f1b(stages):
    """(2p - 2i + 1) MB + (2i - 2) MW on rank i from 1 (arXiv:2401.10241, section 2.3)."""
    for rank, actions in enumerate(training_actions("zb-h2", stages, 1, 4 * stages)):
        count = Counter[str]()
        most_whole = most_half = 0
        for action in actions:
            count[action.kind] += 1
            most_whole = max(most_whole, count["forward"] - count["backward_input"])
            most_half = max(most_half, count["backward_input"] - count["backward_weight"])
        assert most_whole == 2 * (stages - rank) - 1
        assert most_half <= 2 * rank + 1


def test_1f1b_of_two_stages_and_three_micro_batches_is_the_one_of_the_paper():
    first, last = (written(actions) for actions in training_actions("1f1b", 2, 1, 3))
    assert first == "F0 >0 g0 F1 >1 B0 g1 F2 >2 g2 B1 B2"
    assert last == "r0 F0 r1 B0 <0 F1 r2 B1 <1 F2 B2 <2"


def test_zb_h1_of_two_stages():
    first, last = (written(actions) for actions in training_actions("zb-h1", 2, 1, 3))
    assert first == "F0 >0 g0 F1 >1 I0 W0 g1 F2 >2 I1 g2 W1 I2 W2"
    assert last == "r0 F0 r1 I0 <0 F1 I1 <1 r2 W0 F2 I2 <2 W1 W2"


def test_zb_v_of_two_stages_hands_over_in_place_where_it_turns():
    first, last = (written(actions, chunks=True) for actions in training_actions("zb-v", 2, 2, 1))
    assert first == "r0b F0a >0a F0b I0b <0b g0a W0b I0a W0a"
    assert last == "r0a F0a g0b F0b >0b I0b W0b I0a <0a W0a"


def test_interleaved_goes_through_a_chunk_with_as_many_micro_batches_as_stages():
    first, _ = training_actions("interleaved", 2, 2, 4)
    compute = [action for action in first if action.kind in COMPUTE]
    assert written(compute, chunks=True) == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"


@given(sizes(("interleaved",)))
def test_interleaved_with_one_chunk_is_1f1b(size):
    _, stages, _, micro_batches = size
    assert training_actions("interleaved", stages, 1, micro_batches) == training_actions(
        "1f1b", stages, 1, micro_batches
    )


def test_schedule_of_one_stage_has_no_messages():
    for kind in SCHEDULES:
        for virtual_stages in virtual_stages_of(kind):
            assert all(action.kind in COMPUTE for action in training_actions(kind, 1, virtual_stages, 3)[0])


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (("zb-h3", 2, 1, 2), "unknown schedule 'zb-h3'; known: gpipe, "),
        (("gpipe", 2, 2, 2), "schedule gpipe has chunks per rank: 1, not 2"),
        (("1f1b", 2, 2, 2), "schedule 1f1b has chunks per rank: 1, not 2"),
        (("zb-h1", 2, 4, 2), "schedule zb-h1 has chunks per rank: 1, not 4"),
        (("zb-v", 2, 1, 2), "schedule zb-v has chunks per rank: 2, not 1"),
        (("interleaved", 4, 2, 6), "a multiple of the 4 pipeline stages, not 6"),
        (("1f1b", 2, 1, 0), "micro_batches must be at least 1, not 0"),
        (("1f1b", 0, 1, 2), "stages must be at least 1, not 0"),
        (("interleaved", 2, 0, 2), "virtual_stages must be at least 1, not 0"),
    ],
)
def test_impossible_schedule_sizes_are_refused(size, message):
    with pytest.raises(ValueError, match=message):
        training_actions(*size)
    if "multiple" not in message:
        with pytest.raises(ValueError, match=message):
            evaluation_actions(*size)
