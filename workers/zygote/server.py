"""The zygote: a process with torch imported, from which trainers are forked in milliseconds.

    python -m manta.workers.zygote --socket PATH --owner-pipe FD [--entry NAME=MODULE:FUNCTION ...]
                            [--warm MODULE[:FUNCTION] ...]

It is single-threaded, never imports ray and never touches CUDA, so a fork copies a quiet process. One connection on
its Unix socket is one child:

    requester -> zygote   one JSON line, a ForkRequest, with three descriptors: control socket, stdout, stderr
    zygote -> requester   one JSON line, a ForkAnswer, after the fork, and one more once the child is reaped; or only
                          one, with an error, for a request that makes no sense

Why not multiprocessing's forkserver, which also forks from a warm process: its children belong to the one process that
started it, while a node's zygote serves the agents of all jobs there, each of them a process of its own; it does not
notice that a requester died, so a trainer would outlive its agent; and a child gets its work as a pickle and keeps the
parent's standard output, while a trainer gets descriptors and JSON, a session of its own and a death signal.

When the requester's connection closes, its child is killed. When the socket's file is removed, the zygote listens anew.
When the owner's pipe closes (the node daemon is gone), all children are killed and the zygote ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TextIO

from manta.workers.protocol.json_codec import JsonObject, MalformedMessage, from_json, to_json
from manta.workers.protocol.messages import PROTOCOL, ForkAnswer, ForkRequest, ProtocolMismatch, check_protocol
from manta.workers.system.processes import ParentDeathSignal, kill_group
from manta.workers.system.sockets import POLL_SECONDS, UnixListener
from manta.workers.system.threads import OF_COMPUTATION

DEFAULT_ENTRIES = {
    "trainer": "manta.workers.rank.trainer_process:run",
    "store": "manta.workers.node.rendezvous:run",
    "peak": "manta.workers.accounting.device_peak:run",
}
# What trainers import: here once, instead of in each of them.
DEFAULT_WARM = (
    "torch",
    "torch.distributed",
    "manta.workers.zygote.server:import_first_uses",
    "manta.workers.comm.host_names:skip_reverse_lookups",
)

MAXIMUM_REQUEST_BYTES = 16 * 1024 * 1024
DESCRIPTORS_PER_REQUEST = 3

Entry = Callable[[JsonObject, socket.socket], int]
"""What a child runs: takes argument and control socket, returns the exit code."""

FIRST_USES = ("torch.utils._device", "torch.fx.experimental.symbolic_shapes", "torch.utils.serialization.config")
"""What torch imports only on first use: for a device, in a backward, in a save. Each child would import it again,
taking half a second in its first step."""


class InvalidRequest(Exception):
    """A malformed fork request; the message goes back to the requester."""


@dataclass(eq=False)
class Connection:
    """One requester, and its child once it has one."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    child: int | None = None
    protocol: int = PROTOCOL
    """The requester's protocol, once it is known to be one that we speak."""

    def close(self) -> None:
        """Close the socket and any descriptor that was not handed to a child."""
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class Zygote:
    """Serves fork requests until its owner is gone. One loop, one thread, no state outside this object."""

    def __init__(self, path: Path, owner_pipe: int, entries: dict[str, Entry]):
        self._owner_pipe = owner_pipe
        self._entries = entries
        self._death_signal = ParentDeathSignal()
        self._connections: set[Connection] = set()
        self._by_child: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = UnixListener(path)
        self._wake_reader, self._wake_writer = socket.socketpair()

    def serve(self) -> None:
        """Fork on request until the owner's pipe closes; then kill and reap all children, and remove the socket."""
        for endpoint in (self._wake_reader, self._wake_writer):
            endpoint.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGTERM):  # they are meant for the owner, which then closes the pipe
            signal.signal(number, signal.SIG_IGN)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_signal)
        self._accept_on(self._listener)
        self._selector.register(self._owner_pipe, selectors.EVENT_READ, None)
        try:
            while self._serve_once():
                pass
        finally:
            self._shut_down()

    def _serve_once(self) -> bool:
        """Handle what is ready; False if the owner is gone."""
        events = self._selector.select(POLL_SECONDS)
        for key, _ in events:
            if key.data is None:
                if not os.read(self._owner_pipe, 4096):
                    return False
            elif isinstance(key.data, Connection):
                self._on_request(key.data)
            else:
                key.data()
        if not events and (successor := self._listener.successor()) is not None:
            self._selector.unregister(self._listener.socket)
            self._listener.close()
            self._accept_on(successor)
        return True

    def _accept_on(self, listener: UnixListener) -> None:
        listener.socket.setblocking(False)
        self._selector.register(listener.socket, selectors.EVENT_READ, self._on_connect)
        self._listener = listener

    def _on_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        self._reap()

    def _on_connect(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            accepted, _ = self._listener.socket.accept()
            accepted.setblocking(False)
            connection = Connection(accepted)
            self._connections.add(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _on_request(self, connection: Connection) -> None:
        """Read from a requester: part of its request, or the end of its connection, which ends its child."""
        try:
            data, descriptors, _, _ = socket.recv_fds(connection.socket, 65536, DESCRIPTORS_PER_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        connection.descriptors += descriptors
        if not data:
            self._drop(connection)
            return
        if connection.child is not None:
            return  # a requester sends nothing more, it only hangs up
        connection.received += data
        try:
            line = _complete_line(connection.received)
            if line is not None:
                self._fork(connection, line)
        except InvalidRequest as error:
            _answer(connection, ForkAnswer(error=str(error)))
            self._drop(connection)

    def _fork(self, connection: Connection, line: bytes) -> None:
        request = _parse_request(line, len(connection.descriptors))
        connection.protocol = request.protocol
        entry = self._entries.get(request.entry)
        if entry is None:
            raise InvalidRequest(f"There is no entry {request.entry!r}; known are {', '.join(sorted(self._entries))}.")
        zygote = os.getpid()
        try:
            child = os.fork()
        except OSError as error:
            raise InvalidRequest(f"The node cannot fork another process ({error.strerror}).") from error
        if child == 0:
            descriptors, connection.descriptors = connection.descriptors, []
            run_child(entry, request.argument, request.environment, descriptors, lambda: self._leave(zygote))
        connection.child = child
        self._by_child[child] = connection
        for descriptor in connection.descriptors:
            os.close(descriptor)
        connection.descriptors.clear()
        if not _answer(connection, ForkAnswer(child)):
            self._drop(connection)

    def _reap(self) -> None:
        """Reap every child that has ended, kill what it left in its process group, and tell its requester."""
        while (child := _ended_child()) is not None:
            kill_group(child)
            _, status = os.waitpid(child, 0)
            connection = self._by_child.pop(child, None)
            if connection is not None:
                _answer(connection, _exit_of(child, status))
                connection.child = None
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Forget a requester. Its child, if it still runs, is killed and reaped like any other."""
        if connection.child is not None:
            self._by_child.pop(connection.child, None)
            kill_group(connection.child)
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection.socket)
            connection.close()

    def _leave(self, zygote: int) -> None:
        """In a child of process `zygote`: die with it, and close everything that belongs to it."""
        self._death_signal.arm(zygote)
        reset_signals()
        self._selector.close()
        for connection in self._connections:
            connection.close()
        for endpoint in (self._listener.socket, self._wake_reader, self._wake_writer):
            endpoint.close()
        os.close(self._owner_pipe)

    def _shut_down(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in self._by_child:
            kill_group(child)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        self._listener.close()


def _complete_line(received: bytearray) -> bytes | None:
    if len(received) > MAXIMUM_REQUEST_BYTES:
        raise InvalidRequest(f"A request may have at most {MAXIMUM_REQUEST_BYTES} bytes.")
    line, newline, _ = received.partition(b"\n")
    return bytes(line) if newline else None


def _parse_request(line: bytes, descriptors: int) -> ForkRequest:
    try:
        request = from_json(ForkRequest, json.loads(line))
        check_protocol("the process that asks this zygote for another", request.protocol)
    except ProtocolMismatch as error:
        raise InvalidRequest(str(error)) from error
    except (ValueError, RecursionError, MalformedMessage) as error:
        form = "entry a string, argument an object, environment an object of strings"
        raise InvalidRequest(f"A request is one JSON object: {form} ({error}).") from error
    if not _is_environment(request.environment):
        raise InvalidRequest("Names of environment variables are not empty and hold no '=' or NUL; values hold no NUL.")
    if descriptors != DESCRIPTORS_PER_REQUEST:
        hint = "; this zygote may have too many open files (`ulimit -n`)" if descriptors else ""
        raise InvalidRequest(
            f"A request must come with {DESCRIPTORS_PER_REQUEST} descriptors, not {descriptors}{hint}."
        )
    return request


def _is_environment(environment: dict[str, str]) -> bool:
    return all(key and "=" not in key and "\0" not in key + text for key, text in environment.items())


def _answer(connection: Connection, answer: ForkAnswer) -> bool:
    """Send one JSON line; False if the requester is gone or does not read."""
    try:
        spoken = replace(answer, protocol=connection.protocol)
        connection.socket.send(json.dumps(to_json(spoken)).encode() + b"\n")
    except OSError:
        return False
    return True


def _ended_child() -> int | None:
    """A child that has ended and waits to be reaped; its pid stays in use until then."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended is not None else None


def _exit_of(child: int, status: int) -> ForkAnswer:
    code = os.waitstatus_to_exitcode(status)
    return ForkAnswer(child, code=code) if code >= 0 else ForkAnswer(child, signal=-code)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="manta.workers.zygote", description="Warm process that trainers are forked from."
    )
    parser.add_argument("--socket", type=Path, required=True, help="path of the Unix socket to serve")
    parser.add_argument("--owner-pipe", type=int, required=True, help="descriptor whose closing ends the zygote")
    parser.add_argument("--entry", action="append", help="NAME=module:function; replaces the built-in table")
    parser.add_argument(
        "--warm", action="append", help="MODULE[:FUNCTION] to import (and call) at start; replaces the built-in list"
    )
    return parser.parse_args(arguments)


def _resolve(table: Sequence[str]) -> dict[str, Entry]:
    """Import the entry functions. Raises ValueError, ImportError or AttributeError if the table is wrong."""
    entries = {}
    for item in table:
        name, _, target = item.partition("=")
        module, _, function = target.partition(":")
        if not (name and module and function):
            raise ValueError(f"--entry must be NAME=module:function, not {item!r}")
        entries[name] = getattr(importlib.import_module(module), function)
    return entries


def main(arguments: Sequence[str] | None = None) -> int:
    """Warm up and serve until the owner is gone."""
    options = _arguments(arguments)
    os.environ.update(OF_COMPUTATION)
    for item in options.warm or DEFAULT_WARM:
        module, _, function = item.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    entries = _resolve(options.entry or [f"{name}={target}" for name, target in DEFAULT_ENTRIES.items()])
    if "ray" in sys.modules:
        raise AssertionError("the zygote imported ray, whose threads a fork does not survive")
    gc.collect()
    gc.freeze()  # a collection in a child must not write to the pages that it shares with us
    Zygote(options.socket, options.owner_pipe, entries).serve()
    return 0


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


def import_first_uses() -> None:
    """Import FIRST_USES, which are internal to torch: a release that lacks one does without it."""
    for name in FIRST_USES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
