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


def test_lag_of_an_idle_loop_is_zero(clock):
    lag = Lag(clock=clock)
    clock.now += 50
    assert lag.seconds == 0


def test_lag_counts_from_the_first_request_until_the_pass_ends(clock):
    lag = Lag(clock=clock)
    lag.asked()
    clock.now += 2
    lag.asked()
    lag.begin()
    clock.now += 3
    assert lag.seconds == 5
    lag.done()
    assert lag.seconds == 0


def test_lag_of_a_request_during_a_pass_lasts_until_the_next_pass(clock):
    lag = Lag(clock=clock)
    lag.begin()
    clock.now += 1
    lag.asked()
    clock.now += 1
    lag.done()
    clock.now += 1
    assert lag.seconds == 2


def test_lag_continues_after_a_failed_pass(clock):
    lag = Lag(every=1.0, clock=clock)
    for _ in range(3):
        clock.now += 10
        lag.begin()
    assert lag.seconds == 29


def test_lag_of_a_periodic_loop_counts_from_its_due_time(clock):
    lag = Lag(every=1.0, clock=clock)
    lag.begin()
    lag.done()
    clock.now += 1
    assert lag.seconds == 0
    clock.now += 4
    assert lag.seconds == 4
