"""How far a loop is behind is how long the oldest of what it has still to do has been due."""

import pytest

from manta.service.tasks import Lag


class Clock:
    """Stands until it is moved."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_loop_that_waits_to_be_asked_is_not_behind(clock):
    lag = Lag(clock=clock)
    clock.now += 50
    assert lag.seconds == 0


def test_it_is_behind_from_when_it_was_asked_until_it_is_done(clock):
    lag = Lag(clock=clock)
    lag.asked()
    clock.now += 2
    lag.asked()
    lag.begin()
    clock.now += 3
    assert lag.seconds == 5
    lag.done()
    assert lag.seconds == 0


def test_what_is_asked_during_a_pass_is_for_the_next_one(clock):
    lag = Lag(clock=clock)
    lag.begin()
    clock.now += 1
    lag.asked()
    clock.now += 1
    lag.done()
    clock.now += 1
    assert lag.seconds == 2


def test_a_pass_that_fails_leaves_the_loop_behind(clock):
    lag = Lag(every=1.0, clock=clock)
    for _ in range(3):
        clock.now += 10
        lag.begin()
    assert lag.seconds == 29


def test_a_loop_with_a_rhythm_is_behind_once_a_pass_is_overdue(clock):
    lag = Lag(every=1.0, clock=clock)
    lag.begin()
    lag.done()
    clock.now += 1
    assert lag.seconds == 0
    clock.now += 4
    assert lag.seconds == 4
