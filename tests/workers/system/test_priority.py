"""A process that computes gives way, once and for all, and never goes before others."""

import os
import subprocess
import sys
import threading

import pytest

from manta.workers.system import processes
from manta.workers.system.processes import AUTOGROUP, NICENESS

SCRIPT = """
import os, threading
from manta.workers.system.processes import lower_priority
os.nice({before})
lower_priority(), lower_priority()
late = []
thread = threading.Thread(target=lambda: late.append(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start(), thread.join()
print(os.getpriority(os.PRIO_PROCESS, 0), *late)
"""

OF_A_SESSION = """
import threading
from manta.workers.system.processes import AUTOGROUP, lower_priority
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

    monkeypatch.setattr(processes, "AUTOGROUP", Autogroup())
    monkeypatch.setattr(processes, "PAUSE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(os, "setpriority", lambda which, who, niceness: None)
    before = set(threading.enumerate())
    processes.lower_priority()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert not answers
