"""Faults strike once, at the step and phase that they wait for, and cost nothing before they are armed."""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.liveness.progress import Progress
from workers.protocol.messages import Fault
from workers.rank.faults import Faults, kill_store, run_out_of_memory
from workers.timing.step_phases import StepPhases

ROOT = Path(__file__).parents[3]


@pytest.fixture
def step():
    return StepPhases(torch.device("cpu"), Progress())


def armed(step, *faults):
    """Faults of one process, and the list of what has struck: (id, step)."""
    struck = []
    found = Faults(lambda fault, number: struck.append((fault.id, number)))
    found.arm(faults)
    step.on_phase = found.reached
    return found, struck


def walk(step, number):
    step.begin(number)
    for phase in ("data", "forward", "backward", "reduction", "optimizer", "snapshot"):
        with step.phase(phase):
            pass


def test_nothing_is_watched_until_a_fault_is_armed():
    faults = Faults(lambda fault, number: None)
    assert not faults.armed
    faults.arm([])
    assert not faults.armed
    faults.arm([Fault("a", "kill", 0)])
    assert faults.armed


def test_a_process_that_was_slowed_down_stays_watched():
    faults = Faults(lambda fault, number: faults.slow_down(0.0001))
    faults.arm([Fault("a", "slow", 0)])
    faults.reached(1, "data")
    assert faults.armed


def test_a_fault_strikes_once_in_its_phase_from_its_step_on(step):
    _, struck = armed(step, Fault("a", "kill", 0, 3, "reduction"), Fault("b", "kill", 0, 1, "checkpoint"))
    for number in range(1, 6):
        walk(step, number)
    assert struck == [("a", 3)]
    with step.phase("checkpoint"):
        assert struck == [("a", 3), ("b", 5)]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "snapshot"])
def test_a_fault_strikes_before_the_phase_does_anything(step, phase):
    _, struck = armed(step, Fault("a", "kill", 0, 1, phase))
    step.begin(1)
    assert struck == []
    with step.phase(phase):
        assert struck == [("a", 1)]


def test_a_fault_that_is_armed_again_after_it_struck_is_not_repeated(step):
    faults, struck = armed(step, Fault("a", "kill", 0))
    walk(step, 1)
    faults.arm([Fault("a", "kill", 0)])
    assert not faults.armed
    walk(step, 2)
    assert struck == [("a", 1)]


def test_faults_of_a_beginning_wait_for_the_next_generation_whatever_the_step(step):
    _, struck = armed(step, Fault("a", "kill", 0, 50, "start"), Fault("b", "kill", 0, 50, "recovery"))
    walk(step, 4)
    assert struck == []
    step.enter("connecting")
    assert struck == [("a", 4)]
    step.enter("restoring")
    assert struck == [("a", 4), ("b", 4)]


def test_a_fault_from_before_there_was_anything_to_watch_is_not_lost(step):
    faults = Faults(lambda fault, number: struck.append((fault.id, number)))
    struck = []
    faults.arm([Fault("a", "kill", 0)])
    step.on_phase = faults.reached
    walk(step, 1)
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
