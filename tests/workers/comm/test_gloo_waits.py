"""A wait that nothing ends is left when communication was interrupted, and one that ends is not held up."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from manta.workers.comm import gloo_waits
from manta.workers.comm.gloo_waits import GlooWaits
from manta.workers.errors import PeerLost

SECONDS = 30.0


class Endless:
    """A collective, or message, of which gloo forgets that its connection is gone."""

    def __init__(self):
        self.turns, self.released = 0, threading.Event()

    def wait(self, timeout=None):
        if timeout is None:
            assert self.released.wait(SECONDS)
            return
        assert timeout >= timedelta(milliseconds=1), "to torch, that is no time-out at all"
        self.turns += 1
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


class Ending(Endless):
    """One that is not there yet when it is first asked, and then `says` so, an error or nothing."""

    def __init__(self, says=None):
        super().__init__()
        self._says = says

    def wait(self, timeout=None):
        self.turns += 1
        if timeout is not None and self.turns == 1:
            raise RuntimeError("Operation timed out!")
        if self._says is not None:
            raise RuntimeError(self._says)

    def is_completed(self):
        return self.turns > 1


@pytest.fixture
def waits(monkeypatch):
    """Of a rank whose communication is broken off in the third look at it."""
    monkeypatch.setattr(gloo_waits, "END_SECONDS", 0.01)
    looks = []

    def interrupted():
        looks.append(None)
        return len(looks) >= 3

    return GlooWaits(interrupted)


@pytest.fixture
def undisturbed(monkeypatch):
    """Of a rank whose communication is not broken off, however late what it waits for comes."""
    monkeypatch.setattr(gloo_waits, "END_SECONDS", SECONDS)
    return GlooWaits(lambda: False)


def test_endless_collective_is_abandoned_and_known_to_go_on(waits):
    endless = Endless()
    waits.started(endless, respects_timeouts=True)
    with pytest.raises(PeerLost, match="interrupted"):
        waits.wait_in_slices(endless)
    assert endless.turns == 3
    assert not waits.end()


def test_gloo_message_without_end_is_left_to_its_waiting_thread(waits):
    endless = Endless()
    with pytest.raises(PeerLost, match="interrupted"):
        waits.by_thread(endless)
    assert waits.end(), "no thread of gloo's is in it"
    endless.released.set()


def test_gloo_work_that_ignores_timeouts_is_left_running_and_known_to(waits):
    scatter = Endless()
    waits.started(scatter, respects_timeouts=False)
    with pytest.raises(PeerLost, match="interrupted"):
        waits.by_thread(scatter)
    assert not waits.end() and scatter.turns == 0
    scatter.released.set()


def test_gloo_work_that_ends_is_waited_for(undisturbed):
    for work, wait in ((Ending(), undisturbed.wait_in_slices), (Ending(), undisturbed.by_thread)):
        wait(work)
    assert undisturbed.end()


@pytest.mark.parametrize("kind", ["wait_in_slices", "by_thread"])
@pytest.mark.parametrize("says", ["Connection closed by peer", "Operation timed out!"])
def test_collective_error_that_resembles_a_time_out_is_raised(undisturbed, kind, says):
    work = Ending(says)
    with pytest.raises(RuntimeError, match=says):
        getattr(undisturbed, kind)(work)


def test_a_collective_that_ends_right_after_its_turn_is_whole(waits):
    """Its turn was an error, and then it had ended."""
    work = Ending()
    work.is_completed = lambda: True
    waits.wait_in_slices(work)
    assert work.turns == 2


@pytest.mark.parametrize("respects_timeouts", [True, False])
def test_gloo_work_begun_but_not_waited_for_gets_a_moment_to_end(undisturbed, respects_timeouts):
    work = Ending("Connection closed by peer")
    undisturbed.started(work, respects_timeouts)
    work.turns = 1
    assert undisturbed.end()


def test_gloo_work_that_ignores_timeouts_and_fails_counts_as_ended(undisturbed):
    """The groups that it was in may take new members."""
    first, second = Ending("Connection closed by peer"), Ending("Connection closed by peer")
    for work in (first, second):
        undisturbed.started(work, respects_timeouts=False)
    with pytest.raises(RuntimeError, match="closed"):
        undisturbed.by_thread(first)
    assert undisturbed.end()
