"""The file of one rank's snapshots: what lies where, which steps are complete, and whether they are intact.
For agents, which have no torch.

    head      magic, version, identity, sizes, sums of itself and of the table; markers and seals of the slots
    table     JSON: what the payload consists of
    slots     payload (the state), note, CRC-32 of each block of both

A slot's marker names its step. It is cleared before the slot is overwritten and set after the last byte, so a process
that is killed at any moment leaves at least one whole slot. Its seal comes later: the sum of the slot's sums. What a
reader makes of a slot without one is written in docs/decisions/0005.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from manta.workers.checkpoint.checksums import BLOCK_BYTES, DamagedCheckpoint, crc32
from manta.workers.errors import CheckpointError, SharedMemoryError
from manta.workers.system.host_memory import memory_available
from manta.workers.system.regular_files import make_folder, open_regular, remove

SLOTS = 2
NOTE_BYTES = 256 * 1024
"""Maximum size of a slot's note."""

_MAGIC, _VERSION = b"MANTASNP", 2
_HEAD = struct.Struct("<8sI16sQII")  # magic, version, identity, bytes of payload, bytes of table, its CRC-32
_SUM = struct.Struct("<I")
_WORD = struct.Struct("<Q")
_SEAL = struct.Struct("<QQ")  # marker, CRC-32 of marker and sums
_MARKERS_AT, _SEALS_AT, _TABLE_AT = 128, 256, 4096
_STEP_BITS = 40
NO_SPACE_ERRORS = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
NOTHING_KNOWN: Mapping[int, int] = {}


def damaged_at(path: Path, at: int, problem: str) -> DamagedCheckpoint:
    """The error for byte `at` of the snapshot file at `path`."""
    return DamagedCheckpoint(f"the snapshot file {path} is damaged at byte {at}: {problem}")


def _marker_of(step: int) -> int:
    """A single word, so that it is written completely or not at all: step + 1 and 24 bits of its checksum. 0: no
    step."""
    number = step + 1
    return number | (crc32(_WORD.pack(number)) & 0xFFFFFF) << _STEP_BITS


def _step_of(marker: int) -> int | None:
    """The step of a marker; None if there is none, or it is invalid."""
    step = (marker & ((1 << _STEP_BITS) - 1)) - 1
    return step if step >= 0 and _marker_of(step) == marker else None


