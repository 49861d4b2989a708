"""How a node is drained from the machine itself: a pod's preStop hook or a batch script has neither the service's
address nor a key, and should have none where jobs run. Pure Python.

Each daemon listens on a socket in its runtime folder, which only its own user may enter. A client connects and sends,
as a line of JSON, within how many seconds the node is being drained, and gets the node's id as the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from manta.workers.errors import MantaError
from manta.workers.paths import RUNTIME_FOLDERS
from manta.workers.system.sockets import UnixListener

ANSWER_SECONDS = 5.0
LINE_BYTES = 4096
_START = "drain-"


class NodeTimeout(MantaError):
    """The daemon of a node on this machine does not answer."""


def drain_socket(runtime_folder: Path, node: str) -> Path:
    """Where the daemon of `node` listens."""
    return runtime_folder / f"{_START}{node[:12]}.sock"


async def serve_drains(listener: UnixListener, node: str, drain: Callable[[float], None]) -> asyncio.Server:
    """Call `drain` with the seconds that are received through `listener`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A client that sends something else gets no answer.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            seconds = float(json.loads(await reader.readline())["seconds"])
            if 0 <= seconds < math.inf:
                drain(seconds)
                writer.write(json.dumps({"node": node}).encode() + b"\n")
                await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(answer, sock=listener.socket, limit=LINE_BYTES)


def drain_nodes_here(seconds: float) -> list[str]:
    """Drain every node whose daemon runs on this machine as this user, within `seconds`; returns their ids, none if
    there is no such daemon. Raises NodeTimeout."""
    return [node for path in _sockets() if (node := _ask(path, seconds)) is not None]


def _sockets() -> Iterator[Path]:
    parent, pattern = RUNTIME_FOLDERS
    for folder in sorted(parent.glob(pattern.format(user=os.getuid(), tag="*"))):
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():  # otherwise another user would answer
            yield from sorted(folder.glob(f"{_START}*.sock"))


def _ask(path: Path, seconds: float) -> str | None:
    """The node's id; None if its daemon has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"seconds": seconds}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                return str(json.loads(answer.readline(LINE_BYTES))["node"])
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NodeTimeout(
                f"the node's daemon at {path} does not answer: name the node to the service, `manta drain NODE`"
            ) from error
