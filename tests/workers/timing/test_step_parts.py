"""Every moment of a measured step belongs to exactly one part."""

from contextlib import contextmanager

import pytest
import torch
from moved_clock import MovedClock

from manta.workers.timing.step_phases import PARTS, StepParts


@pytest.fixture
def parts(clock):
    return StepParts(torch.device("cpu"), clock)


@contextmanager
def part(parts, name):
    """A part, as phases enter and leave it."""
    parts.enter(name)
    yield
    parts.leave()


def step(clock, parts):
    """A step of 31 seconds: 10 forward, and 4 of communication within that."""
    parts.begin()
    clock.seconds += 1
    with part(parts, "forward"):
        clock.seconds += 2
        with part(parts, "tensor_communication"):
            clock.seconds += 4
        clock.seconds += 8
    clock.seconds += 16


def test_inner_part_of_a_step_pauses_the_outer_one(clock, parts):
    step(clock, parts)
    seconds = parts.end()
    assert (seconds["forward"], seconds["tensor_communication"], seconds["other"]) == (10, 4, 17)
    assert set(seconds) == set(PARTS)
    assert sum(seconds.values()) == 31


def test_unnamed_part_of_a_step_counts_to_the_part_around_it(clock, parts):
    parts.begin()
    with part(parts, "forward"), part(parts, None):
        clock.seconds += 3
    with part(parts, None):
        clock.seconds += 4
    seconds = parts.end()
    assert (seconds["forward"], seconds["other"]) == (3, 4)


def test_innermost_part_is_known_while_a_step_is_measured(parts):
    assert parts.innermost is None
    parts.begin()
    assert parts.innermost == "other"
    with part(parts, "forward"), part(parts, "bubble"):
        assert parts.innermost == "bubble"
    parts.drop()
    assert parts.innermost is None


def test_idle_time_of_a_message_is_moved_to_the_bubble(clock, parts):
    parts.begin()
    with part(parts, "pipeline_communication"):
        clock.seconds += 5
    parts.move("pipeline_communication", "bubble", 3)
    seconds = parts.end()
    assert (seconds["pipeline_communication"], seconds["bubble"]) == (2, 3)


def test_time_is_not_moved_between_parts_while_nothing_is_measured(parts):
    parts.move("pipeline_communication", "bubble", 3)
    parts.begin()
    assert parts.end()["bubble"] == 0
    assert not parts.measuring


def test_interrupted_step_measurement_leaves_nothing_to_the_next(clock, parts):
    parts.begin()
    parts.enter("forward")
    clock.seconds += 7
    parts.drop()
    parts.begin()
    clock.seconds += 1
    assert {name: spent for name, spent in parts.end().items() if spent} == {"other": 1}


class Event:
    """An event on a GPU's stream, which passes it when it is recorded."""

    clock: MovedClock
    waited_for: list["Event"]

    def __init__(self, enable_timing=False):
        assert enable_timing, "else it has no time"

    def record(self):
        self.at = self.clock.seconds

    def synchronize(self):
        self.waited_for.append(self)

    def elapsed_time(self, later):
        return 1000.0 * (later.at - self.at)  # torch says milliseconds


def test_step_parts_on_a_gpu_are_measured_on_its_stream_and_read_at_the_end(clock, monkeypatch):
    monkeypatch.setattr(Event, "clock", clock, raising=False)
    monkeypatch.setattr(Event, "waited_for", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    parts = StepParts(torch.device("cuda"), lambda: 0.0)
    for _ in range(2):  # nothing of the first step is left in the second
        step(clock, parts)
        assert Event.waited_for == []
        seconds = parts.end()
        assert (seconds["forward"], seconds["tensor_communication"], seconds["other"]) == (10, 4, 17)
        assert sum(seconds.values()) == 31
        (last,) = Event.waited_for
        assert last.at == clock.seconds
        Event.waited_for.clear()
