"""Processes identified by more than their number, so that only our own are ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

KILL_SECONDS = 10.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with an id of the machine's current boot."""
# Positions in proc(5) of the start time (22nd field) after the state (3rd), and the states of ended processes.
_TICKS_AFTER_STATE, _ENDED_STATES = 18, frozenset("ZXx")


def start_of(pid: int) -> str:
    """When process `pid` started, as a mark that no other process with this number has: the boot of the machine, and
    the clock ticks since then. Unlike a time of day it does not change when the clock is set. Raises ProcessLookupError
    if no such process runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid} runs") from error
    state, *others = stat.rpartition(")")[2].split()  # the name before it may contain anything
    if state in _ENDED_STATES:
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{BOOT_ID.read_text().strip()}/{others[_TICKS_AFTER_STATE]}"


def same_process(pid: int, started: str | float) -> bool:
    """Whether process `pid` runs and is the one that `started` then: a mark of `start_of`, or Unix time in seconds, as
    earlier releases recorded it."""
    if isinstance(started, str):
        try:
            return start_of(pid) == started
        except ProcessLookupError:
            return False
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 0.02 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started_in(document: Mapping[str, Any]) -> str | float:
    """The recorded start of the process whose `pid` a file contains. Raises KeyError if there is none, ValueError and
    TypeError if it is invalid."""
    if "started" in document:
        return str(document["started"])
    return float(document["created"])  # written by an earlier release


def end_all(mark: tuple[str, str], leader: int | None) -> None:
    """Kill process `leader`, all its descendants, and every process with `mark` (name, value) in its environment.
    Returns when all are gone."""
    alive = {*_family(leader), *_marked(mark)}
    while alive:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if not wait_until_ended(alive, KILL_SECONDS):
            return  # in the hands of the kernel, which ends them when their last system call returns
        alive = set(_marked(mark))  # started in the meantime


def freeze_all(mark: tuple[str, str], word: str) -> None:
    """Stop (SIGSTOP) every process with `mark` (name, value) in its environment and `word` in its command line."""
    for process in _marked(mark):
        with contextlib.suppress(psutil.Error, OSError):
            if word in process.cmdline():
                process.suspend()


def session_leader(mark: tuple[str, str], words: Collection[str]) -> int | None:
    """The process with `mark` (name, value) in its environment and all `words` in its command line that leads a session
    of processes; None if there is none."""
    for process in _marked(mark):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == process.pid and set(words) <= set(process.cmdline()):
                return int(process.pid)
    return None


def children_named(pid: int, names: Collection[str]) -> dict[str, int]:
    """Process ids of the running children of process `pid` with these names, by name; none if it does not run."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children()
        living = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
        return {name: each.pid for each in living if (name := each.name()) in names}
    return {}


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait until all `processes` have ended, at most `seconds`. Returns whether they have. A process that has ended but
    is not reaped by its parent counts as ended."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as open_handles:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                handle = os.pidfd_open(process.pid)
                open_handles.callback(os.close, handle)
                if process.is_running():  # otherwise the number now belongs to another process
                    waiting.register(handle, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for key, _ in ready:
                waiting.unregister(key.fileobj)
    return True


def _family(leader: int | None) -> Iterable[psutil.Process]:
    if leader is None:
        return []
    try:
        process = psutil.Process(leader)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _marked(mark: tuple[str, str]) -> Iterable[psutil.Process]:
    """Processes with `mark` in their environment, including those whose parents are gone."""
    name, value = mark
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                yield process
