"""How often a job may fail, how long it is held back, what it does not trust: pure functions of its failures."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.recovery.budgets import (
    AVOID_FAILURES,
    AVOID_SECONDS,
    INITIAL_WAIT_SECONDS,
    MAX_WAIT_SECONDS,
    SKEW_SECONDS,
    PastFailure,
    avoided_nodes,
    count_by_kind,
    past_failures,
    recurs,
    wait_seconds,
    within,
)

KINDS = ("killed", "agent_lost", "hung", "exception", "bad_checkpoint", "peer_lost")
failures = st.builds(
    PastFailure,
    kind=st.sampled_from(KINDS),
    at=st.floats(0, 10_000),
    step=st.one_of(st.none(), st.integers(1, 20)),
    exception=st.sampled_from([None, "ValueError", "KeyError"]),
    node=st.sampled_from([None, "a", "b", "c"]),
    committed=st.integers(0, 20),
    progressed=st.booleans(),
)
histories = st.lists(failures, max_size=20)


def stuck(kind="killed", **known):
    """A failure before any step was committed since the one before."""
    return PastFailure(kind, 0.0, progressed=False, **known)


@given(histories, failures)
def test_recovery_with_progress_never_waits(history, failure):
    assert wait_seconds(history, replace(failure, progressed=True)) == 0


@given(failures)
def test_recovery_is_immediate_the_first_time(failure):
    assert wait_seconds([], failure) == 0


@given(histories, failures)
def test_recovery_wait_is_bounded_and_only_for_recurring_faults_without_progress(history, failure):
    waits = wait_seconds(history, failure)
    assert waits == 0 or INITIAL_WAIT_SECONDS <= waits <= MAX_WAIT_SECONDS
    if waits:
        assert history[-1].kind == failure.kind and not failure.progressed


def test_recovery_wait_doubles_while_the_same_fault_recurs():
    history = [replace(stuck(), progressed=True)]
    waits = []
    for _ in range(12):
        waits.append(wait_seconds(history, stuck()))
        history.append(stuck())
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert wait_seconds([stuck()] * 5000, stuck()) == 60, "a checkpoint cannot be read for days"
    assert wait_seconds(history, stuck("hung")) == 0, "another failure is another matter"
    assert wait_seconds([*history, replace(stuck(), progressed=True)], stuck()) == INITIAL_WAIT_SECONDS


@given(histories, st.floats(0, 20_000), st.floats(0, 10_000))
def test_fault_history_drops_faults_outside_the_window(history, now, window):
    counted = within(history, now, window)
    assert set(counted) <= set(history)
    if window == 0:
        assert counted == history
    else:
        assert all(failure.at > now - window for failure in counted)
        assert within(history, max(failure.at for failure in history) + window + 1, window) == [] if history else True


def on_node(node, *times, kind="killed"):
    return [PastFailure(kind, at, node=node) for at in times]


def test_node_on_which_a_job_keeps_failing_is_avoided_for_an_hour():
    history = [*on_node("a", 10, 20), *on_node("b", 30), *on_node("a", 40)]
    assert avoided_nodes(history, 50) == {"a"}
    assert avoided_nodes(history, 10 + AVOID_SECONDS) == set()


def test_failures_on_unknown_nodes_blame_no_node():
    assert avoided_nodes([*on_node(None, 1, 2, 3, 4), *on_node("a", 5)], 6) == set()


def test_nodes_are_not_blamed_for_the_users_errors_or_for_checkpoints():
    history = [*on_node("a", 1, 2, 3, 4, kind="exception"), *on_node("b", 1, 2, 3, 4, kind="bad_checkpoint")]
    assert avoided_nodes(history, 5) == set()


@given(histories, st.floats(0, 20_000))
def test_nodes_with_enough_recent_faults_are_avoided_and_no_others(history, now):
    for node in avoided_nodes(history, now):
        assert sum(failure.node == node and failure.at > now - AVOID_SECONDS for failure in history) >= AVOID_FAILURES


def raised(step=7, exception="ValueError", **known):
    return PastFailure("exception", 0.0, step, exception, **known)


def test_exception_recurs_despite_other_faults_in_between():
    between = [PastFailure("killed", 1.0, committed=6), PastFailure("hung", 2.0, committed=6), raised(6, committed=5)]
    assert recurs([raised(committed=6), *between], raised(committed=6))


@pytest.mark.parametrize("committed", [7, 9])
def test_exception_that_the_job_got_past_does_not_recur(committed):
    got_past = PastFailure("killed", 1.0, committed=committed)  # step 7 raised, so 7 committed is past it
    assert not recurs([raised(7, committed=6), got_past], raised(7, committed=committed))


def test_exception_recurs_while_no_later_step_was_committed():
    assert recurs([raised(7, committed=6), PastFailure("killed", 1.0, committed=6)], raised(7, committed=6))


def test_exception_outside_of_any_step_comes_again_though_steps_were_committed_since():
    between = PastFailure("killed", 1.0, committed=9)
    assert recurs([raised(None, committed=6), between], raised(None, committed=9))


def test_exceptions_of_another_kind_or_step_do_not_count_as_recurring():
    history = [raised(6), raised(exception="KeyError"), PastFailure("killed", 0.0, 7)]
    assert not recurs(history, raised())
    assert not recurs([PastFailure("killed", 0.0, 7)], PastFailure("killed", 0.0, 7))


def test_fault_message_counts_faults_by_kind():
    assert count_by_kind([stuck(), stuck("agent_lost"), stuck()]) == "2 killed, 1 agent lost"


@dataclass
class Life:
    """A generation as its row tells it."""

    started_at: float = 0.0
    first_step_at: float | None = None
    resume_step: int = 0
    data: dict = field(default_factory=dict)


def test_fault_history_is_read_from_the_generations():
    first = Life(1.0, first_step_at=5.0, data={"failure": None})
    second = Life(10.0, data={"failure": raised(node="a", committed=6, rank=3).to_json() | {"at": 9.5}})
    resized = Life(20.0, data=None)
    older = Life(30.0, data={"failure": {"kind": "killed", "step": None, "exception": None}})
    past = past_failures([first, second, resized, older])
    assert past == [
        PastFailure("exception", 9.5, 7, "ValueError", 3, "a", 6, progressed=True),
        PastFailure("killed", 30.0, progressed=False),
    ]


@pytest.mark.parametrize(
    ("cause", "kinds"),
    [
        (
            "machine",
            [
                "killed",
                "hung",
                "straggler",
                "agent_lost",
                "peer_lost",
                "corrupt",
                "device_lost",
                "unreadable_data",
                "node_exhausted",
            ],
        ),
        ("user", ["exception", "bad_data", "not_finite", "spike"]),
        ("checkpoint", ["bad_checkpoint", "unreadable_checkpoint", "not_saved"]),
    ],
)
def test_fault_kinds_all_have_a_cause(cause, kinds):
    assert {stuck(kind).cause for kind in kinds} == {cause}


def test_fault_window_is_not_extended_by_a_clock_set_back():
    window, hour = 1800.0, 3600.0
    kept_within_budget = [PastFailure("killed", at) for at in (500.0, 1500.0, 4000.0, 5000.0)]
    assert len(within(kept_within_budget, 5500.0, window)) == 2
    assert len(within(kept_within_budget, 5500.0 - hour, window)) == 2, "an hour is set back"
    assert len(within(kept_within_budget, 5500.0 + hour, window)) == 0


def test_failure_on_a_node_whose_clock_is_a_little_ahead_counts():
    ahead = [PastFailure("killed", 1000.0 + SKEW_SECONDS), PastFailure("killed", 1001.0 + SKEW_SECONDS)]
    assert within(ahead, 1000.0, 100.0) == ahead[:1]


def test_exception_outside_of_any_step_comes_again():
    between = PastFailure("killed", 1.0, committed=3)
    assert recurs([raised(None), between], raised(None))
    assert not recurs([between], raised(None))
