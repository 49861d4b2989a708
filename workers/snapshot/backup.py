"""Backups: copies of a rank's snapshots on another node, made by the agents; no trainer takes part. Pure Python.

An agent's `BackupSender` streams what its trainer commits to a partner's `BackupServer`, which keeps it in its own
shared memory. The newest step is sent first; steps that were overwritten in the meantime are skipped. A new agent of
the rank, on any node, fetches the file back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manta.workers.errors import MantaError, SharedMemoryError
from manta.workers.snapshot import backup_transport as wire
from manta.workers.snapshot.backup_transport import BackupError
from manta.workers.snapshot.files import NotificationPipe, backup_path, notification_path, snapshot_path, stored_steps
from manta.workers.snapshot.node_memory import ANY_MEMORY, SnapshotMemory, in_node_memory
from manta.workers.snapshot.snapshot_file import SnapshotFile, committed_steps
from manta.workers.system.regular_files import put, remove
from manta.workers.system.sockets import PortRange, host_and_port, listen

RETRY_SECONDS = 0.5
"""Seconds between two attempts to reach a partner that refuses or is gone."""
CONNECT_SECONDS = 5.0
POLL_SECONDS = 1.0
"""Seconds between checks of whether files are at their paths, and for steps that no notification told of: its pipe may
have been removed too."""
MAX_UNAUTHENTICATED = 64
"""Most callers at a time that have not proved that they know the token. Each has a thread."""


@dataclass
class BackupProgress:
    """Progress of a rank's backup."""

    step: int | None = None
    """Newest step that arrived complete."""
    sent: int = 0
    """Number of slots that arrived complete."""
    dropped: int = 0
    """Number of slots that were overwritten during their transfer."""
    bytes: int = 0
    """Bytes of the slots that arrived."""
    seconds: float = 0.0
    """Seconds that they took, including checks at the other end."""
    problem: str | None = None
    """Why nothing can be sent at present."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class BackupSender:
    """Streams the snapshots of one rank in one generation to a partner, on a thread of its own."""

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        layout: str,
        partner: tuple[str, int],
        token: str,
        generation: int,
        every: int = 1,
    ):
        """`layout`: tag of the layout; `partner`: address of its BackupServer; `every`: send only steps that are a
        multiple of this; it is the same for all ranks, so that slow backups still have steps in common."""
        self._path = snapshot_path(folder, rank, layout)
        self._partner, self._token, self._every = partner, token, every
        self._request = wire.BackupRequest("put", rank, layout, generation)
        self._notifications = NotificationPipe(notification_path(folder, rank))
        self._stopped = threading.Event()
        self._connection: socket.socket | None = None
        self.state = BackupProgress()
        self._thread = threading.Thread(target=self._run, name=f"backup sender {rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; a slot that is being transferred does not arrive."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._notifications.notify()
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._notifications.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                with contextlib.closing(SnapshotFile.open(self._path)) as file, self._connected() as connection:
                    self._stream(file, connection)
            except (OSError, MantaError) as error:
                self.state.problem = str(error)
                self._notifications.wait(RETRY_SECONDS)

    @contextlib.contextmanager
    def _connected(self) -> Any:
        with socket.create_connection(self._partner, CONNECT_SECONDS) as connection:
            self._connection = connection
            wire.prepare(connection)
            try:
                wire.introduce(connection, self._token, self._request)
                yield connection
            finally:
                self._connection = None

    def _stream(self, file: SnapshotFile, connection: socket.socket) -> None:
        """Runs until it is stopped, or the file is not at its path: the trainer creates a new one."""
        wire.send_form(connection, file.form)
        wire.expect_agreement(connection)
        self.state.problem = None
        last: tuple[int, tuple[int, ...]] | None = None
        while not self._stopped.is_set() and file.is_at_its_path():
            newest = next(
                (sealed_slot for sealed_slot in wire.sealed_slots(file) if sealed_slot.step % self._every == 0), None
            )
            if newest is None or (newest.step, newest.sums) == last:
                self._notifications.wait(POLL_SECONDS, connection)
                wire.expect_silence(connection)
                continue
            began = time.perf_counter()
            if wire.send_slot(connection, file, newest):
                last = (newest.step, newest.sums)
                self.state.sent += 1
                self.state.bytes += file.form.payload
                self.state.seconds += time.perf_counter() - began
                self.state.step = newest.step  # last: whoever sees it, on another thread, sees it counted
            else:
                self.state.dropped += 1


class BackupServer:
    """Keeps backups of other ranks' snapshots in `folder`, and serves the snapshots there."""

    def __init__(
        self,
        folder: str | Path,
        host: str,
        token: str,
        generation: int,
        ports: PortRange | None = None,
        memory: SnapshotMemory = ANY_MEMORY,
    ):
        """Listen at `host` on one of `ports` (None: any), for callers that know `token` and are of `generation` or
        later. `memory`: where backups are kept."""
        self.folder, self._token, self._generation = Path(folder), token, generation
        self._memory = memory
        self._listener = listen(host, ports)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._writers: dict[tuple[int, str], tuple[int, socket.socket, threading.Thread]] = {}
        """Who writes each backup, by rank and layout: generation, connection and thread."""
        self._connections: set[socket.socket] = set()
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        self._thread = threading.Thread(target=self._accept, name="backup server", daemon=True)
        self._thread.start()

    def expect(self, token: str, generation: int) -> None:
        """From now on accept only callers of `generation` or later that know `token`. Raises BackupError for an older
        one."""
        if generation < self._generation:
            raise BackupError(f"generation {generation} was replaced by {self._generation}")
        self._token, self._generation = token, generation

    def remove_former(self, rank: int) -> None:
        """Remove backups that earlier generations wrote here if all their steps are older than those of `rank`, which
        lives here: their ranks have had other partners since, so no rank can resume from them. Otherwise each change of
        partners would leave behind as much memory as a rank's snapshots."""
        with self._lock:
            former = [key for key, (generation, _, _) in self._writers.items() if generation < self._generation]
        removed = []
        for of, layout in former:
            backup, own = backup_path(self.folder, of, layout), stored_steps(self.folder, rank, layout)
            if own and max(committed_steps(backup), default=own[0]) < own[0]:
                removed.append(in_node_memory(backup))
                remove(backup)
        if any(removed):
            self._memory.free_unlinked()

    def close(self) -> None:
        """Stop listening, close all connections and remove the backups that were written here."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            writers = dict(self._writers)
            for connection in self._connections:
                _shut(connection)
        for (rank, layout), (_, _, thread) in writers.items():
            thread.join()
            remove(backup_path(self.folder, rank, layout))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                self._unauthenticated[connection] = None
                if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                    oldest = next(iter(self._unauthenticated))
                    del self._unauthenticated[oldest]
                    _shut(oldest)  # its thread ends
            threading.Thread(target=self._serve, args=(connection,), name="backup", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            with connection:
                wire.prepare(connection)
                self._answer(connection)
        except (OSError, MantaError):
            pass  # the other end knows, or is gone; it will connect again
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._unauthenticated.pop(connection, None)

    def _answer(self, connection: socket.socket) -> None:
        try:
            request = wire.challenge(connection, self._token)
            with self._lock:
                self._unauthenticated.pop(connection, None)
            rank, layout, generation = request.rank, request.layout, request.generation
            if generation < self._generation:
                raise BackupError(f"generation {generation} was replaced by {self._generation}")
            own, backup = snapshot_path(self.folder, rank, layout), backup_path(self.folder, rank, layout)
            if request.do == "put":
                self._claim((rank, layout), generation, connection)
            elif not (committed_steps(own) or committed_steps(backup)):
                raise BackupError(f"there is no snapshot of rank {rank} in layout {layout} here")
        except BackupError as error:
            wire.refuse(connection, str(error))
            return
        wire.agree(connection)
        if request.do == "put":
            self._receive_snapshot((rank, layout), backup, connection)
        else:
            _send_snapshot(max((own, backup), key=lambda path: max(committed_steps(path), default=-1)), connection)

    def _claim(self, key: tuple[int, str], generation: int, connection: socket.socket) -> None:
        """Become the writer of a backup. A writer of an older generation, or one that is gone, is stopped."""
        with self._lock:
            before = self._writers.get(key)
            if before is not None and before[0] > generation:
                raise BackupError(f"generation {generation} was replaced by {before[0]}")
            self._writers[key] = (generation, connection, threading.current_thread())
        if before is not None:
            _shut(before[1])
            before[2].join()

    def _receive_snapshot(self, key: tuple[int, str], path: Path, connection: socket.socket) -> None:
        form = wire.receive_form(connection)
        try:
            opened = wire.file_of(path, form, self._memory)
        except SharedMemoryError as error:
            wire.refuse(connection, str(error))
            raise
        wire.agree(connection)
        with contextlib.closing(opened) as file, contextlib.suppress(EOFError):
            while self._writers[key][1] is connection and file.is_at_its_path():  # or the sender begins again
                connection.settimeout(None)  # a step may take any time
                connection.recv(1, socket.MSG_PEEK)
                connection.settimeout(wire.SILENCE_SECONDS)
                wire.receive_slot(connection, file)


def _send_snapshot(path: Path, connection: socket.socket) -> None:
    """Send all slots that have checksums, the older one first."""
    with contextlib.closing(SnapshotFile.open(path)) as file:
        wire.send_form(connection, file.form)
        for sealed in reversed(wire.sealed_slots(file)):
            wire.send_slot(connection, file, sealed)
        wire.send_end(connection)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def fetch(
    folder: str | Path,
    rank: int,
    layout: str,
    holder: tuple[str, int],
    token: str,
    generation: int,
    of: int | None = None,
    memory: SnapshotMemory = ANY_MEMORY,
) -> list[int]:
    """Copy the snapshots of `rank` from the agent at `holder` into `folder`, as the rank's own; returns the steps that
    arrived complete. An existing file of the rank is replaced once everything has arrived. `of`: another rank with the
    same state, whose snapshots are to be copied. `memory`: where they are kept here.

    Raises BackupError, SharedMemoryError, OSError.
    """
    path = snapshot_path(folder, rank, layout)
    arriving = path.with_name(f"{path.name}.arriving")
    request = wire.BackupRequest("get", rank if of is None else of, layout, generation)
    with socket.create_connection(holder, CONNECT_SECONDS) as connection:
        wire.prepare(connection)
        wire.introduce(connection, token, request)
        form = wire.receive_form(connection)
        try:
            with contextlib.closing(memory.create(arriving, form)) as file, contextlib.suppress(EOFError):
                while True:
                    wire.receive_slot(connection, file)
            steps = committed_steps(arriving)
            if not steps:
                raise BackupError(f"no complete snapshot of rank {rank} arrived from {host_and_port(*holder)}")
            put(arriving, path)
        finally:
            arriving.unlink(missing_ok=True)
    return steps
