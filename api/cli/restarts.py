"""Restarting a service that Ray terminates: Ray's library terminates its process without notice when a new head node
responds at the address of the previous one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from manta.service.own_files import OwnFileUnusable, read_own
from manta.workers.system.processes import ParentDeathSignal

log = logging.getLogger(__name__)

ABORTS = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS})
"""Signals by which a process may terminate itself. Signals sent by others, such as SIGKILL, are meant to end it."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PAUSE_SECONDS = 1.0
"""Delay before a restart, so that a service that ends immediately does not use a whole core."""


def restart_when_ended_by_ray(run: Callable[[bool], None], service_file: Path) -> None:
    """Call `run` in a forked process, and again in another if that process ends unexpectedly while `service_file` shows
    that it is serving; the argument of `run` is whether it is a restart. This process ends with the status of the
    child; signals are forwarded to the child, which dies with this process. Call it before Ray is imported and before
    any threads start."""
    again = False
    while True:
        child = _fork()
        if child == 0:
            run(again)
            return
        status = os.waitpid(child, 0)[1]
        for each in FORWARDED:
            signal.signal(each, signal.SIG_DFL)
        if not (_ended_by_itself(status) and _is_recorded_service(child, service_file)):
            _end_as(status)
        log.error("Ray has terminated the service; it is restarted")
        time.sleep(PAUSE_SECONDS)
        again = True


def _fork() -> int:
    """Like os.fork, but the parent then forwards signals to the child, and the child dies with the parent."""
    parent, parent_death = os.getpid(), ParentDeathSignal()
    with _deferred(FORWARDED):
        child = os.fork()
        if child != 0:
            for each in FORWARDED:
                signal.signal(each, lambda number, _: os.kill(child, number))
    if child == 0:
        parent_death.arm(parent)
    return child


@contextlib.contextmanager
def _deferred(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Defers signals until the end of the block, in whichever process runs then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _ended_by_itself(status: int) -> bool:
    return os.WTERMSIG(status) in ABORTS if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status) != 0


def _is_recorded_service(pid: int, service_file: Path) -> bool:
    """Whether `service_file` still names `pid`: a service that ends regularly removes its file."""
    try:
        return int(json.loads(read_own(service_file) or "")["pid"]) == pid
    except (OwnFileUnusable, ValueError, TypeError, KeyError):
        return False


def _end_as(status: int) -> None:
    """End this process with the exit `status` of another."""
    if not os.WIFSIGNALED(status):
        raise SystemExit(os.waitstatus_to_exitcode(status))
    ended_by = os.WTERMSIG(status)
    if ended_by != signal.SIGKILL:
        signal.signal(ended_by, signal.SIG_DFL)
    os.kill(os.getpid(), ended_by)
    raise SystemExit(128 + ended_by)  # the first process of a container is not ended by its own signals
