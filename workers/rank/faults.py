"""Faults that are injected on request: when they strike, and how each harms the calling process.

A fault is armed in the trainer and strikes on its training thread, when that reaches the step and the phase: while any
is armed, `Faults.reached` is called at every entry into a phase (`StepPhases.on_phase`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable

import psutil

from manta.workers.liveness.progress import Phase
from manta.workers.protocol.messages import BETWEEN_STEPS, Fault, FaultPhase

_REACHED: dict[FaultPhase, tuple[Phase, ...]] = {"start": ("connecting", "restoring"), "recovery": ("restoring",)}
_FOREVER_SECONDS = 10**6
_OOM_BYTES, _CHUNK_BYTES = 64 * 1024 * 1024, 8 * 1024 * 1024


class InjectedError(RuntimeError):
    """Raised by the fault `exception`."""


class Faults:
    """The faults of one trainer process."""

    def __init__(self, strike: Callable[[Fault, int], None]):
        """`strike` carries out a fault, in the given step."""
        self._strike = strike
        self._waiting: dict[str, Fault] = {}
        self._struck: set[str] = set()
        self._slow_seconds = self._cut_until = 0.0

    @property
    def armed(self) -> bool:
        """Whether `reached` must be called at every phase."""
        return bool(self._waiting) or self._slow_seconds > 0 or self._cut_until > 0

    def arm(self, faults: Iterable[Fault]) -> None:
        """Let each of `faults` strike once, when its phase is reached. From any thread."""
        for fault in faults:
            if fault.id not in self._struck:
                self._waiting[fault.id] = fault

    def slow_down(self, seconds: float) -> None:
        """From now on each step takes `seconds` longer."""
        self._slow_seconds = seconds
        time.sleep(seconds)

    def cut_off(self, seconds: float) -> None:
        """For `seconds` no new connections are made: a rank that is about to connect waits until then."""
        self._cut_until = time.monotonic() + seconds

    def reached(self, step: int, phase: Phase) -> None:
        """The training thread is at `phase` of `step`: carry out faults for that."""
        if self._slow_seconds and phase == "data":
            time.sleep(self._slow_seconds)
        for fault in list(self._waiting.values()):
            between = fault.phase in BETWEEN_STEPS
            if phase in _REACHED.get(fault.phase, (fault.phase,)) and (between or step >= fault.at_step):
                del self._waiting[fault.id]
                self._struck.add(fault.id)
                self._strike(fault, step)
        if phase == "connecting":
            time.sleep(max(0.0, self._cut_until - time.monotonic()))


def hang(hold_gil: bool) -> None:
    """Never return. With `hold_gil` no other thread of the interpreter runs either, nor any Python signal handler."""
    while hold_gil:
        ctypes.PyDLL(None).sleep(_FOREVER_SECONDS)  # unlike CDLL it keeps the lock while it calls; a signal ends it
    threading.Event().wait()


def signal_self(number: signal.Signals, delay: float) -> None:
    """Send this process `number`, after `delay` seconds if they are not 0."""
    if not delay:
        os.kill(os.getpid(), number)
        return
    timer = threading.Timer(delay, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def run_out_of_memory() -> None:
    """Raise MemoryError like a process that gets no more memory. The limit is this process's own and is removed
    afterwards: the machine and its other processes are not affected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _OOM_BYTES, hard))
    held = []
    try:
        while True:
            held.append(bytearray(_CHUNK_BYTES))
    except MemoryError:
        count = len(held)
        held.clear()
        raise MemoryError(f"no more memory after {count * _CHUNK_BYTES} bytes (injected)") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def kill_node() -> None:
    """SIGKILL everything of Manta on this Ray node: agents, the node's daemon, its zygote, and thereby every trainer.
    Only for a process that was forked from the node's zygote."""
    zygote = psutil.Process(os.getppid())
    daemon = _parent_of(zygote)
    agents = [process.pid for process in _parent_of(daemon).children() if _name_of(process).startswith("ray::Agent")]
    # This process and its group end with its agent or its zygote: a child outside of that group finishes the work.
    child = os.fork()
    if child == 0:
        os.setsid()
        for pid in (*agents, daemon.pid, zygote.pid):
            os.kill(pid, signal.SIGKILL)
        os._exit(0)
    os.waitpid(child, 0)


def kill_store(port: int) -> bool:
    """SIGKILL the process that listens on `port`, if this node's zygote forked it; returns whether it did."""
    for sibling in psutil.Process(os.getppid()).children():
        if sibling.pid != os.getpid() and port in _listening_ports(sibling):
            sibling.kill()
            return True
    return False


def _parent_of(process: psutil.Process) -> psutil.Process:
    return psutil.Process(process.ppid())


def _name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return ""


def _listening_ports(process: psutil.Process) -> set[int]:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
