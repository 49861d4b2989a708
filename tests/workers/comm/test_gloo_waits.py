"""A wait that nothing ends is left when communication was broken off, and one that ends is not held up."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from manta.workers.comm import process_groups
from manta.workers.comm.process_groups import GlooWaits
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
    monkeypatch.setattr(process_groups, "END_SECONDS", 0.01)
    looks = []

    def interrupted():
        looks.append(None)
        return len(looks) >= 3

    return GlooWaits(interrupted)


@pytest.fixture
def undisturbed(monkeypatch):
    """Of a rank whose communication is not broken off, however late what it waits for comes."""
    monkeypatch.setattr(process_groups, "END_SECONDS", SECONDS)
    return GlooWaits(lambda: False)


def test_a_collective_that_does_not_end_is_left_and_known_to_go_on(waits):
    endless = Endless()
    waits.started(endless, respects_timeouts=True)
    with pytest.raises(PeerLost, match="broken off"):
        waits.wait_in_slices(endless)
    assert endless.turns == 3
    assert not waits.end()


def test_a_message_that_does_not_end_is_left_to_the_thread_that_waits_for_it(waits):
    endless = Endless()
    with pytest.raises(PeerLost, match="broken off"):
        waits.by_thread(endless)
    assert waits.end(), "no thread of gloo's is in it"
    endless.released.set()


def test_what_pays_no_heed_to_time_outs_and_does_not_end_is_left_and_known_to_go_on(waits):
    scatter = Endless()
    waits.started(scatter, respects_timeouts=False)
    with pytest.raises(PeerLost, match="broken off"):
        waits.by_thread(scatter)
    assert not waits.end() and scatter.turns == 0
    scatter.released.set()


def test_what_ends_is_waited_for(undisturbed):
    for work, wait in ((Ending(), undisturbed.wait_in_slices), (Ending(), undisturbed.by_thread)):
        wait(work)
    assert undisturbed.end()


@pytest.mark.parametrize("kind", ["wait_in_slices", "by_thread"])
@pytest.mark.parametrize("says", ["Connection closed by peer", "Operation timed out!"])
def test_an_error_of_its_own_is_raised_also_one_that_reads_like_a_turn(undisturbed, kind, says):
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
def test_what_was_begun_and_not_waited_for_is_given_a_moment_to_end(undisturbed, respects_timeouts):
    work = Ending("Connection closed by peer")
    undisturbed.started(work, respects_timeouts)
    work.turns = 1
    assert undisturbed.end()


def test_what_pays_no_heed_to_time_outs_and_ends_with_an_error_has_ended(undisturbed):
    """The groups that it was in may take new members."""
    first, second = Ending("Connection closed by peer"), Ending("Connection closed by peer")
    for work in (first, second):
        undisturbed.started(work, respects_timeouts=False)
    with pytest.raises(RuntimeError, match="closed"):
        undisturbed.by_thread(first)
    assert undisturbed.end()
