"""Every moment of a measured step belongs to exactly one part."""

import time

import pytest
import torch

from workers.comm import step_parts
from workers.comm.step_parts import PARTS, StepParts


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    found = Clock()
    monkeypatch.setattr(step_parts, "time", found)
    return found


def test_an_inner_part_stops_the_outer_one(clock):
    parts = StepParts(torch.device("cpu"))
    parts.begin()
    clock.now += 1
    with parts.part("forward"):
        clock.now += 2
        with parts.part("tensor_communication"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    seconds = parts.end()
    assert (seconds["forward"], seconds["tensor_communication"], seconds["other"]) == (10, 4, 17)
    assert set(seconds) == set(PARTS)
    assert sum(seconds.values()) == 31


def test_forward_work_within_backward_is_recomputation(clock):
    parts = StepParts(torch.device("cpu"))
    parts.begin()
    with parts.part("forward"), parts.forward_work():
        clock.now += 1
    with parts.part("backward"), parts.forward_work():
        clock.now += 2
    seconds = parts.end()
    assert (seconds["forward"], seconds["recompute"], seconds["backward"]) == (1, 2, 0)


def test_idle_time_of_a_message_is_moved_to_the_bubble(clock):
    parts = StepParts(torch.device("cpu"))
    parts.begin()
    with parts.part("pipeline_communication"):
        clock.now += 5
    parts.move("pipeline_communication", "bubble", 3)
    seconds = parts.end()
    assert (seconds["pipeline_communication"], seconds["bubble"]) == (2, 3)


def test_nothing_is_kept_while_nothing_is_measured():
    parts = StepParts(torch.device("cpu"))
    with parts.part("forward"):
        time.sleep(0)
    parts.begin()
    assert sum(parts.end().values()) < 1.0
    assert not parts.measuring
