"""Ways to do harm to the calling process, for those who test whether it is noticed."""

from __future__ import annotations

import ctypes
import threading

_FOREVER_SECONDS = 10**6


def hang(hold_gil: bool) -> None:
    """Never return. With `hold_gil` no other thread of the interpreter runs either, and no Python signal handler."""
    while hold_gil:
        ctypes.PyDLL(None).sleep(_FOREVER_SECONDS)  # unlike CDLL it keeps the lock while it calls; a signal ends it
    threading.Event().wait()
