"""Processes are ended by identity."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from manta.service.cluster import processes
from manta.service.cluster.processes import (
    end_all,
    freeze_all,
    same_process,
    session_leader,
    start_of,
    started_in,
    wait_until_ended,
)


@pytest.fixture
def spawn():
    """Starts processes, with further variables of the environment, and ends them with the test."""
    started = []

    def make(command, environment=(), **options):
        started.append(subprocess.Popen(command, env={**os.environ, **dict(environment)}, **options))
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def start(spawn):
    """Starts a process with a child, whose end it survives."""
    script = "import subprocess, time; subprocess.run(['sleep', '1000']); time.sleep(1000)"
    return lambda mark: spawn([sys.executable, "-c", script], {"MANTA_TEST_MARK": mark})


def test_processes_with_the_mark_are_ended_and_others_are_not(start):
    ours, other = start("one"), start("two")
    end_all(("MANTA_TEST_MARK", "one"), None)
    assert ours.wait(60) < 0
    assert other.poll() is None
    end_all(("MANTA_TEST_MARK", "none"), other.pid)
    assert other.wait(60) < 0


def test_processes_started_during_a_kill_are_ended_too(start, monkeypatch):
    first, late = start("three"), []

    def wait(killed, seconds):
        if not late:
            late.append(start("three"))
        return wait_until_ended(killed, seconds)

    monkeypatch.setattr(processes, "wait_until_ended", wait)
    end_all(("MANTA_TEST_MARK", "three"), first.pid)
    assert late[0].wait(60) < 0


def test_process_stuck_in_the_kernel_is_not_waited_for_forever(start, monkeypatch):
    process = start("four")
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "kill", lambda process: None)
        patch.setattr(processes, "KILL_SECONDS", 0.05)
        end_all(("MANTA_TEST_MARK", "four"), None)
    assert process.poll() is None
    end_all(("MANTA_TEST_MARK", "four"), None)


def test_processes_with_the_mark_and_command_are_frozen_and_can_be_killed(spawn):
    script, environment = "import time; time.sleep(1000)", {"MANTA_TEST_MARK": "six"}
    rank, other = (spawn([sys.executable, "-c", script, word], environment) for word in ("rank", "other"))
    freeze_all(("MANTA_TEST_MARK", "six"), "rank")
    assert os.WIFSTOPPED(os.waitpid(rank.pid, os.WUNTRACED)[1])
    assert psutil.Process(other.pid).status() != psutil.STATUS_STOPPED
    end_all(("MANTA_TEST_MARK", "six"), None)
    assert rank.wait(60) < 0 and other.wait(60) < 0


def test_session_leader_is_found_by_mark_and_command(spawn):
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)", "head"]
    environment = {"MANTA_TEST_MARK": "five"}
    leader, member = (spawn(command, environment, start_new_session=own, stdout=-1) for own in (True, False))
    for each in (leader, member):
        each.stdout.readline()
    assert session_leader(("MANTA_TEST_MARK", "five"), ("head",)) == leader.pid
    assert session_leader(("MANTA_TEST_MARK", "five"), ("head", "worker")) is None
    assert session_leader(("MANTA_TEST_MARK", "six"), ("head",)) is None


SPAWN = """
import subprocess, time
print(subprocess.Popen(["sleep", "1000"], env={}).pid, flush=True)
time.sleep(1000)
"""


def test_descendants_of_a_leader_end_without_a_mark(spawn):
    leader = spawn([sys.executable, "-c", SPAWN], stdout=subprocess.PIPE)
    child = psutil.Process(int(leader.stdout.readline()))
    try:
        end_all(("MANTA_TEST_MARK", "seven"), leader.pid)
        assert wait_until_ended([child], 0.0) and leader.wait(60) < 0
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_waiting_for_several_processes_ends_with_the_last(spawn):
    first, second = (spawn(["sleep", "1000"]) for _ in range(2))
    watched = [psutil.Process(each.pid) for each in (first, second)]
    first.kill()
    assert not wait_until_ended(watched, 0.05)
    second.kill()
    assert wait_until_ended(watched, 10.0)


def test_process_with_a_reused_pid_is_not_waited_for():
    class Gone(psutil.Process):
        def is_running(self):
            return False

    assert wait_until_ended([Gone(os.getpid())], 0.0)


def test_process_start_time_is_read_for_any_process_name(spawn):
    script = "print(open('/proc/self/comm', 'w').write('a) Z 1 (b'), flush=True); input()"
    process = spawn([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    before = start_of(process.pid) if process.stdout.readline() else ""
    assert before and same_process(process.pid, before)
    created = psutil.Process(process.pid).create_time() - psutil.boot_time()
    assert int(before.split("/")[1]) / os.sysconf("SC_CLK_TCK") == pytest.approx(created, abs=2.0)


def test_unreaped_process_counts_as_ended(spawn):
    process = spawn(["sleep", "1000"])
    watched = psutil.Process(process.pid)
    started, created = start_of(process.pid), watched.create_time()
    assert not wait_until_ended([watched], 0.0)
    process.kill()
    assert wait_until_ended([watched], 10.0)
    assert not same_process(process.pid, started)
    assert not same_process(process.pid, created)
    process.wait()
    assert not same_process(process.pid, started)
    assert wait_until_ended([watched], 0.0)


def test_process_is_recognised_after_a_clock_change(monkeypatch):
    me = os.getpid()
    written = {"pid": me, "started": start_of(me)}
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: real(process) + 3600)
    assert same_process(me, started_in(written))
    monkeypatch.setattr("manta.service.cluster.processes.BOOT_ID", Path(__file__))
    assert not same_process(me, started_in(written)), "after another boot it is another process"


def test_process_with_another_start_time_is_not_the_same():
    me = os.getpid()
    boot, ticks = start_of(me).split("/")
    assert not same_process(me, f"{boot}/{int(ticks) - 1}")
    with pytest.raises(ProcessLookupError):
        start_of(2**22 + 1)


@pytest.mark.parametrize("started", [1.0, "a boot/1"])
def test_missing_process_matches_no_recorded_start(started):
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not same_process(gone.pid, started)


def test_start_in_a_file_of_a_release_before_is_unix_time():
    me = os.getpid()
    created = psutil.Process(me).create_time()
    assert same_process(me, started_in({"pid": me, "created": created}))
    assert not same_process(me, started_in({"pid": me, "created": created - 100}))
    with pytest.raises(KeyError):
        started_in({"pid": me})


def handles_of_processes():
    """How many of this process's files are such; other threads may open and close others."""
    names = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(file.readlink()))
    return names.count("anon_inode:[pidfd]")


def test_waiting_for_processes_leaves_no_handle_open(spawn):
    process, before = spawn(["sleep", "1000"]), handles_of_processes()
    assert not wait_until_ended([psutil.Process(process.pid)], 0.0)
    assert handles_of_processes() == before
