"""How a process that is asked to end (by SIGTERM, which machines that are taken away send) is notified of that and
continues."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable

NOTICE_SECONDS = 25.0
"""How long a machine is assumed to live after SIGTERM: clouds give 30 s and more, Kubernetes 30 s by default."""
CHUNK_BYTES = 65536


def on_termination(act: Callable[[], None]) -> None:
    """From now on SIGTERM does not end this process, but calls `act` on a thread.

    The handler is faulthandler's, in C: Python's own runs only on the main thread, which in Ray's workers does not
    return to Python.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    faulthandler.register(signal.SIGTERM, file=write, all_threads=False, chain=False)

    def listen() -> None:
        while os.read(read, CHUNK_BYTES):
            act()

    threading.Thread(target=listen, name="termination", daemon=True).start()
