"""Snapshots outside of shared memory: in memory that the node's daemon holds, which no size of /dev/shm limits and
which outlives trainers and agents. Pure Python.

A file there has no folder (memfd_create(2)). What takes its place among the job's files is a symbolic link to the
daemon's descriptor, through which any process of the same user opens it that sees the daemon in /proc. The memory is
given back once no link leads to it any more; it ends with the daemon. When the daemon's socket is removed, it listens
anew, and what it holds stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manta.workers.errors import SharedMemoryError
from manta.workers.snapshot.snapshot_file import NO_SPACE_ERRORS, Form, SnapshotFile, allocate_file
from manta.workers.system.host_memory import memory_available
from manta.workers.system.regular_files import make_folder, put
from manta.workers.system.sockets import POLL_SECONDS, UnixListener

MemoryKind = Literal["auto", "shared_memory", "node_memory"]
ANSWER_SECONDS = 30.0
ABSENT_SECONDS = 5 * POLL_SECONDS
"""Seconds that a file is handed over in vain to a MemoryServer whose socket is gone: a living one listens anew."""
RETRY_SECONDS = 0.05
_NAME = "manta-snapshot"
_LINK = re.compile(r"/proc/(\d+)/fd/(\d+)")
_REQUEST_BYTES = 4096
_FREE_UNLINKED = b"give back\n"


@dataclass(frozen=True)
class SnapshotMemory:
    """Where new snapshot files are created."""

    place: MemoryKind = "auto"
    """auto: shared memory, or the daemon's if there is no room."""
    server: Path | None = None
    """Socket of the node's MemoryServer; None: there is none."""

    def create(self, path: Path, form: Form) -> SnapshotFile:
        """A new file without any step, replacing the one at `path`. Raises SharedMemoryError if there is no room."""
        if self.place == "node_memory":
            return self._create_in_daemon(path, form)
        try:
            return SnapshotFile.create(path, form)
        except SharedMemoryError as error:
            if self.place == "shared_memory" or self.server is None:
                raise
            try:
                file = self._create_in_daemon(path, form)
            except SharedMemoryError as second:
                raise SharedMemoryError(f"{error}; {second}") from second
            print(f"{error}; they are in the memory of the node's daemon instead", flush=True)
            return file

    def free_unlinked(self) -> None:
        """Links were removed: free the memory that they led to now, not only with the next file."""
        if self.server is not None:
            with contextlib.suppress(OSError), _connected(self.server) as connection:
                connection.sendall(_FREE_UNLINKED)
                connection.recv(1)

    def _create_in_daemon(self, path: Path, form: Form) -> SnapshotFile:
        if self.server is None:
            raise SharedMemoryError(
                "checkpoint.snapshots is node_memory, and there is no node's daemon here that could hold them; "
                "set it to shared_memory or off"
            )
        descriptor = os.memfd_create(_NAME)
        try:
            allocate_file(descriptor, form)
            make_folder(path.parent)
            register_file(self.server, path, descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in NO_SPACE_ERRORS:
                raise SharedMemoryError(f"the node's daemon does not accept the snapshots: {error}") from error
            raise SharedMemoryError(
                f"no room in memory for the snapshots: {memory_available()} bytes can be had, this rank needs "
                f"{form.size}; use a node with more, a layout with less state per rank, or set checkpoint.snapshots "
                "to off"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        return SnapshotFile(path, form, descriptor)


ANY_MEMORY = SnapshotMemory()


def in_node_memory(path: Path) -> bool:
    """Whether the file at `path` leads to memory that a living process holds for a snapshot."""
    if not path.is_symlink():
        return False
    try:
        return str(path.readlink().readlink()).startswith(f"/memfd:{_NAME}")
    except OSError:
        return False


def register_file(server: Path, path: Path, descriptor: int) -> None:
    """Have the MemoryServer that listens at `server` hold the file `descriptor`, which is found at `path` from then on.
    Raises OSError."""
    with _connected(server, ABSENT_SECONDS) as connection:
        socket.send_fds(connection, [json.dumps(str(path)).encode() + b"\n"], [descriptor])
        answer = connection.makefile("rb").readline()
    if answer != b"kept\n":
        raise OSError(answer.decode().strip() or "it closed the connection")


@contextlib.contextmanager
def _connected(server: Path, patience: float = 0.0) -> Iterator[socket.socket]:
    """A connection to the MemoryServer that listens at `server`, within `patience` seconds. Raises OSError."""
    deadline = time.monotonic() + patience
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(str(server))
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() >= deadline:
                    raise
            else:
                yield connection
                return
        time.sleep(RETRY_SECONDS)  # there is no event for a socket that does not exist yet


class MemoryServer:
    """Holds the files that processes of this node hand over to it, on a thread of its own."""

    def __init__(self, address: Path, root: Path):
        """Listen at the socket `address`; `root`: folder that links to the files must be in, in folders of jobs."""
        self._root = root
        self._files: set[int] = set()
        self._lock = threading.Lock()
        self._remove_stale_links()
        self._listener = UnixListener(address)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="snapshot memory", daemon=True)
        self._thread.start()

    def free_unlinked(self) -> None:
        """Free everything that no link leads to any more."""
        with self._lock:
            # Checked twice, since one that is being renamed may be missed under both of its names.
            links = [*self._links(), *self._links()]
            linked = {descriptor for _, process, descriptor in links if process == os.getpid()}
            for descriptor in self._files - linked:
                os.close(descriptor)
            self._files &= linked

    def close(self) -> None:
        """Stop listening, and free everything."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            for descriptor in self._files:
                os.close(descriptor)
            self._files.clear()

    def _links(self) -> list[tuple[Path, int, int]]:
        """Each link among the files of jobs: path, process and descriptor."""
        links = []
        for path in self._root.glob("*/*"):
            with contextlib.suppress(OSError):  # not a link, or being removed
                match = _LINK.fullmatch(str(path.readlink()))
                if match is not None:
                    links.append((path, int(match[1]), int(match[2])))
        return links

    def _remove_stale_links(self) -> None:
        """Remove links of earlier daemons, whose process numbers may have been reused."""
        for path, process, _ in self._links():
            if process == os.getpid() or not in_node_memory(path):
                path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._closing.is_set():
            self._listener.socket.settimeout(POLL_SECONDS)
            try:
                connection, _ = self._listener.socket.accept()
            except TimeoutError:
                if (successor := self._listener.successor()) is not None:
                    self._listener.close()
                    self._listener = successor
                continue
            except OSError:  # it is closed, or there is no room for another connection
                self._closing.wait(POLL_SECONDS)
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(self._answer(connection))

    def _answer(self, connection: socket.socket) -> bytes:
        request, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 1)
        if request == _FREE_UNLINKED:
            self.free_unlinked()
            return b"\n"
        try:
            path, (descriptor,) = Path(json.loads(request)), descriptors
            if path.parent.parent != self._root or ".." in path.parts:
                raise ValueError(f"{path} is not a file of a job below {self._root}")
            self._keep(path, descriptor)
        except (OSError, ValueError, TypeError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            return f"{error}\n".encode()
        return b"kept\n"

    def _keep(self, path: Path, descriptor: int) -> None:
        link = path.with_name(f"{path.name}.link")
        link.unlink(missing_ok=True)
        link.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        put(link, path)
        with self._lock:
            self._files.add(descriptor)
        self.free_unlinked()
