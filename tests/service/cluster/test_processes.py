"""Processes are ended by identity."""

import os
import subprocess
import sys

import psutil

from service.cluster.processes import end_all, same_process, wait_until_ended


def start(**environment):
    script = "import subprocess; subprocess.run(['sleep', '1000'])"
    return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **environment})


def test_marked_processes_end_and_others_do_not():
    ours, other = start(MANTA_TEST_MARK="one"), start(MANTA_TEST_MARK="two")
    try:
        end_all(("MANTA_TEST_MARK", "one"), None)
        assert ours.wait(10) < 0
        assert other.poll() is None
        end_all(("MANTA_TEST_MARK", "none"), other.pid)
        assert other.wait(10) < 0
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_unreaped_process_counts_as_ended():
    process = subprocess.Popen(["sleep", "1000"])
    watched = psutil.Process(process.pid)
    created = watched.create_time()
    assert same_process(process.pid, created)
    assert not same_process(process.pid, created - 100)
    assert not wait_until_ended([watched], 0.0)
    process.kill()
    assert wait_until_ended([watched], 10.0)
    assert not same_process(process.pid, created)
    process.wait()
    assert wait_until_ended([watched], 0.0)
