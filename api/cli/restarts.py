"""A service that is restarted when Ray ends it: Ray's library ends the process that uses it, without notice, when a new
head answers in place of the one that it knew."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from workers.system.parent_death import ParentDeathSignal

log = logging.getLogger(__name__)

ABORTS = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS})
"""Signals by which a process may be ended from within. What others send, such as SIGKILL, is meant to end it."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PAUSE_SECONDS = 1.0
"""Before it is started again, so that one that ends at once does not eat a core."""


def run_again_when_ended_by_ray(run: Callable[[bool], None], service_file: Path) -> None:
    """Call `run` in a process forked from this one, and again in another when that one ends without an order while
    `service_file` says that it serves; the argument says whether it is again. Ends this process as that one ends;
    signals are passed on to it, and it dies with this one.

    Call it before Ray is imported and before there are threads."""
    again = False
    while True:
        child = _fork()
        if child == 0:
            run(again)
            return
        status = os.waitpid(child, 0)[1]
        for each in FORWARDED:
            signal.signal(each, signal.SIG_DFL)
        if not (_ended_from_within(status) and _is_said_to_serve(child, service_file)):
            _end_as(status)
        log.error("Ray has ended the service; it is restarted")
        time.sleep(PAUSE_SECONDS)
        again = True


def _fork() -> int:
    """As os.fork: in the parent signals are passed on from then on, and the child dies with it."""
    parent, parent_death = os.getpid(), ParentDeathSignal()
    with _kept_back(FORWARDED):
        child = os.fork()
        if child != 0:
            for each in FORWARDED:
                signal.signal(each, lambda number, _: os.kill(child, number))
    if child == 0:
        parent_death.arm(parent)
    return child


@contextlib.contextmanager
def _kept_back(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Signals that come meanwhile arrive after it, in whichever process this is then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _ended_from_within(status: int) -> bool:
    return os.WTERMSIG(status) in ABORTS if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status) != 0


def _is_said_to_serve(pid: int, service_file: Path) -> bool:
    """A service that ends in order takes its file away."""
    try:
        return int(json.loads(service_file.read_text())["pid"]) == pid
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _end_as(status: int) -> None:
    """End this process with the `status` of one that has ended."""
    if not os.WIFSIGNALED(status):
        raise SystemExit(os.waitstatus_to_exitcode(status))
    ended_by = os.WTERMSIG(status)
    if ended_by != signal.SIGKILL:
        signal.signal(ended_by, signal.SIG_DFL)
    os.kill(os.getpid(), ended_by)
    raise SystemExit(128 + ended_by)  # the first process of a container, which its own signals do not end
