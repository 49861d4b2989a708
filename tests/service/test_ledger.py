"""The ledger of a job's time, and what counts against `max_duration`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.ledger import CLASSES, GRACE_STEPS, STEP_CLASSES, StateEntry, Training, ledger, seconds_taken
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import TRANSITIONS, JobState

NOW = 1000.0


def states(**times):
    """Changes from names and times, such as `QUEUED=0, STARTING=5`; a number behind a name is left out."""
    return [StateEntry(at, name.rstrip("0123456789")) for name, at in times.items()]


def spent(changes, trainings, now=NOW):
    """The classes that have any time."""
    book = ledger(changes, trainings, now)
    assert sum(book.seconds.values()) == pytest.approx(book.wall_seconds)
    return {name: pytest.approx(seconds) for name, seconds in book.seconds.items() if seconds}


def steps(began, start, end, ended=None, **more):
    """A generation that began at `began` and committed steps from `start` to `end`, all computing."""
    seconds = more.pop("seconds", {"compute": end - start})
    return Training(began, ended, start, end, more.pop("count", 10), seconds, **more)


def test_undisturbed_job_waits_starts_computes_and_gives_back():
    changes = states(QUEUED=0, STARTING=10, RUNNING=17, SUCCEEDED=101)
    book = ledger(changes, [steps(11, 16, 100, 100.5, outcome="SUCCEEDED")], NOW)
    assert book.closed
    assert {name: value for name, value in book.seconds.items() if value} == {"queue": 10, "start": 7, "compute": 84}
    assert book.goodput == 84 / 91


def test_ledger_splits_steps_by_what_they_waited_for():
    seconds = {"compute": 60.0, "data_wait": 10.0, "snapshot_stall": 4.0, "checkpoint_stall": 6.0, "redo": 4.0}
    changes = states(QUEUED=0, STARTING=10, RUNNING=17, SUCCEEDED=100)
    assert spent(changes, [steps(11, 16, 100, 100, seconds=seconds)]) == {"queue": 10, "start": 6, **seconds}


def test_steps_that_took_longer_than_the_loop_was_painted_move_its_start_back():
    changes = states(QUEUED=0, STARTING=0, RUNNING=21, SUCCEEDED=100)
    longer = steps(1, 20, 100, 100, seconds={"compute": 80.0, "data_wait": 10.0}, outcome="SUCCEEDED")
    assert spent(changes, [longer]) == {"start": 10, "compute": 80, "data_wait": 10}


def test_ledger_scales_step_times_that_exceed_their_generation():
    changes = states(QUEUED=0, STARTING=0, RUNNING=21, SUCCEEDED=100)
    twice = steps(40, 50, 100, 100, seconds={"compute": 90.0, "data_wait": 30.0}, outcome="SUCCEEDED")
    assert spent(changes, [twice]) == {"start": 21, "detect": 19, "compute": 45, "data_wait": 15}


def test_ledger_charges_a_failure_with_its_step_and_recovery_phases():
    timeline = RecoveryTimeline(51, 50, rested_at=51.5, launched_at=51.6, connected_at=52, restored_at=53)
    changes = states(QUEUED=0, STARTING=0, RUNNING=11, RECOVERING=51, RUNNING2=55, SUCCEEDED=100)
    first, second = steps(1, 10, 48, 51.5), steps(51.5, 53, 100, 100, recovery=timeline, outcome="SUCCEEDED")
    assert spent(changes, [first, second]) == {
        "start": 10, "compute": 38 + 47, "redo": 2, "detect": 1, "re_form": 1, "restore": 1
    }  # fmt: skip


def test_ledger_of_a_final_failure_uses_the_states_alone():
    changes = states(QUEUED=0, STARTING=0, RUNNING=11, RECOVERING=51, FAILED=53)
    assert spent(changes, [steps(1, 10, 48, 53, outcome="FAILED")]) == {
        "start": 10, "compute": 38, "redo": 3, "re_form": 2
    }  # fmt: skip


def test_ledger_of_a_job_without_places_has_idle_time_without_capacity():
    changes = states(QUEUED=0, STARTING=5, RUNNING=11, RECOVERING=50, QUEUED2=52, STARTING2=90, RUNNING2=95)
    trainings = [steps(6, 10, 50, 90), steps(90, 94, 1000)]
    assert spent(changes, trainings) == {
        "queue": 5, "start": 5, "compute": 40 + 906, "re_form": 2 + 4, "idle_without_capacity": 38
    }  # fmt: skip
    assert ledger(changes, trainings, NOW).goodput == pytest.approx(946 / 995)


def test_job_that_finds_no_place_after_a_failure_waits_without_capacity():
    """Whatever the recovery has to say about that time."""
    changes = states(QUEUED=0, STARTING=0, RUNNING=10, RECOVERING=51, QUEUED2=53, STARTING2=80, RUNNING2=84)
    timeline = RecoveryTimeline(51, 50, 52, connected_at=82, restored_at=83)
    trainings = [steps(0, 10, 48, 53), steps(80, 83, 1000, recovery=timeline)]
    assert spent(changes, trainings) == {
        "start": 10, "compute": 38 + 917, "redo": 2, "detect": 1, "re_form": 2 + 2, "idle_without_capacity": 27,
        "restore": 1,
    }  # fmt: skip


def test_ledger_counts_time_between_a_final_failure_and_a_retry_as_pause():
    changes = states(
        QUEUED=0, STARTING=0, RUNNING=10, FAILED=50, QUEUED2=200, STARTING2=203, RUNNING2=205, SUCCEEDED=300
    )
    trainings = [steps(0, 10, 50, 50, outcome="FAILED"), steps(203, 205, 300, 300, outcome="SUCCEEDED")]
    assert spent(changes, trainings) == {
        "start": 10, "compute": 40 + 95, "pause": 150, "idle_without_capacity": 3, "re_form": 2
    }  # fmt: skip
    assert ledger(changes, trainings, NOW).goodput == pytest.approx(135 / 150)


def test_ledger_of_a_resize_loses_only_the_time_to_re_form():
    changes = states(QUEUED=0, STARTING=0, RUNNING=10, RESIZING=48, RUNNING2=56, SUCCEEDED=100)
    trainings = [steps(0, 10, 50, 51), steps(51, 55, 100, 100, outcome="SUCCEEDED")]
    assert spent(changes, trainings) == {"start": 10, "compute": 40 + 45, "re_form": 5}


@pytest.mark.parametrize("seconds", [None, {}])
def test_ledger_counts_steps_without_known_seconds_as_compute(seconds):
    changes = states(QUEUED=0, STARTING=0, RUNNING=11, SUCCEEDED=100)
    assert spent(changes, [steps(1, 10, 100, 100, seconds=seconds, outcome="SUCCEEDED")]) == {
        "start": 10, "compute": 90
    }  # fmt: skip


def test_ledger_counts_the_step_in_progress_of_an_ended_generation_as_lost():
    changes = states(QUEUED=0, STARTING=0, RUNNING=10)
    assert spent(changes, [steps(0, 10, 20, ended=22)], now=25) == {"start": 10, "compute": 10, "redo": 5}


def test_goodput_of_a_job_that_never_trained_is_unknown():
    assert ledger(states(QUEUED=0, STARTING=0, RUNNING=10), [], 20).goodput is None


def test_goodput_excludes_pauses_and_time_after_a_cancel():
    changes = states(QUEUED=0, STARTING=0, RUNNING=10, CANCELLING=50, CANCELLED=60)
    book = ledger(changes, [steps(0, 10, 50, 60, outcome="CANCELLED")], NOW)
    assert book.seconds["pause"] == 10
    assert book.goodput == 40 / 50


def test_a_paused_job_loses_nothing_but_the_time_to_start_again():
    changes = states(
        QUEUED=0, STARTING=0, RUNNING=10, PAUSING=45, PAUSED=60, QUEUED2=500, STARTING2=502, RUNNING2=505, SUCCEEDED=600
    )
    trainings = [steps(0, 10, 50, 60), steps(502, 504, 600, 600, outcome="SUCCEEDED")]
    assert spent(changes, trainings) == {
        "start": 10, "compute": 40 + 96, "pause": 10 + 440, "idle_without_capacity": 2, "re_form": 2
    }  # fmt: skip
    assert ledger(changes, trainings, NOW).goodput == pytest.approx(136 / 150)


def test_ledger_counts_a_step_in_progress_as_compute_until_it_is_overdue():
    changes = states(QUEUED=0, STARTING=0, RUNNING=10)
    running = [steps(0, 10, 20, count=10)]
    assert spent(changes, running, now=25) == {"start": 10, "compute": 15}
    assert spent(changes, running, now=100) == {
        "start": 10, "compute": 10 + GRACE_STEPS, "detect": 80 - GRACE_STEPS
    }  # fmt: skip


def test_ledger_counts_a_step_in_progress_as_lost_once_a_failure_is_noticed():
    changes = states(QUEUED=0, STARTING=0, RUNNING=10, RECOVERING=23)
    assert spent(changes, [steps(0, 10, 20)], now=25) == {"start": 10, "compute": 10, "redo": 3, "re_form": 2}


def test_ledger_of_a_queued_job_has_queue_time_only():
    book = ledger(states(QUEUED=100), [], 130)
    assert (book.seconds["queue"], book.goodput, book.closed) == (30, None, False)


def test_ledger_is_never_negative_if_a_ranks_clock_is_ahead():
    changes = states(QUEUED=0, STARTING=0, RUNNING=10, SUCCEEDED=30)
    assert spent(changes, [steps(1, 25, 45, 30)]) == {"start": 10, "detect": 15, "compute": 5}
    assert spent(changes, [steps(1, -20, 0, 30, outcome="SUCCEEDED")]) == {"start": 30}


def test_a_job_without_any_state_has_no_ledger():
    with pytest.raises(ValueError, match="no ledger"):
        ledger([], [], NOW)


pauses = st.floats(0, 100, allow_nan=False)
maybe = st.one_of(st.none(), st.floats(-200, 1200, allow_nan=False))


@st.composite
def histories(draw):
    """Any walk through the states, and generations with times that need make no sense at all."""
    at, state = draw(pauses), JobState.QUEUED
    changes = [StateEntry(at, state)]
    for _ in range(draw(st.integers(0, 12))):
        if not TRANSITIONS[state]:
            break
        at, state = at + draw(pauses), draw(st.sampled_from(sorted(TRANSITIONS[state])))
        changes.append(StateEntry(at, state))
    trainings = []
    for _ in range(draw(st.integers(0, 6))):
        timeline = RecoveryTimeline(draw(st.floats(0, 1000)), *(draw(maybe) for _ in range(6)))
        sums = st.dictionaries(st.sampled_from(STEP_CLASSES), st.floats(0, 300), max_size=5)
        trainings.append(
            Training(
                draw(st.floats(-100, 1100)), draw(maybe), draw(maybe), draw(maybe), draw(st.integers(0, 50)),
                draw(sums), draw(st.sampled_from([None, timeline])),
                draw(st.sampled_from([None, "SUCCEEDED", "FAILED"])),
            )
        )  # fmt: skip
    return changes, trainings, draw(st.floats(0, 2000))


def test_ledger_shares_time_evenly_among_tiny_step_times():
    changes, sums = states(QUEUED=0, STARTING=0, RUNNING=10, SUCCEEDED=10.5), dict.fromkeys(STEP_CLASSES, 5e-324)
    training = steps(0, 10, 10.5, 10.5, seconds=sums, outcome="SUCCEEDED")
    assert spent(changes, [training]) == {"start": 10, **dict.fromkeys(STEP_CLASSES, 0.1)}


@given(histories())
def test_ledger_classes_sum_to_the_wall_time_and_none_is_negative(history):
    book = ledger(*history)
    assert set(book.seconds) == set(CLASSES)
    assert all(seconds >= 0 for seconds in book.seconds.values())
    assert sum(book.seconds.values()) == pytest.approx(book.wall_seconds, rel=1e-9, abs=1e-6)
    assert book.goodput is None or 0 <= book.goodput <= 1


@given(histories())
def test_ledger_intervals_are_contiguous_and_sum_to_their_classes(history):
    book = ledger(*history)
    ends = [book.began_at, *(each.end for each in book.intervals)]
    assert [each.begin for each in book.intervals] == ends[:-1]
    assert ends[-1] == book.until or not book.intervals
    for each in book.intervals:
        assert sum(each.seconds.values()) == pytest.approx(each.end - each.begin, rel=1e-9, abs=1e-9)


def test_ledger_intervals_say_when_each_second_was_spent():
    changes = states(QUEUED=0, STARTING=4, RUNNING=10, SUCCEEDED=30)
    training = steps(4, 10, 28, 30, seconds={"compute": 9.0, "data_wait": 9.0}, outcome="SUCCEEDED")
    spans = [
        (each.begin, each.end, {k: v for k, v in each.seconds.items() if v})
        for each in ledger(changes, [training], 30).intervals
    ]
    assert spans == [
        (0, 4, {"queue": 4}),
        (4, 10, {"start": 6}),
        (10, 28, {"compute": 9.0, "data_wait": 9.0}),
        (28, 30, {"start": 2}),
    ]


lengths = st.floats(0.01, 30, allow_nan=False)


@given(
    st.floats(0, 50), lengths, st.lists(st.tuples(*[lengths] * 8), min_size=1, max_size=6), st.floats(0.1, 1)
)  # fmt: skip
def test_ledger_of_an_orderly_history_is_exact(queue, start, lives, share):
    """Generations that each train, lose a step, are noticed, rest, form anew and restore: no second is misplaced."""
    now, expected = queue + start, {"queue": queue, "start": start, "compute": 0.0, "data_wait": 0.0}
    changes, trainings, timeline, began = [StateEntry(0, "QUEUED"), StateEntry(queue, "STARTING")], [], None, queue
    for train, lost, unseen, rest, order, connect, restore, silent in lives:
        done = now + train
        changes.append(StateEntry(min(now + silent, done), "RUNNING"))
        sums = {"compute": train * share, "data_wait": train * (1 - share)}
        noticed = done + lost + unseen
        trainings.append(Training(began, noticed + rest, now, done, 3, sums, timeline))
        changes.append(StateEntry(noticed, "RECOVERING"))
        began = noticed + rest
        now = began + order + connect + restore
        timeline = RecoveryTimeline(noticed, done + lost, began, began + order, began + order + connect, now)
        parts = {"compute": sums["compute"], "data_wait": sums["data_wait"], "redo": lost, "detect": unseen,
                 "re_form": rest + order + connect, "restore": restore}  # fmt: skip
        expected = {name: expected.get(name, 0.0) + parts.get(name, 0.0) for name in (*expected, *parts)}
    trainings.append(Training(began, None, None, None, recovery=timeline))
    book = ledger(changes, trainings, now)
    assert {name: seconds for name, seconds in book.seconds.items() if name in expected} == pytest.approx(expected)
    assert sum(expected.values()) == pytest.approx(book.wall_seconds)


CHANGES = [
    StateEntry(at, state)
    for at, state in (
        (0.0, "QUEUED"), (10.0, "STARTING"), (12.0, "RUNNING"), (30.0, "PAUSING"), (35.0, "PAUSED"),
        (90.0, "QUEUED"), (100.0, "STARTING"), (101.0, "RUNNING"), (120.0, "FAILED"), (200.0, "QUEUED"),
        (210.0, "STARTING"),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "now", "since", "seconds"),
    [
        (0, 50.0, 0.0, 0.0), (1, 5.0, 0.0, 0.0), (3, 20.0, 0.0, 10.0), (5, 80.0, 0.0, 25.0), (8, 110.0, 0.0, 35.0),
        (11, 215.0, 0.0, 50.0), (11, 215.0, 200.0, 5.0), (3, 20.0, 15.0, 5.0), (3, 11.0, 0.0, 2.0),
    ],
    ids=["nothing", "queue", "running", "paused", "resumed", "retried", "since_retry", "in_between", "clock_set_back"],
)  # fmt: skip
def test_job_duration_counts_time_in_states_that_hold_places(entries, now, since, seconds):
    assert seconds_taken(CHANGES[:entries], now, since) == seconds
