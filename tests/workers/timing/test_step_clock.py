"""Every second of a rank is in exactly one lap, and in one wait of it at most."""

from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.workers.timing.step_clock import WAITS, StepClock


class Hands:
    """A clock that moves when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def hands():
    return Hands()


@contextmanager
def waiting(clock, wait):
    """A wait, as phases enter and leave it."""
    clock.enter(wait)
    try:
        yield
    finally:
        clock.leave()


def test_step_clock_tells_waits_from_other_time(hands):
    clock = StepClock(hands)
    with waiting(clock, "data_wait"):
        hands.now += 2
    hands.now += 5
    assert clock.lap() == {"wall": 7, "data_wait": 2, "snapshot_stall": 0, "checkpoint_stall": 0}
    assert clock.lap()["wall"] == 0


def test_step_clock_splits_a_wait_that_outlasts_a_lap(hands):
    clock = StepClock(hands)
    with waiting(clock, "snapshot_stall"):
        hands.now += 3
        assert clock.lap()["snapshot_stall"] == 3
        hands.now += 1
    assert clock.lap() == {"wall": 1, "data_wait": 0, "snapshot_stall": 1, "checkpoint_stall": 0}


def test_step_clock_counts_a_nested_wait_as_the_outer_one(hands):
    clock = StepClock(hands)
    with waiting(clock, "checkpoint_stall"):
        hands.now += 1
        with waiting(clock, "snapshot_stall"):
            hands.now += 2
        hands.now += 4
    hands.now += 8
    assert clock.lap() == {"wall": 15, "data_wait": 0, "snapshot_stall": 0, "checkpoint_stall": 7}


def test_step_clock_ends_a_wait_that_raises(hands):
    clock = StepClock(hands)
    with pytest.raises(ValueError, match="no data"), waiting(clock, "data_wait"):
        hands.now += 1
        raise ValueError("no data")
    hands.now += 4
    assert clock.lap()["data_wait"] == 1


def test_step_clock_discards_time_before_a_restart(hands):
    clock = StepClock(hands)
    with waiting(clock, "data_wait"):
        hands.now += 9
    clock.restart()
    hands.now += 1
    assert clock.lap() == {"wall": 1, "data_wait": 0, "snapshot_stall": 0, "checkpoint_stall": 0}
    with waiting(clock, "data_wait"):
        hands.now += 9
        clock.restart()
        hands.now += 1
    assert clock.lap() == {"wall": 1, "data_wait": 1, "snapshot_stall": 0, "checkpoint_stall": 0}


moves = st.one_of(st.floats(0, 10), st.just("lap"), st.sampled_from(WAITS), st.just("end"))


@given(st.lists(moves, max_size=40))
def test_step_clock_laps_sum_to_the_time_and_waits_fit_their_lap(happened):
    hands = Hands()
    clock, laps, contexts = StepClock(hands), [], []
    for move in happened:
        if isinstance(move, float):
            hands.now += move
        elif move == "lap":
            laps.append(clock.lap())
        elif move == "end" and contexts:
            contexts.pop().__exit__(None, None, None)
        elif move in WAITS:
            contexts.append(waiting(clock, move))
            contexts[-1].__enter__()
    laps.append(clock.lap())
    assert sum(lap["wall"] for lap in laps) == pytest.approx(hands.now - 100.0)
    for lap in laps:
        assert all(lap[wait] >= 0 for wait in WAITS)
        assert sum(lap[wait] for wait in WAITS) <= lap["wall"] + 1e-9
