"""Transfers snapshots between two agents, with authentication, one slot at a time. Plain blocking sockets, pure Python.

Both ends know a random token. The receiver sends a nonce; the caller answers with its request and a MAC of both, so
that the token itself is never sent. Data is only accepted if its checksums are those computed by the sender's trainer:
a slot that was overwritten during the transfer is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import secrets
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from manta.workers.errors import CheckpointError, MantaError
from manta.workers.protocol.json_codec import JsonObject, MalformedMessage, from_json, to_json
from manta.workers.snapshot.node_memory import ANY_MEMORY, SnapshotMemory
from manta.workers.snapshot.snapshot_file import NOTE_BYTES, SLOTS, Form, SnapshotFile

T = TypeVar("T")
_LENGTH = struct.Struct("<I")
_SLOT = struct.Struct("<QQ")  # step + 1 (0: no more), bytes of the note with its length
_FORM = struct.Struct("<16sQQ")  # identity, bytes of payload, bytes of table
_KEPT, _CHANGED = b"\1", b"\0"
NONCE_BYTES = 32
MESSAGE_BYTES = 64 * 1024
TABLE_BYTES = 1 << 30
SILENCE_SECONDS = 20.0
"""Seconds that a partner may be silent in the middle of a message."""


class BackupError(MantaError):
    """The other end refused, is gone, or violates the protocol."""


@dataclass(frozen=True)
class BackupRequest:
    """A request from one agent to another."""

    do: Literal["put", "get"]
    """put: receive a backup from now on; get: send the snapshots that are there."""
    rank: int
    """Rank whose snapshots these are."""
    layout: str
    """Tag of the layout."""
    generation: int
    """Generation of the caller."""


@dataclass(frozen=True)
class _Introduction:
    wish: JsonObject
    """The BackupRequest as it was sent, which the MAC is computed from."""
    mac: str


@dataclass(frozen=True)
class _Answer:
    refused: str | None = None
    """Why the request is refused; None: it is granted."""


def prepare(connection: socket.socket) -> None:
    """Notice when the other machine is gone, and send without delay."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.settimeout(SILENCE_SECONDS)


