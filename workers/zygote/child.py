"""The first moments of a forked process: from the zygote's copy to the entry function."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TextIO

from workers.protocol.json_codec import JsonObject

Entry = Callable[[JsonObject, socket.socket], int]
"""What a child runs: takes argument and control socket, returns the exit code."""


def run_child(
    entry: Entry,
    argument: JsonObject,
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    leave_zygote: Callable[[], None],
) -> NoReturn:
    """Turn this freshly forked process into one that runs `entry`, and exit with its code.

    `descriptors`: control socket, stdout, stderr; `leave_zygote` closes what belongs to the zygote. An uncaught
    exception prints its traceback and exits with 1.
    """
    exit_code = 1
    try:
        os.setsid()
        leave_zygote()
        control_descriptor, stdout, stderr = descriptors
        _redirect(stdout, stderr)
        os.environ.update(environment)
        exit_code = entry(argument, socket.socket(fileno=control_descriptor))
    except SystemExit as request:
        exit_code = _code_of(request)
    finally:
        # The zygote's stack is below this frame: nothing may ever unwind into it.
        _leave(exit_code)


def reset_signals() -> None:
    """Restore the default handling of the signals that the zygote handles."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in any Python process: writes raise BrokenPipeError
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _redirect(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in {null, stdout, stderr} - {0, 1, 2}:
        os.close(descriptor)
    sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)


def _text_stream(descriptor: int) -> TextIO:
    """A new stream: the zygote's streams remember what kind of file they were opened on."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _code_of(request: SystemExit) -> int:
    if request.code is None or isinstance(request.code, int):
        return request.code or 0
    print(request.code, file=sys.stderr)
    return 1


def _leave(exit_code: int) -> NoReturn:
    try:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        exit_code = exit_code or 1  # nothing reads our output any more, so nobody can be told
    finally:
        os._exit(exit_code & 0xFF)
