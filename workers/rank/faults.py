"""Faults that are injected on request: when they strike, and how each harms the calling process.

A fault is armed in the trainer and strikes on its training thread, when that reaches the step and the phase: once
any is armed, `Faults.reached` is called at every entry into a phase (`StepPhases.on_phase`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from workers.liveness.progress import Phase
from workers.messages import BETWEEN_STEPS, Fault, FaultPhase

STRUCK = "fault_struck"
"""Type of the event with which a rank says, in its last words, that a fault strikes now."""

_REACHED: dict[FaultPhase, tuple[Phase, ...]] = {"start": ("connecting", "restoring"), "recovery": ("restoring",)}
_FOREVER_SECONDS = 10**6
_OOM_BYTES, _CHUNK_BYTES = 64 * 1024 * 1024, 8 * 1024 * 1024
_LISTENING = "0A"


class InjectedError(RuntimeError):
    """What the fault `exception` raises."""


class Faults:
    """The faults of one trainer process."""

    def __init__(self, strike: Callable[[Fault, int], None]):
        """`strike` carries a fault out, in the given step."""
        self._strike = strike
        self._waiting: dict[str, Fault] = {}
        self._struck: set[str] = set()
        self._slow_seconds = 0.0

    @property
    def armed(self) -> bool:
        """Whether `reached` has to be called at every phase."""
        return bool(self._waiting) or self._slow_seconds > 0

    def arm(self, faults: Iterable[Fault]) -> None:
        """Let `faults` strike when their phase is reached, each once. From any thread."""
        for fault in faults:
            if fault.id not in self._struck:
                self._waiting[fault.id] = fault

    def slow_down(self, seconds: float) -> None:
        """From now on each step takes `seconds` longer."""
        self._slow_seconds = seconds
        time.sleep(seconds)

    def reached(self, step: int, phase: Phase) -> None:
        """The training thread is at `phase` of `step`: carry out what waits for that."""
        if self._slow_seconds and phase == "data":
            time.sleep(self._slow_seconds)
        for fault in list(self._waiting.values()):
            between = fault.phase in BETWEEN_STEPS
            if phase in _REACHED.get(fault.phase, (fault.phase,)) and (between or step >= fault.at_step):
                del self._waiting[fault.id]
                self._struck.add(fault.id)
                self._strike(fault, step)


def hang(hold_gil: bool) -> None:
    """Never return. With `hold_gil` no other thread of the interpreter runs either, and no Python signal handler."""
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
    """Raise MemoryError as a process does that gets no more memory. The limit is this process's own and is lifted
    again: the machine and its other processes never lack anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + _OOM_BYTES, hard))
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
    """SIGKILL to all that Manta runs on this Ray node: agents, the node's daemon, its zygote, and with that every
    trainer. Only for a process that was forked from the node's zygote."""
    zygote = os.getppid()
    daemon = _parent_of(zygote)
    agents = [pid for pid in _children_of(_parent_of(daemon)) if _name_of(pid).startswith("ray::Agent")]
    # This process, and its group, end with its agent, or with its zygote: a child that has left it sees it through.
    child = os.fork()
    if child == 0:
        os.setsid()
        for pid in (*agents, daemon, zygote):
            os.kill(pid, signal.SIGKILL)
        os._exit(0)
    os.waitpid(child, 0)


def kill_store(port: int) -> bool:
    """SIGKILL to the process that listens on `port`, if the zygote of this node forked it; whether it did."""
    inodes = _listening_inodes(port)
    for pid in _children_of(os.getppid()):
        if pid != os.getpid() and inodes & _socket_inodes(pid):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[1])


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_child = _parent_of(int(entry.name)) == parent
            except OSError:  # it has ended meanwhile
                continue
            if is_child:
                found.append(int(entry.name))
    return found


def _listening_inodes(port: int) -> set[str]:
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        if (table := Path(f"/proc/net/{name}")).exists()
        for line in table.read_text(encoding="ascii").splitlines()[1:]
    ]
    return {row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port}


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:  # it has ended meanwhile, or closed one
        pass
    return found