def _aligned(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class Form:
    """The structure of a file; equal for files that fit each other."""

    identity: bytes
    """16 bytes that distinguish states that do not fit each other."""
    payload: int
    """Bytes of the state."""
    table: bytes = b"{}"
    """JSON: the contents of the payload."""

    @cached_property
    def head(self) -> bytes:
        """The first bytes of the file."""
        fields = _HEAD.pack(_MAGIC, _VERSION, self.identity, self.payload, len(self.table), crc32(self.table))
        return fields + _SUM.pack(crc32(fields))

    @cached_property
    def blocks(self) -> int:
        """Number of checksums of a slot: of the blocks of its payload, and of its note."""
        return -(-self.payload // BLOCK_BYTES) + 1

    @cached_property
    def data_at(self) -> int:
        """First byte of the first slot."""
        return _aligned(_TABLE_AT + len(self.table))

    @cached_property
    def slot_size(self) -> int:
        """Bytes from one slot to the next."""
        return _aligned(self.payload + _WORD.size + NOTE_BYTES + _SUM.size * self.blocks)

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return self.data_at + SLOTS * self.slot_size

    def payload_at(self, slot: int) -> int:
        """First byte of the state in `slot`."""
        return self.data_at + slot * self.slot_size

    def note_at(self, slot: int) -> int:
        """First byte of the note's length; the note follows."""
        return self.payload_at(slot) + self.payload

    def sums_at(self, slot: int) -> int:
        """First byte of the sums."""
        return self.note_at(slot) + _WORD.size + NOTE_BYTES

    @classmethod
    def of(cls, path: Path, head: bytes) -> Form:
        """The form given by the first bytes of a file, without its table. Raises DamagedCheckpoint, or CheckpointError
        for a format that this program does not support."""
        length = _HEAD.size + _SUM.size
        if len(head) < length:
            raise damaged_at(path, len(head), "it is cut off")
        magic, version, identity, payload, table, _ = _HEAD.unpack_from(head)
        if magic != _MAGIC or _SUM.unpack_from(head, _HEAD.size)[0] != crc32(head[: _HEAD.size]):
            raise damaged_at(path, 0, f"its first {length} bytes are not what was written")
        if version != _VERSION:
            raise CheckpointError(f"{path} has format {version} of snapshots, this program reads {_VERSION}")
        return cls(identity, payload, bytes(table))


def committed_steps(path: str | Path) -> list[int]:
    """Steps whose state is complete in the file at `path`, ascending; none if there is no usable file."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            head = file.read(mmap.PAGESIZE)
            size = os.fstat(file.fileno()).st_size
        if Form.of(path, head).size != size:
            return []
    except (OSError, CheckpointError):
        return []
    markers = (_WORD.unpack_from(head, _MARKERS_AT + _WORD.size * slot)[0] for slot in range(SLOTS))
    return sorted(step for marker in markers if (step := _step_of(marker)) is not None)


class SnapshotFile:
    """A mapped snapshot file. One process writes it, others may read it at the same time."""

    def __init__(self, path: Path, form: Form, descriptor: int, access: int = mmap.ACCESS_WRITE):
        """Takes ownership of `descriptor`, of a file with `form`; see `create` and `open`."""
        self.path, self.form, self.descriptor = path, form, descriptor
        self.memory = mmap.mmap(descriptor, form.size, access=access)

    @classmethod
    def create(cls, path: Path, form: Form) -> SnapshotFile:
        """A new file without any step, replacing the one that is there. Raises SharedMemoryError if there is no
        room."""
        make_folder(path.parent)
        remove(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            allocate_file(descriptor, form)
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            if error.errno not in NO_SPACE_ERRORS:
                raise
            free = min(shutil.disk_usage(path.parent).free, memory_available())
            raise SharedMemoryError(
                f"no room in shared memory for the snapshots: {path.parent} has {free} bytes free, this rank "
                f"needs {form.size}; enlarge it, use a layout with less state per rank, or set checkpoint.snapshots "
                "to node_memory or off"
            ) from error
        return cls(path, form, descriptor)

    @classmethod
    def open(cls, path: Path, access: int = mmap.ACCESS_READ) -> SnapshotFile:
        """The file at `path`. Raises DamagedCheckpoint if head, table or size are not as written, CheckpointError if
        there is none, or something else."""
        try:
            # A link into a process's memory may lead to another process's pipe by now.
            with open_regular(path, mode="r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
                descriptor = os.dup(file.fileno())
            try:
                return cls(path, _form_of_file(path, descriptor), descriptor, access)
            except BaseException:
                os.close(descriptor)
                raise
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no snapshot file {path}") from error
        except OSError as error:
            # Not UnreadableCheckpoint: nobody waits for a snapshot; the next source of the state is used.
            raise CheckpointError(f"the snapshot file {path} cannot be read: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; its memory stays mapped as long as something refers to it."""
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):
            self.memory.close()

    def is_at_its_path(self) -> bool:
        """Whether its path still leads to it: anybody may have removed it, or put another file in its place."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except OSError:
            return False

    def copy_from(self, other: SnapshotFile) -> None:
        """Copy all that `other`, which has the same form, holds into this new file: markers and seals last."""
        with memoryview(other.memory) as theirs:
            for at in range(self.form.data_at, self.form.size, BLOCK_BYTES):
                end = min(at + BLOCK_BYTES, self.form.size)
                self.memory[at:end] = theirs[at:end]
            self.memory[_MARKERS_AT:_TABLE_AT] = theirs[_MARKERS_AT:_TABLE_AT]

    def table(self) -> dict[str, Any]:
        """The description of the payload."""
        table: dict[str, Any] = json.loads(self.form.table)
        return table

    # Markers and seals.

    def _marker(self, slot: int) -> int:
        marker: int = _WORD.unpack_from(self.memory, _MARKERS_AT + _WORD.size * slot)[0]
        return marker

    def _seal(self, slot: int) -> tuple[int, int]:
        seal: tuple[int, int] = _SEAL.unpack_from(self.memory, _SEALS_AT + _SEAL.size * slot)
        return seal

    def step(self, slot: int) -> int | None:
        """The step that is complete in `slot`; None if none is."""
        return _step_of(self._marker(slot))

    def oldest(self, spared: int | None = None) -> int:
        """The slot whose loss costs least, except for the one that is `spared`."""
        steps = [self.step(slot) for slot in range(SLOTS)]
        others = [slot for slot in range(SLOTS) if slot != spared]
        return min(others, key=lambda slot: (steps[slot] is not None, steps[slot] or 0))

    def slot_of(self, step: int) -> int:
        """The slot that holds `step`. Raises CheckpointError if none does, DamagedCheckpoint for a truncated file, or
        if a damaged marker makes it impossible to know."""
        size = os.fstat(self.descriptor).st_size
        if size != self.form.size:
            raise damaged_at(self.path, size, f"it should have {self.form.size} bytes")
        markers = [self._marker(slot) for slot in range(SLOTS)]
        for slot, marker in enumerate(markers):
            if _step_of(marker) == step:
                return slot
        for slot, marker in enumerate(markers):
            if marker and _step_of(marker) is None:
                raise damaged_at(self.path, _MARKERS_AT + _WORD.size * slot, "a slot's marker is not what was written")
        raise CheckpointError(f"{self.path} holds no snapshot of step {step}")

    def begin(self, slot: int) -> None:
        """The slot is about to be overwritten: it holds nothing."""
        _SEAL.pack_into(self.memory, _SEALS_AT + _SEAL.size * slot, 0, 0)
        _WORD.pack_into(self.memory, _MARKERS_AT + _WORD.size * slot, 0)

    def commit(self, slot: int, step: int) -> None:
        """The slot holds all of `step`."""
        _WORD.pack_into(self.memory, _MARKERS_AT + _WORD.size * slot, _marker_of(step))

    # Content.

    def write_note(self, slot: int, note: bytes) -> None:
        """Write a note of at most NOTE_BYTES next to the state."""
        at = self.form.note_at(slot)
        _WORD.pack_into(self.memory, at, len(note))
        self.memory[at + _WORD.size : at + _WORD.size + len(note)] = note

    def note_size(self, slot: int) -> int:
        """Bytes of the note, including its length."""
        length: int = _WORD.unpack_from(self.memory, self.form.note_at(slot))[0]
        return _WORD.size + min(length, NOTE_BYTES)

    def note(self, slot: int) -> bytes:
        """The note of a slot; verify it first."""
        at = self.form.note_at(slot)
        return bytes(self.memory[at + _WORD.size : at + self.note_size(slot)])

    def _range(self, slot: int, block: int) -> tuple[int, int]:
        """The range [first, end) of bytes that a checksum covers."""
        if block == self.form.blocks - 1:
            at = self.form.note_at(slot)
            return at, at + self.note_size(slot)
        start = self.form.payload_at(slot) + block * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.form.note_at(slot))

    def sums(self, slot: int, known: Mapping[int, int] = NOTHING_KNOWN) -> Iterator[int]:
        """CRC-32 of each block of the slot as it is now; for `known` blocks the given ones."""
        with memoryview(self.memory) as memory:
            for block in range(self.form.blocks):
                if block in known:
                    yield known[block]
                    continue
                start, end = self._range(slot, block)
                with memory[start:end] as content:
                    block_sum = crc32(content)
                yield block_sum

    def seal(self, slot: int, step: int, sums: list[int]) -> None:
        """Write the checksums of the slot's blocks, which hold `step`."""
        packed, at = struct.pack(f"<{len(sums)}I", *sums), self.form.sums_at(slot)
        self.memory[at : at + len(packed)] = packed
        marker = _marker_of(step)
        _SEAL.pack_into(self.memory, _SEALS_AT + _SEAL.size * slot, 0, _seal_sum(marker, packed))
        _WORD.pack_into(self.memory, _SEALS_AT + _SEAL.size * slot, marker)

    def sealed_sums(self, slot: int) -> tuple[int, ...] | None:
        """Expected checksums of the slot's blocks; None if they are not known yet. Raises DamagedCheckpoint."""
        (marker, whole), at = self._seal(slot), self.form.sums_at(slot)
        if marker == 0:
            return None
        packed = self.memory[at : at + _SUM.size * self.form.blocks]
        if marker != self._marker(slot) or whole != _seal_sum(marker, packed):
            raise damaged_at(self.path, _SEALS_AT + _SEAL.size * slot, f"the seal of slot {slot} does not fit its sums")
        return struct.unpack(f"<{self.form.blocks}I", packed)

    def check(self, slot: int) -> bool:
        """Verify the whole slot; False if it has no checksums yet. Raises DamagedCheckpoint, which names the block."""
        sums = self.sealed_sums(slot)
        if sums is None:
            return False
        for block, block_sum in enumerate(self.sums(slot)):
            self._compare(slot, block, block_sum, sums)
        return True

    def check_block(self, slot: int, block: int, sums: tuple[int, ...]) -> None:
        """Verify one block of the payload. Raises DamagedCheckpoint."""
        start, end = self._range(slot, block)
        with memoryview(self.memory) as memory, memory[start:end] as content:
            self._compare(slot, block, crc32(content), sums)

    def _compare(self, slot: int, block: int, block_sum: int, sums: tuple[int, ...]) -> None:
        if block_sum != sums[block]:
            start, end = self._range(slot, block)
            step = self.step(slot)
            raise damaged_at(self.path, start, f"these {end - start} bytes of step {step} are not what was written")


def allocate_file(descriptor: int, form: Form) -> None:
    """Make the empty file `descriptor` a file with `form` and without any step. Raises OSError, with one of
    NO_SPACE_ERRORS if there is not enough memory."""
    if form.size > memory_available():  # more files may be allocated in memory than the machine has
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    # Allocated now: a write into full memory would kill the process instead of failing.
    os.posix_fallocate(descriptor, 0, form.size)
    os.pwrite(descriptor, form.table, _TABLE_AT)
    os.pwrite(descriptor, form.head, 0)


def _seal_sum(marker: int, packed: bytes) -> int:
    return crc32(packed, crc32(_WORD.pack(marker)))


def _form_of_file(path: Path, descriptor: int) -> Form:
    """The form of an open file, table included. Raises DamagedCheckpoint."""
    head = os.pread(descriptor, _HEAD.size + _SUM.size, 0)
    bare = Form.of(path, head)
    table = os.pread(descriptor, len(bare.table), _TABLE_AT)
    form = Form(bare.identity, bare.payload, table)
    size = os.fstat(descriptor).st_size
    if size != bare.size:
        raise damaged_at(path, min(size, bare.size), f"it has {size} bytes and should have {bare.size}")
    if form.head != head:
        raise damaged_at(path, _TABLE_AT, "its table is not what was written")
    return form
