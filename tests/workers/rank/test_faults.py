"""Faults strike once, at the step and phase that they wait for, and cost nothing before they are armed."""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from manta.workers.liveness.progress import Progress
from manta.workers.protocol.messages import Fault
from manta.workers.rank import faults as module
from manta.workers.rank.faults import Faults, hang, kill_node, kill_store, run_out_of_memory, signal_self
from manta.workers.timing.step_phases import StepPhases

ROOT = Path(__file__).parents[3]


@pytest.fixture
def step():
    return StepPhases(torch.device("cpu"), Progress())


def armed(step, *faults):
    """Faults of one process, and the list of what has struck: (id, step)."""
    struck = []
    faults_of_rank = Faults(lambda fault, number: struck.append((fault.id, number)))
    faults_of_rank.arm(faults)
    step.on_phase = faults_of_rank.reached
    return faults_of_rank, struck


def walk(step, number):
    step.begin(number)
    for phase in ("data", "forward", "backward", "reduction", "optimizer", "snapshot"):
        with step.phase(phase):
            pass


def test_fault_watch_is_off_until_a_fault_is_armed():
    faults = Faults(lambda fault, number: None)
    assert not faults.armed
    faults.arm([])
    assert not faults.armed
    faults.arm([Fault("a", "kill", 0)])
    assert faults.armed


def test_faults_stay_armed_after_a_slow_down():
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


def test_rank_that_is_cut_off_does_not_connect_before_the_time_is_up(step, monkeypatch):
    """By a clock that only a sleep and this test move."""
    now, connected_at = [1000.0], []

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    faults, _ = armed(step)
    assert not faults.armed
    faults.cut_off(3.0)
    assert faults.armed
    now[0] += 1.0
    for _ in range(2):
        step.enter("connecting")
        connected_at.append(now[0])
        walk(step, 1)
        now[0] += 1.0
    assert connected_at == [1003.0, 1004.0], "the second time there is nothing to wait for"


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "snapshot"])
def test_fault_strikes_before_its_phase_begins(step, phase):
    _, struck = armed(step, Fault("a", "kill", 0, 1, phase))
    step.begin(1)
    assert struck == []
    with step.phase(phase):
        assert struck == [("a", 1)]


def test_struck_fault_is_not_repeated_if_armed_again(step):
    faults, struck = armed(step, Fault("a", "kill", 0))
    walk(step, 1)
    faults.arm([Fault("a", "kill", 0)])
    assert not faults.armed
    walk(step, 2)
    assert struck == [("a", 1)]


def test_start_and_recovery_faults_wait_for_the_next_generation(step):
    _, struck = armed(step, Fault("a", "kill", 0, 50, "start"), Fault("b", "kill", 0, 50, "recovery"))
    walk(step, 4)
    assert struck == []
    step.enter("connecting")
    assert struck == [("a", 4)]
    step.enter("restoring")
    assert struck == [("a", 4), ("b", 4)]


def test_memory_runs_out_for_this_process_only_and_for_a_moment():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError, match="injected"):
        run_out_of_memory()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(100_000_000)) == 100_000_000


def test_kill_store_finds_the_sibling_process_that_listens_on_the_port():
    """A parent with two children: one listens, the other kills whoever listens on that port, and nobody else."""
    script = (
        "import os, socket, sys, time\n"
        "from manta.workers.rank.faults import kill_store\n"
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


def test_fault_kills_no_store_at_a_port_of_another_process():
    with socket.create_server(("127.0.0.1", 0)) as door:
        assert not kill_store(door.getsockname()[1])
    assert os.getpid()


def test_slow_fault_sleeps_at_once_and_once_in_each_step(step, monkeypatch):
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    faults = Faults(lambda fault, number: faults.slow_down(fault.seconds))
    step.on_phase = faults.reached
    faults.arm([Fault("a", "slow", 0, 2, seconds=0.5)])
    walk(step, 1)
    assert slept == []
    walk(step, 2)
    assert slept == [0.5]
    walk(step, 3)
    assert slept == [0.5, 0.5]


def test_fault_signal_comes_at_once_or_after_its_delay(monkeypatch):
    sent, timers = [], []

    class Timer:
        def __init__(self, *arguments):
            self.arguments, self.daemon, self.started = arguments, False, False
            timers.append(self)

        def start(self):
            self.started = True

    monkeypatch.setattr(module, "os", SimpleNamespace(kill=lambda *arguments: sent.append(arguments), getpid=os.getpid))
    monkeypatch.setattr(module.threading, "Timer", Timer)
    signal_self(signal.SIGSTOP, 0.0)
    assert (sent, timers) == ([(os.getpid(), signal.SIGSTOP)], [])
    signal_self(signal.SIGKILL, 0.5)
    (timer,) = timers
    seconds, kill, arguments = timer.arguments
    assert (seconds, arguments, timer.daemon, timer.started) == (0.5, (os.getpid(), signal.SIGKILL), True, True)
    kill(*arguments)
    assert sent[1:] == [(os.getpid(), signal.SIGKILL)]


def test_hang_fault_holds_the_interpreter_lock_only_if_told_to(monkeypatch):
    """What would never return raises here."""

    class Held(Exception):
        pass

    def held(seconds):
        raise Held(seconds)

    class Event:
        def wait(self):
            raise TimeoutError

    monkeypatch.setattr(module.ctypes, "PyDLL", lambda name: SimpleNamespace(sleep=held))
    monkeypatch.setattr(module.threading, "Event", Event)
    with pytest.raises(Held):
        hang(hold_gil=True)
    with pytest.raises(TimeoutError):
        hang(hold_gil=False)


PARENTS = {100: 50, 50: 20, 20: 10, 10: 1, 11: 10, 12: 10, 13: 10}
NAMES = {50: "zygote", 20: "ray::NodeDaemon", 11: "ray::Agent.launch", 12: "ray::IDLE", 13: "ray::Agent"}


class Tree:
    """One of these processes; stands for psutil.Process."""

    def __init__(self, pid):
        self.pid = pid

    def ppid(self):
        return PARENTS[self.pid]

    def name(self):
        return NAMES[self.pid]

    def children(self):
        return [Tree(pid) for pid, parent in PARENTS.items() if parent == self.pid]


@pytest.mark.parametrize("child", [0, 7])
def test_killing_a_node_kills_its_agents_daemon_and_zygote_from_a_detached_child(monkeypatch, child):
    done = []

    def leave(status):
        done.append(("exit", status))
        raise SystemExit

    system = SimpleNamespace(
        getppid=lambda: 50,
        fork=lambda: child,
        setsid=lambda: done.append("alone"),
        kill=lambda *arguments: done.append(arguments),
        waitpid=lambda *arguments: done.append(("waited for", *arguments)),
        _exit=leave,
    )
    monkeypatch.setattr(module, "os", system)
    monkeypatch.setattr(module.psutil, "Process", Tree)
    if child:
        kill_node()
        assert done == [("waited for", 7, 0)]
    else:
        with pytest.raises(SystemExit):
            kill_node()
        assert done == ["alone", *((pid, signal.SIGKILL) for pid in (11, 13, 20, 50)), ("exit", 0)]
