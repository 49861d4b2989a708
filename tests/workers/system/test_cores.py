"""Cores: how many there are, who else uses them, and who goes first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from unittest.mock import Mock, call

import pytest

from manta.workers.system import priority, resources
from manta.workers.system.priority import AUTOGROUP, NICENESS
from manta.workers.system.resources import OtherCpuLoad, usable_cores


@pytest.fixture
def cores(machine_files, monkeypatch):
    """The cores of a process on a machine with these files, which is bound to so many of them."""

    def make(bound, membership=None, **files):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(bound)))
        return usable_cores(machine_files(membership, **files))

    return make


GROUP, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu,cpuacct/docker/one"


@pytest.mark.parametrize(("bound", "membership", "files", "count"), [
    (64, None, {}, 64),
    (3, "0::/user", {f"{GROUP}/user/cpu.max": "max 100000"}, 3),
    *((16, "0::/job", {f"{GROUP}/job/cpu.max": f"{quota} 100000"}, count)
      for quota, count in (("800000", 8), ("250000", 2), ("50000", 1), ("max", 16), ("many", 16))),
    (16, "0::/pods/pod", {f"{GROUP}/pods/pod/cpu.max": "800000 100000", f"{GROUP}/pods/cpu.max": "400000 100000"}, 4),
    (16, "0::/kubepods/pod/container", {f"{GROUP}/cpu.max": "200000 100000"}, 2),  # as in a container
    *((16, "5:memory:/docker/one\n4:cpu,cpuacct:/docker/one",
       {f"{V1}/cpu.cfs_quota_us": quota, f"{V1}/cpu.cfs_period_us": "100000"}, count)
      for quota, count in (("300000", 3), ("-1", 16))),
])  # fmt: skip
def test_usable_cores_are_those_bound_to_up_to_the_whole_ones_that_any_group_allows(
    cores, bound, membership, files, count
):
    assert cores(bound, membership, **files) == count


@pytest.fixture
def clocks(monkeypatch):
    """Seconds that went by, that all cores were busy, and that this process was."""
    now = {"passed": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(resources.time, "monotonic", lambda: now["passed"])
    monkeypatch.setattr(resources, "_busy_seconds", lambda: now["busy"])
    monkeypatch.setattr(resources, "_own_seconds", lambda: now["own"])
    return now


def test_cores_busy_with_other_work_exclude_this_process_and_may_be_unknown(clocks):
    work = OtherCpuLoad()
    clocks.update(passed=10.0, busy=16.0, own=9.0)
    assert work.cores() == pytest.approx(0.7)
    clocks.update(own=17.0)  # the kernel counts in ticks
    assert work.cores() == 0.0
    clocks.update(busy=None)  # the kernel does not tell
    assert work.cores() is None


def test_busy_time_is_available_from_this_kernel():
    work, until = OtherCpuLoad(), time.process_time() + 0.05
    before = resources._busy_seconds(), resources._own_seconds()
    while time.process_time() < until:
        pass
    assert resources._own_seconds() > before[1] and resources._busy_seconds() >= before[0]
    assert work.cores() >= 0.0


SCRIPT = """
import os, threading
from manta.workers.system.priority import lower_priority
os.nice({before})
lower_priority(), lower_priority()
late = []
thread = threading.Thread(target=lambda: late.append(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start(), thread.join()
print(os.getpriority(os.PRIO_PROCESS, 0), *late)
"""

OF_A_SESSION = """
import threading
from manta.workers.system.priority import AUTOGROUP, lower_priority
lower_priority()
for thread in threading.enumerate()[1:]:
    thread.join()  # it asks again: somebody else on this machine has just asked
print(AUTOGROUP.read_text())
"""


def niceness_after(before: int) -> list[int]:
    """Niceness of a process and of a thread that it starts afterwards."""
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    return [int(word) for word in done.stdout.split()]


def test_process_and_its_threads_lower_their_priority_unless_it_is_lower_already():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness_after(0) == [max(NICENESS, before)] * 2
    assert niceness_after(19) == [19, 19]


def test_lower_priority_applies_to_its_own_session_only():
    if not AUTOGROUP.exists():
        pytest.skip("this kernel does not group processes by session")
    ours = AUTOGROUP.read_text()
    done = subprocess.run(
        [sys.executable, "-c", OF_A_SESSION], capture_output=True, text=True, check=True, start_new_session=True
    )
    if not done.stdout.split():
        pytest.skip("here a new session stays in the group that all have, which has no niceness")
    assert done.stdout.split()[-2:] == ["nice", str(NICENESS)]
    assert AUTOGROUP.read_text() == ours, "another session"


def test_lower_priority_is_retried_while_the_kernel_is_busy(monkeypatch):
    group = Mock(write_text=Mock(side_effect=[BlockingIOError(), BlockingIOError(), None]))
    monkeypatch.setattr(priority, "AUTOGROUP", group)
    monkeypatch.setattr(priority, "PAUSE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(os, "setpriority", lambda which, who, niceness: None)
    before = set(threading.enumerate())
    priority.lower_priority()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert group.write_text.mock_calls == [call(str(NICENESS))] * 3
