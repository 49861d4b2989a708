"""Cores: how many there are, who else uses them, and who goes first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from manta.workers.system import priority, resources
from manta.workers.system.priority import AUTOGROUP, NICENESS
from manta.workers.system.resources import OtherCpuLoad, usable_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine's files, and how many of its cores the process is bound to."""

    def make(bound, membership=None, **files):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(bound)))
        if membership is not None:
            files["proc/self/cgroup"] = membership
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content + "\n")
        return usable_cores(tmp_path)

    return make


def test_unlimited_process_has_the_cores_it_is_bound_to(machine):
    assert machine(64) == 64
    assert machine(3, "0::/user", **{"sys/fs/cgroup/user/cpu.max": "max 100000"}) == 3


@pytest.mark.parametrize(("quota", "cores"), [("800000", 8), ("250000", 2), ("50000", 1), ("max", 16), ("many", 16)])
def test_core_limit_is_counted_in_whole_cores(machine, quota, cores):
    assert machine(16, "0::/job", **{"sys/fs/cgroup/job/cpu.max": f"{quota} 100000"}) == cores


def test_core_limits_of_enclosing_groups_apply(machine):
    files = {"sys/fs/cgroup/pods/pod/cpu.max": "max 100000", "sys/fs/cgroup/pods/cpu.max": "400000 100000"}
    assert machine(16, "0::/pods/pod", **files) == 4


def test_core_limit_in_a_container_is_read_from_the_topmost_group(machine):
    assert machine(16, "0::/kubepods/pod/container", **{"sys/fs/cgroup/cpu.max": "200000 100000"}) == 2


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 16)])
def test_core_limits_of_cgroups_v1_are_read(machine, quota, cores):
    group = "sys/fs/cgroup/cpu,cpuacct/docker/one"
    files = {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": "100000"}
    assert machine(16, "5:memory:/docker/one\n4:cpu,cpuacct:/docker/one", **files) == cores


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


def test_process_and_its_threads_lower_their_priority():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness_after(0) == [max(NICENESS, before)] * 2


def test_lower_priority_keeps_a_process_that_is_nicer_already():
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
    answers = [BlockingIOError(), BlockingIOError(), None]

    class Autogroup:
        def write_text(self, text):
            assert text == str(NICENESS)
            if answer := answers.pop(0):
                raise answer

    monkeypatch.setattr(priority, "AUTOGROUP", Autogroup())
    monkeypatch.setattr(priority, "PAUSE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(os, "setpriority", lambda which, who, niceness: None)
    before = set(threading.enumerate())
    priority.lower_priority()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert not answers
