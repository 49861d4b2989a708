"""Processes that end with the one that forked them."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


class ParentDeathSignal:
    """Asks the kernel to kill the calling process when its parent dies, even by SIGKILL.

    Created before the fork, since loading the C library's handle afterwards would take time in each child.
    """

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arm(self, parent: int) -> None:
        """Called in the child of process `parent`; exits at once if that parent is already gone."""
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
