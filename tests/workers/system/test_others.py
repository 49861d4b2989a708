"""What others compute is told apart from what this process does."""

from __future__ import annotations

import time

import pytest

from manta.workers.system import resources
from manta.workers.system.resources import OtherCpuLoad


@pytest.fixture
def clocks(monkeypatch):
    """Seconds that went by, that all cores were busy, and that this process was."""
    now = {"passed": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(resources.time, "monotonic", lambda: now["passed"])
    monkeypatch.setattr(resources, "_busy_seconds", lambda: now["busy"])
    monkeypatch.setattr(resources, "_own_seconds", lambda: now["own"])
    return now


def test_cores_busy_with_other_work_exclude_this_process(clocks):
    work = OtherCpuLoad()
    clocks.update(passed=10.0, busy=16.0, own=9.0)
    assert work.cores() == pytest.approx(0.7)
    clocks.update(own=17.0)  # the kernel counts in ticks
    assert work.cores() == 0.0


def test_other_work_is_unknown_if_the_kernel_does_not_tell(clocks):
    work = OtherCpuLoad()
    clocks.update(busy=None)
    assert work.cores() is None


def test_busy_time_is_available_from_this_kernel():
    work, until = OtherCpuLoad(), time.process_time() + 0.05
    before = resources._busy_seconds(), resources._own_seconds()
    while time.process_time() < until:
        pass
    assert resources._own_seconds() > before[1] and resources._busy_seconds() >= before[0]
    assert work.cores() >= 0.0
