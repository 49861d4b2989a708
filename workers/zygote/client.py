"""Requests a process from a zygote, and watches it. Asyncio, pure Python."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manta.workers.errors import MantaError
from manta.workers.protocol.json_codec import JsonObject, from_json, to_json
from manta.workers.protocol.messages import ForkAnswer, ForkRequest, ProtocolMismatch, check_protocol
from manta.workers.system.processes import ended, kill_group

CONTROL_LINE_BYTES = 64 * 1024 * 1024
"""Maximum length of a JSON line that a child may send on its control socket."""
RETRY_SECONDS = 0.02
LOST_GRACE_SECONDS = 5.0


class ZygoteUnavailable(MantaError):
    """The node's zygote does not answer, or has refused; the message says which and where its log is."""


@dataclass(frozen=True)
class Exit:
    """How a process ended: by its own exit code, or by a signal."""

    code: int | None
    signal: int | None


@dataclass
class ForkedProcess:
    """A child of the zygote. It lives no longer than this connection: `close` (or our death) kills it."""

    pid: int
    control: asyncio.StreamReader
    """What the child writes to its control socket."""
    control_writer: asyncio.StreamWriter
    """What the child reads from its control socket; closing it tells the child to end."""
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    _exit: asyncio.Task[Exit]
    _requests: asyncio.StreamWriter
    _pipes: tuple[asyncio.ReadTransport, asyncio.ReadTransport]

    async def wait(self) -> Exit:
        """How the child ended, once it is reaped."""
        return await asyncio.shield(self._exit)

    @property
    def ended(self) -> bool:
        """Whether the child is gone."""
        return self._exit.done()

    def kill(self) -> None:
        """Send SIGKILL to the child and its process group. Does nothing if it is already gone."""
        if not self._exit.done():
            kill_group(self.pid)

    def close(self) -> None:
        """Close all connections; a child that still runs is killed by the zygote."""
        self.control_writer.close()
        self._requests.close()
        for pipe in self._pipes:
            pipe.close()


async def fork(
    socket_path: str | Path,
    entry: str,
    argument: JsonObject,
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> ForkedProcess:
    """Fork a process that runs `entry` with `argument`, its environment extended by `environment`.

    Waits up to `timeout` seconds for a zygote that is still starting. Raises ZygoteUnavailable after that, and when
    the zygote refuses the request, or is of a release with which this one cannot talk.
    """
    request = ForkRequest(entry, argument, dict(environment or {}))
    try:
        async with asyncio.timeout(timeout):
            connection = await _connect(socket_path)
            with contextlib.ExitStack() as undo:
                undo.callback(connection.close)
                process = await _request(connection, json.dumps(to_json(request)).encode() + b"\n")
                undo.pop_all()
                return process
    except TimeoutError as error:
        raise ZygoteUnavailable(
            f"The zygote at {socket_path} did not answer within {timeout:g} s; see the node's zygote log."
        ) from error
    except OSError as error:
        raise ZygoteUnavailable(f"The zygote at {socket_path} hung up ({error}); see the node's zygote log.") from error


async def _connect(path: str | Path) -> socket.socket:
    """Connect, repeatedly while nothing listens: there is no event for a socket that does not exist yet."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(str(path))  # asyncio's takes a full queue for a connection
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            connection.close()
            await asyncio.sleep(RETRY_SECONDS)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


async def _request(connection: socket.socket, line: bytes) -> ForkedProcess:
    """Send one request with the child's ends of new channels, and set up our ends."""
    ours, theirs = socket.socketpair()
    stdout_read, stdout_write = os.pipe()
    stderr_read, stderr_write = os.pipe()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        for descriptor in (stdout_read, stderr_read):
            undo.callback(os.close, descriptor)
        try:
            sent = socket.send_fds(connection, [line[:4096]], [theirs.fileno(), stdout_write, stderr_write])
        finally:
            theirs.close()
            os.close(stdout_write)
            os.close(stderr_write)
        if sent < len(line):  # otherwise it may already have answered and hung up, and then even sending nothing fails
            await asyncio.get_running_loop().sock_sendall(connection, line[sent:])
        replies, requests = await asyncio.open_connection(sock=connection)
        undo.callback(requests.close)  # through asyncio, which would otherwise keep listening when the number is reused
        pid = _pid_of(await replies.readline())
        undo.pop_all()
    control, control_writer = await asyncio.open_connection(sock=ours, limit=CONTROL_LINE_BYTES)
    stdout, stdout_pipe = await _read_pipe(stdout_read)
    stderr, stderr_pipe = await _read_pipe(stderr_read)
    ended = asyncio.create_task(_exit_of(pid, replies), name=f"exit of {pid}")
    return ForkedProcess(pid, control, control_writer, stdout, stderr, ended, requests, (stdout_pipe, stderr_pipe))


def _pid_of(reply: bytes) -> int:
    answer = from_json(ForkAnswer, json.loads(reply)) if reply else ForkAnswer(error="it closed the connection")
    try:
        check_protocol("the node's zygote", answer.protocol, "end what runs on this node, and start its Manta again")
    except ProtocolMismatch as error:
        raise ZygoteUnavailable(str(error)) from error
    if answer.pid is None:
        raise ZygoteUnavailable(f"The zygote refused to fork: {answer.error}")
    return answer.pid


async def _read_pipe(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader, transport


async def _exit_of(pid: int, replies: asyncio.StreamReader) -> Exit:
    """What the zygote says about the end of `pid`. If the zygote itself is lost, its children die with it."""
    try:
        reply = await replies.readline()
    except OSError:
        reply = b""
    if reply:
        answer = from_json(ForkAnswer, json.loads(reply))
        return Exit(answer.code, answer.signal)
    kill_group(pid)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOST_GRACE_SECONDS):
            await ended(pid)
    return Exit(None, int(signal.SIGKILL))
