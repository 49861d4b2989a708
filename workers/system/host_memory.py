"""How this process's C library deals with large blocks of memory.

glibc gives them back to the kernel as soon as they are freed, so a step's activations would meet fresh pages, with a
fault for each 4096 bytes, over and over again: hundreds to ten thousands a step, some 2 us each.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
# Larger blocks still come from the kernel and go back to it.
_LARGEST_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next step. Does nothing where malloc is not glibc's."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_TRIM_THRESHOLD, _NEVER)
        adjust(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
