"""Snapshots of one rank's state in the node's shared memory, which survive the death of the trainer.

A rank has one file with two slots. A slot's marker is cleared before its data is overwritten and set after the last
byte, so a process killed at any moment leaves at least one whole slot. No rank can be two commits ahead of another
(every step has a reduction over all ranks), so two slots always hold a common step. The reading of markers is pure
Python, for agents that have no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.errors import CheckpointError, SharedMemoryError

if TYPE_CHECKING:
    import torch

_MAGIC = b"MANTASNP"
_HEADER = struct.Struct("<8s16sQ")  # magic, fingerprint, payload bytes
_MARKER = struct.Struct("<Q")  # committed step + 1; 0: being written
_NOTE_LENGTH = struct.Struct("<Q")
_MARKERS_AT = 64
_DATA_AT = 4096
NOTE_BYTES = 256 * 1024
SLOTS = 2


def snapshot_path(folder: str | Path, rank: int) -> Path:
    """The snapshot file of `rank`."""
    return Path(folder) / f"rank-{rank:05d}.snapshot"


def committed_steps(path: str | Path) -> list[int]:
    """Steps whose state is whole in the file at `path`, ascending; none when there is no usable file."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(_DATA_AT)
    except FileNotFoundError:
        return []
    if len(head) < _DATA_AT or head[: len(_MAGIC)] != _MAGIC:
        return []
    markers = [_MARKER.unpack_from(head, _MARKERS_AT + 8 * slot)[0] for slot in range(SLOTS)]
    return sorted(marker - 1 for marker in markers if marker > 0)


def fingerprint(spec: dict[str, Any], rank: int) -> bytes:
    """16 bytes that tell apart states that do not fit each other: the model, the layout and the rank."""
    text = json.dumps([spec["model"], spec["parallel"], spec["data"], spec["train"]["precision"], rank], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def memory_available() -> int:
    """Bytes of memory that can be had without swapping, by the kernel's own estimate."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


@dataclass(frozen=True)
class _Mapping:
    file: mmap.mmap
    slots: list[list[torch.Tensor]]
    """For each slot, a tensor over its memory for each tensor of the state."""


class Snapshots:
    """The snapshot file of one rank, mapped; copies `state` (1-D tensors) in and out."""

    def __init__(self, folder: str | Path, rank: int, state: list[torch.Tensor], identity: bytes):
        """Open the rank's file, or make it. Raises SharedMemoryError when there is no room for both slots.

        Each slot also holds a note: up to NOTE_BYTES that belong to the same step.
        """
        self.path, self.state = snapshot_path(folder, rank), state
        self._payload = sum(tensor.numel() * tensor.element_size() for tensor in state)
        header = _HEADER.pack(_MAGIC, identity, self._payload)
        if not self._fits(header):
            self._create(header)
        self._mapping = self._map()

    def _fits(self, header: bytes) -> bool:
        try:
            with self.path.open("rb") as file:
                return file.read(len(header)) == header and self.path.stat().st_size == self._size
        except FileNotFoundError:
            return False

    @property
    def _slot_size(self) -> int:
        return -(-(self._payload + _NOTE_LENGTH.size + NOTE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def _size(self) -> int:
        return _DATA_AT + SLOTS * self._slot_size

    def _create(self, header: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if self._size > memory_available():  # shared memory may be promised more than the machine has
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            # Reserved now: a write into shared memory that is full would kill the process instead of failing.
            os.posix_fallocate(descriptor, 0, self._size)
            os.pwrite(descriptor, header, 0)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            free = min(shutil.disk_usage(self.path.parent).free, memory_available())
            raise SharedMemoryError(
                f"no room in shared memory for the snapshots: {self.path.parent} has {free} bytes free, this rank "
                f"needs {self._size}; enlarge it or use a layout with less state per rank"
            ) from error
        finally:
            os.close(descriptor)

    def _map(self) -> _Mapping:
        import torch

        with self.path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), self._size)
        slots = []
        for slot in range(SLOTS):
            position, views = _DATA_AT + slot * self._slot_size, []
            for tensor in self.state:
                views.append(torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=position))
                position += tensor.numel() * tensor.element_size()
            slots.append(views)
        return _Mapping(mapped, slots)

    def _marker(self, slot: int, value: int) -> None:
        _MARKER.pack_into(self._mapping.file, _MARKERS_AT + 8 * slot, value)

    def _note_at(self, slot: int) -> int:
        return _DATA_AT + (slot + 1) * self._slot_size - _NOTE_LENGTH.size - NOTE_BYTES

    def save(self, step: int, note: Callable[[], bytes] = bytes) -> None:
        """Copy the state of committed step `step` into the older slot, with what `note` says once that is done.

        Raises ValueError for a note of more than NOTE_BYTES.
        """
        markers = [_MARKER.unpack_from(self._mapping.file, _MARKERS_AT + 8 * slot)[0] for slot in range(SLOTS)]
        slot = markers.index(min(markers))
        self._marker(slot, 0)
        for view, tensor in zip(self._mapping.slots[slot], self.state, strict=True):
            view.copy_(tensor)
        self._write_note(slot, note())
        self._marker(slot, step + 1)

    def _write_note(self, slot: int, note: bytes) -> None:
        if len(note) > NOTE_BYTES:
            raise ValueError(f"a note of {len(note)} bytes does not fit into {NOTE_BYTES}")
        at = self._note_at(slot)
        _NOTE_LENGTH.pack_into(self._mapping.file, at, len(note))
        start = at + _NOTE_LENGTH.size
        self._mapping.file[start : start + len(note)] = note

    def load(self, step: int) -> bytes:
        """Copy the state of `step` back and return its note. Forgets a newer one, which not all ranks committed.

        Raises CheckpointError when the file does not hold that step.
        """
        markers = [_MARKER.unpack_from(self._mapping.file, _MARKERS_AT + 8 * slot)[0] for slot in range(SLOTS)]
        if step + 1 not in markers:
            raise CheckpointError(f"{self.path} holds no snapshot of step {step}")
        slot = markers.index(step + 1)
        for view, tensor in zip(self._mapping.slots[slot], self.state, strict=True):
            tensor.copy_(view)
        for other, marker in enumerate(markers):
            if marker > step + 1:
                self._marker(other, 0)
        at = self._note_at(slot)
        start = at + _NOTE_LENGTH.size
        return bytes(self._mapping.file[start : start + _NOTE_LENGTH.unpack_from(self._mapping.file, at)[0]])

    def clear(self) -> None:
        """Forget everything: the job starts from another state than these."""
        for slot in range(SLOTS):
            self._marker(slot, 0)
