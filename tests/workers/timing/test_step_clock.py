"""Every second of a rank is in exactly one lap, and in one wait of it at most."""

from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moved_clock import MovedClock

from manta.workers.timing.step_clock import WAITS, StepClock


@contextmanager
def waiting(stepped, wait):
    """A wait, as phases enter and leave it."""
    stepped.enter(wait)
    try:
        yield
    finally:
        stepped.leave()


def test_step_clock_tells_waits_from_other_time(clock):
    stepped = StepClock(clock)
    with waiting(stepped, "data_wait"):
        clock.seconds += 2
    clock.seconds += 5
    assert stepped.lap() == {"wall": 7, "data_wait": 2, "snapshot_stall": 0, "checkpoint_stall": 0}
    assert stepped.lap()["wall"] == 0


def test_step_clock_splits_a_wait_that_outlasts_a_lap(clock):
    stepped = StepClock(clock)
    with waiting(stepped, "snapshot_stall"):
        clock.seconds += 3
        assert stepped.lap()["snapshot_stall"] == 3
        clock.seconds += 1
    assert stepped.lap() == {"wall": 1, "data_wait": 0, "snapshot_stall": 1, "checkpoint_stall": 0}


def test_step_clock_counts_a_nested_wait_as_the_outer_one(clock):
    stepped = StepClock(clock)
    with waiting(stepped, "checkpoint_stall"):
        clock.seconds += 1
        with waiting(stepped, "snapshot_stall"):
            clock.seconds += 2
        clock.seconds += 4
    clock.seconds += 8
    assert stepped.lap() == {"wall": 15, "data_wait": 0, "snapshot_stall": 0, "checkpoint_stall": 7}


def test_step_clock_ends_a_wait_that_raises(clock):
    stepped = StepClock(clock)
    with pytest.raises(ValueError, match="no data"), waiting(stepped, "data_wait"):
        clock.seconds += 1
        raise ValueError("no data")
    clock.seconds += 4
    assert stepped.lap()["data_wait"] == 1


def test_step_clock_discards_time_before_a_restart(clock):
    stepped = StepClock(clock)
    with waiting(stepped, "data_wait"):
        clock.seconds += 9
    stepped.restart()
    clock.seconds += 1
    assert stepped.lap() == {"wall": 1, "data_wait": 0, "snapshot_stall": 0, "checkpoint_stall": 0}
    with waiting(stepped, "data_wait"):
        clock.seconds += 9
        stepped.restart()
        clock.seconds += 1
    assert stepped.lap() == {"wall": 1, "data_wait": 1, "snapshot_stall": 0, "checkpoint_stall": 0}


moves = st.one_of(st.floats(0, 10), st.just("lap"), st.sampled_from(WAITS), st.just("end"))


@given(st.lists(moves, max_size=40))
def test_step_clock_laps_sum_to_the_time_and_waits_fit_their_lap(happened):
    clock = MovedClock()
    stepped, laps, contexts = StepClock(clock), [], []
    for move in happened:
        if isinstance(move, float):
            clock.seconds += move
        elif move == "lap":
            laps.append(stepped.lap())
        elif move == "end" and contexts:
            contexts.pop().__exit__(None, None, None)
        elif move in WAITS:
            contexts.append(waiting(stepped, move))
            contexts[-1].__enter__()
    laps.append(stepped.lap())
    assert sum(lap["wall"] for lap in laps) == pytest.approx(clock.seconds - 100.0)
    for lap in laps:
        assert all(lap[wait] >= 0 for wait in WAITS)
        assert sum(lap[wait] for wait in WAITS) <= lap["wall"] + 1e-9
