"""Faults strike once, at the step and phase that they wait for, and cost nothing before they are armed."""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from workers.liveness.progress import Progress
from workers.messages import Fault
from workers.rank.faults import ArmedProgress, Faults, kill_store, run_out_of_memory

ROOT = Path(__file__).parents[3]


@pytest.fixture
def progress():
    return Progress()


def armed(progress, *faults):
    """Faults of one process, and the list of what has struck: (id, step)."""
    struck = []
    found = Faults(lambda fault, step: struck.append((fault.id, step)))
    found.arm(faults, progress)
    return found, struck


def walk(progress, step):
    progress.begin_step(step)
    for phase in ("forward", "backward", "reduction", "optimizer", "snapshot"):
        progress.at(phase)


def test_nothing_is_watched_until_a_fault_is_armed(progress):
    faults, _ = armed(progress)
    assert type(progress) is Progress
    faults.arm([Fault("a", "kill", 0)], progress)
    assert type(progress) is ArmedProgress


def test_a_fault_strikes_once_in_its_phase_from_its_step_on(progress):
    _, struck = armed(progress, Fault("a", "kill", 0, 3, "reduction"), Fault("b", "kill", 0, 1, "checkpoint"))
    for step in range(1, 6):
        walk(progress, step)
    assert struck == [("a", 3)]
    progress.at("checkpoint")
    assert struck == [("a", 3), ("b", 5)]


def test_a_fault_that_is_armed_again_after_it_struck_is_not_repeated(progress):
    faults, struck = armed(progress, Fault("a", "kill", 0))
    walk(progress, 1)
    faults.arm([Fault("a", "kill", 0)], progress)
    walk(progress, 2)
    assert struck == [("a", 1)]


def test_faults_of_a_beginning_wait_for_the_next_generation_whatever_the_step(progress):
    _, struck = armed(progress, Fault("a", "kill", 0, 50, "start"), Fault("b", "kill", 0, 50, "recovery"))
    walk(progress, 4)
    assert struck == []
    progress.at("connecting")
    assert struck == [("a", 4)]
    progress.at("restoring")
    assert struck == [("a", 4), ("b", 4)]


def test_a_fault_from_before_there_was_anything_to_watch_is_not_lost(progress):
    faults, struck = armed(None, Fault("a", "kill", 0))
    faults.arm([], progress)
    walk(progress, 1)
    assert struck == [("a", 1)]


def test_memory_runs_out_for_this_process_only_and_for_a_moment():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError, match="injected"):
        run_out_of_memory()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(100_000_000)) == 100_000_000


def test_the_store_is_found_by_its_port_among_the_siblings():
    """A parent with two children: one listens, the other kills whoever listens on that port, and nobody else."""
    script = (
        "import os, socket, sys, time\n"
        "from workers.rank.faults import kill_store\n"
        "door = socket.create_server(('127.0.0.1', 0))\n"
        "port = door.getsockname()[1]\n"
        "store = os.fork()\n"
        "if store == 0:\n"
        "    time.sleep(60)\n"
        "door.close()\n"
        "if os.fork() == 0:\n"
        "    os._exit(0 if kill_store(port) and not kill_store(1) else 1)\n"
        "print(sorted(os.waitpid(-1, 0)[1] for _ in range(2)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == f"[0, {int(signal.SIGKILL)}]", done.stderr


def test_a_port_of_somebody_else_is_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as door:
        assert not kill_store(door.getsockname()[1])
    assert os.getpid()
