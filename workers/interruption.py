"""Ctrl-C in a command of the engine: one word on stderr and exit status 130, also while the command is still loading.

While modules load, the process ends at once: a KeyboardInterrupt in the middle of an import may surface as another
error of the module that is being loaded (numpy, torch, enum), or as a warning after which loading continues. This
module imports nothing that takes time.

A command whose end may leave much behind removes that also when it is asked to end by SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

EXIT_INTERRUPTED = 130
"""Exit status of a command that SIGINT has ended."""


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """SIGINT ends the process without any cleanup, so nothing that needs some may have begun. If SIGINT is ignored, or
    has another handler, this does not change. For the main thread only."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Terminated(SystemExit):
    """SIGTERM has arrived."""


@contextlib.contextmanager
def cleaning_up_when_terminated() -> Iterator[None]:
    """SIGTERM ends the process only when the block has cleaned up after itself, as after an error; a second one does
    not disturb that. If SIGTERM has another handler, or in another thread than the main one, nothing changes."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(signal.SIGTERM, _leave_the_block)
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)  # whoever waits for the process sees what has ended it
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_command(module: str) -> NoReturn:
    """Load `module` and exit with the status that its `main` returns; called before anything else is imported."""
    with ending_at_once():
        main = importlib.import_module(module).main
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _leave_the_block(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


def _end(*_: object) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)
