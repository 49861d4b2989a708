"""Limits for code of others, which may never end, or use any amount of memory: processor time, and address space of the
process. For the main thread of a process that does nothing else meanwhile."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 10.0
"""Processor time, so that a busy machine makes no difference."""
LAST_SECONDS = 20.0
"""Processor time after which the process is killed: a single long operation cannot be interrupted otherwise."""
MAX_CHARACTERS = 2**26
"""Maximum length of the output."""
MEMORY_BYTES = 2**31
"""Maximum memory in addition to what is used before."""


class TooMuch(Exception):
    """A limit was reached; says which."""


@contextmanager
def bounded() -> Iterator[None]:
    """Within the block, raise TooMuch after SECONDS of processor time, or MemoryError beyond MEMORY_BYTES; kill the
    process, with SIGVTALRM, after LAST_SECONDS."""
    handler = signal.signal(signal.SIGPROF, _too_long)
    deadly = signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_lower(_address_space() + MEMORY_BYTES, *before), before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_VIRTUAL, LAST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)
        signal.signal(signal.SIGVTALRM, deadly)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooMuch(f"it is not done after {SECONDS:.0f} seconds of computing")


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _lower(*limits: int) -> int:
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)