def receive_exactly(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises BackupError if the other end closes first, OSError."""
    while target:
        count = connection.recv_into(target)
        if count == 0:
            raise BackupError("the other end closed the connection")
        target = target[count:]


def expect_silence(connection: socket.socket) -> None:
    """Raise BackupError if the other end has closed the connection, or sends something unexpected."""
    if select.select([connection], [], [], 0)[0]:
        raise BackupError("the other end closed the connection")


def _bytes(connection: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    receive_exactly(connection, memoryview(content))
    return bytes(content)


def send_message(connection: socket.socket, message: JsonObject) -> None:
    """One JSON object."""
    text = json.dumps(message, sort_keys=True).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive_message(connection: socket.socket) -> JsonObject:
    """One JSON object. Raises BackupError for anything else."""
    length = _LENGTH.unpack(_bytes(connection, _LENGTH.size))[0]
    if length > MESSAGE_BYTES:
        raise BackupError(f"a message of {length} bytes is not of this protocol")
    try:
        message = json.loads(_bytes(connection, length))
    except ValueError as error:
        raise BackupError("a message that is no JSON is not of this protocol") from error
    if not isinstance(message, dict):
        raise BackupError("a message that is no JSON object is not of this protocol")
    return message


def _mac(token: str, nonce: bytes, request: JsonObject) -> str:
    return hmac.new(token.encode(), nonce + json.dumps(request, sort_keys=True).encode(), "sha256").hexdigest()


def introduce(connection: socket.socket, token: str, request: BackupRequest) -> None:
    """Prove knowledge of `token` and send the request. Raises BackupError with the other end's reason if it refuses."""
    nonce, wish = _bytes(connection, NONCE_BYTES), to_json(request)
    send_message(connection, to_json(_Introduction(wish, _mac(token, nonce, wish))))
    expect_agreement(connection)


def expect_agreement(connection: socket.socket) -> None:
    """Raise BackupError with the other end's reason if it refuses."""
    answer = _read(_Answer, receive_message(connection))
    if answer.refused is not None:
        raise BackupError(answer.refused)


def agree(connection: socket.socket) -> None:
    """Grant the other end's request."""
    send_message(connection, to_json(_Answer()))


def refuse(connection: socket.socket, reason: str) -> None:
    """Refuse the other end's request."""
    send_message(connection, to_json(_Answer(reason)))


def challenge(connection: socket.socket, token: str) -> BackupRequest:
    """The request of a caller that has proved knowledge of `token`. Raises BackupError for any other caller, and for an
    invalid request."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce)
    introduction = _read(_Introduction, receive_message(connection))
    if not hmac.compare_digest(introduction.mac, _mac(token, nonce, introduction.wish)):
        raise BackupError("the caller does not know the token of this job's generation")
    return _read(BackupRequest, introduction.wish)


def _read(kind: type[T], document: JsonObject) -> T:
    try:
        return from_json(kind, document)
    except MalformedMessage as error:
        raise BackupError(f"that is not a request: {error}") from error


def send_form(connection: socket.socket, form: Form) -> None:
    """Send the form of a file."""
    connection.sendall(_FORM.pack(form.identity, form.payload, len(form.table)) + form.table)


def receive_form(connection: socket.socket) -> Form:
    """The form of a file. Raises BackupError, OSError."""
    identity, payload, table = _FORM.unpack(_bytes(connection, _FORM.size))
    if table > TABLE_BYTES:
        raise BackupError(f"a table of {table} bytes is not of this protocol")
    return Form(identity, payload, _bytes(connection, table))


def file_of(path: Path, form: Form, memory: SnapshotMemory = ANY_MEMORY) -> SnapshotFile:
    """The file at `path`, open for writing; if it does not have that `form`, a new one in `memory`. Raises
    SharedMemoryError."""
    try:
        file = SnapshotFile.open(path, mmap.ACCESS_WRITE)
    except CheckpointError:
        return memory.create(path, form)
    if file.form == form:
        return file
    file.close()
    return memory.create(path, form)


@dataclass(frozen=True)
class Sealed:
    """A slot that has its checksums."""

    slot: int
    step: int
    sums: tuple[int, ...]


def sealed_slots(file: SnapshotFile) -> list[Sealed]:
    """The slots that can be sent, the newest step first. A slot with an invalid seal is left out: it is being
    overwritten, or damaged."""
    slots = []
    for slot in range(SLOTS):
        with contextlib.suppress(CheckpointError):
            step, sums = file.step(slot), file.sealed_sums(slot)
            if step is not None and sums is not None:
                slots.append(Sealed(slot, step, sums))
    return sorted(slots, key=lambda each: -each.step)


def send_slot(connection: socket.socket, file: SnapshotFile, sealed: Sealed) -> bool:
    """Send a slot; returns whether it arrived unchanged."""
    start, note = file.form.payload_at(sealed.slot), file.note_size(sealed.slot)
    connection.sendall(_SLOT.pack(sealed.step + 1, note))
    with open(file.descriptor, "rb", closefd=False, buffering=0) as stream:
        connection.sendfile(stream, start, file.form.payload + note)
    kept = file.step(sealed.slot) == sealed.step
    connection.sendall(struct.pack(f"<{len(sealed.sums)}I", *sealed.sums) + (_KEPT if kept else _CHANGED))
    return _bytes(connection, 1) == _KEPT


def send_end(connection: socket.socket) -> None:
    """Announce that there are no more slots."""
    connection.sendall(_SLOT.pack(0, 0))


def receive_slot(connection: socket.socket, file: SnapshotFile) -> int | None:
    """Receive a slot into the file, over the one whose loss costs least; returns its step, or None if it was dropped as
    incomplete.

    Raises EOFError after the last slot, BackupError and OSError if the other end is gone.
    """
    number, note = _SLOT.unpack(_bytes(connection, _SLOT.size))
    if number == 0:
        raise EOFError
    if note > NOTE_BYTES + 8:
        raise BackupError(f"a note of {note} bytes is not of this protocol")
    step, form = number - 1, file.form
    steps = [file.step(slot) for slot in range(SLOTS)]
    for slot, other in enumerate(steps):
        if other is not None and other > step:
            file.begin(slot)  # of a step that was rolled back
    slot = steps.index(step) if step in steps else file.oldest()
    file.begin(slot)
    start = form.payload_at(slot)
    with memoryview(file.memory) as memory, memory[start : start + form.payload + note] as target:
        receive_exactly(connection, target)
    sums = struct.unpack(f"<{form.blocks}I", _bytes(connection, 4 * form.blocks))
    whole = _bytes(connection, 1) == _KEPT and file.note_size(slot) == note and tuple(file.sums(slot)) == sums
    if whole:
        file.seal(slot, step, list(sums))
        file.commit(slot, step)
    connection.sendall(_KEPT if whole else _CHANGED)
    return step if whole else None
