"""Snapshots of one rank's state in the node's shared memory, which survive the death of the trainer.

A rank has one file with two slots (`snapshot_file.py`). The state does not change during forward and backward: a thread
copies it then, and before the next update `finish` waits for the copy. All ranks do so before they agree on that
update, so once any rank updates for step s + 1, every rank's snapshot of s is complete, and the two slots always have a
common step. Another thread then computes the checksums of each copy, for its readers.
"""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manta.workers.checkpoint.checksums import BLOCK_BYTES, DamagedCheckpoint
from manta.workers.checkpoint.uploads import MappedFile
from manta.workers.errors import CheckpointError, SharedMemoryError
from manta.workers.parallel.data.state import StatePart, tensors_of
from manta.workers.snapshot.files import notification_path, notify, snapshot_path
from manta.workers.snapshot.node_memory import ANY_MEMORY, SnapshotMemory, in_node_memory
from manta.workers.snapshot.snapshot_file import NOTE_BYTES, SLOTS, Form, SnapshotFile, committed_steps
from manta.workers.snapshot.state_copy import Done, Ready, StateCopier, copy_tensors
from manta.workers.system.gpu import PinnedMemory

RETRY_SECONDS = 60.0
"""Seconds between two attempts to make a file anew that was removed, which may take seconds where there is no room."""


class _Constants:
    """The part of the state that no step changes, at the end of each slot: which slots have it, and the checksums of
    the blocks that hold nothing else. These are computed once, so that later corruption is noticed."""

    def __init__(self, changing: int, state: Sequence[torch.Tensor]):
        """The first `changing` tensors of the state do change."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in state]
        first = -(-sum(sizes[:changing]) // BLOCK_BYTES)
        self._changing, self._count = changing, len(state)
        self._blocks = range(first, -(-sum(sizes) // BLOCK_BYTES)) if changing < len(state) else range(0)
        self._present = [False] * SLOTS
        self.sums: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        """Known checksums for each slot."""

    def to_copy(self, slot: int) -> int:
        """How many tensors of the state must be copied to the slot, which then has all of them."""
        there, self._present[slot] = self._present[slot], True
        return self._changing if there else self._count

    def store_sums(self, slot: int, sums: Sequence[int]) -> None:
        """Keep the checksums of the slot's constant blocks; `sums` has those of all its blocks."""
        if self._present[slot]:
            self.sums[slot] = {block: sums[block] for block in self._blocks}

    def forget(self) -> None:
        """The constant part has changed, so no slot has it."""
        self._present = [False] * SLOTS
        self.sums = [{} for _ in range(SLOTS)]


@dataclass(frozen=True)
class ProtectedSlot:
    """A slot that is protected from being overwritten. For any thread."""

    part: Callable[[str], torch.Tensor]
    """Returns all elements of the part of the state with this name, since they are contiguous."""
    check: Callable[[], object]
    """Raises DamagedCheckpoint if the slot no longer has the copied contents."""
    _copying: Future[Done] | None

    def wait(self) -> None:
        """Return once the copy is complete; raises the error of the copy."""
        if self._copying is not None:
            self._copying.result()


class Snapshots:
    """The snapshot file of one rank, mapped; copies the parts of the state in and out.

    All methods are called on the training thread.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        parts: Sequence[StatePart],
        identity: bytes,
        layout: str = "",
        table: dict[str, Any] | None = None,
        memory: SnapshotMemory = ANY_MEMORY,
    ):
        """Open the rank's file, or create it. `parts`: of the state; the last ones may be such that no step changes,
        which only change with `load` and before `clear`, so that they are copied to each slot only once. `table`:
        description of the state (`reshard.describe`). `memory`: where a new file is created. Raises SharedMemoryError
        if there is no room for both slots.

        Each slot also holds a note: up to NOTE_BYTES that belong to the same step.
        """
        self.path, self.parts, self.state = snapshot_path(folder, rank, layout), tuple(parts), tensors_of(parts)
        self._constants = _Constants(len(tensors_of(part for part in parts if part.changes)), self.state)
        self._notification = notification_path(folder, rank)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in self.state)
        form = Form(identity, payload, json.dumps(table or {}, separators=(",", ":"), sort_keys=True).encode())
        self._unusable: CheckpointError | None = None
        """Why an existing file is not used."""
        self._memory = memory
        self._memory_file: MappedFile | None = None
        self._file = self._opened(form) or memory.create(self.path, form)
        self._slots = [self._views(slot) for slot in range(SLOTS)]
        """For each slot, a tensor over its memory for each tensor of the state."""
        self._pinned = self._pin()
        self.stall_seconds = 0.0
        """How long the last snapshot held up the training: the thread, or on a GPU the device."""
        self.copy_seconds = 0.0
        """Duration of the last copy, which overlaps with training."""
        self.sum_seconds = 0.0
        """Duration of the last checksums, which overlap with training."""
        self._copier = StateCopier("snapshot")
        self._summer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot-sums")
        self._summing: Future[None] | None = None
        self._stalled = 0.0
        self._slot_versions = [0] * SLOTS
        """How many times each slot was begun: checksums are dropped if the slot was begun again meanwhile."""
        self._lock = threading.Lock()
        self._newest: tuple[int, int] | None = None
        """Step and slot of the last copy that was begun."""
        self._protected: int | None = None
        """The protected slot."""
        self._retry_at = 0.0
        """When a removed file may be made anew, by the monotonic clock."""

    def _opened(self, form: Form) -> SnapshotFile | None:
        if not self.path.exists():
            return None
        try:
            file = SnapshotFile.open(self.path, mmap.ACCESS_WRITE)
        except CheckpointError as error:
            self._unusable = error
            return None
        if file.form == form:
            return file
        file.close()
        self._unusable = CheckpointError(f"{self.path} was of another job or layout")
        return None

    @property
    def bytes_outside(self) -> int:
        """Bytes of the file if it is in the daemon's memory; 0 if it is in shared memory."""
        return self._file.form.size if in_node_memory(self.path) else 0

    @property
    def pin_error(self) -> int:
        """The driver's error code if a GPU cannot copy into the file's memory directly; 0 if it can, or there is no
        GPU."""
        return self._pinned.error

    def _pin(self) -> PinnedMemory:
        memory = torch.frombuffer(self._file.memory, dtype=torch.uint8)
        return PinnedMemory(memory, on_gpu=any(tensor.is_cuda for tensor in self.state))

    def _views(self, slot: int) -> list[torch.Tensor]:
        position, views = self._file.form.payload_at(slot), []
        for tensor in self.state:
            views.append(torch.frombuffer(self._file.memory, dtype=tensor.dtype, count=tensor.numel(), offset=position))
            position += tensor.numel() * tensor.element_size()
        return views

    def start(self, step: int, note: bytes = b"", then: Callable[[], object] | None = None) -> None:
        """Begin to copy the state of committed step `step` into the older slot, and return. The state must not change
        before `finish`. When the copy is complete, `then` is called on another thread.

        Raises ValueError for a note of more than NOTE_BYTES.
        """
        began = time.perf_counter()
        self.finish()
        if len(note) > NOTE_BYTES:
            raise ValueError(f"a note of {len(note)} bytes does not fit into {NOTE_BYTES}")
        self.ensure_at_path()
        self._unusable = None
        slot = self._file.oldest(self._protected)
        self._newest = step, slot
        self._copier.start(self.state, partial(self._copy, slot, step, note, then))
        self._stalled = time.perf_counter() - began

    def finish(self) -> bool:
        """Wait for the copy that was begun; returns whether there was one. Raises the error of the copy."""
        if not self._copier.finish():
            return False
        self.stall_seconds = self._stalled + self._copier.stall_seconds
        return True

    def save(self, step: int, note: bytes = b"") -> None:
        """`start` and `finish`."""
        self.start(step, note)
        self.finish()

    def _copy(self, slot: int, step: int, note: bytes, then: Callable[[], object] | None, ready: Ready) -> Done:
        began = time.perf_counter()
        version = self._begin(slot)
        count = self._constants.to_copy(slot)
        done = copy_tensors(self._slots[slot][:count], self.state[:count], ready)
        self._file.write_note(slot, note)
        self._file.commit(slot, step)
        self.copy_seconds = time.perf_counter() - began
        if then is not None:
            then()
        self._summing = self._summer.submit(self._seal, slot, step, version)
        return done

    def _begin(self, slot: int) -> int:
        with self._lock:
            self._slot_versions[slot] += 1
            self._file.begin(slot)
            return self._slot_versions[slot]

    def _seal(self, slot: int, step: int, version: int) -> None:
        began, sums = time.perf_counter(), []
        for block_sum in self._file.sums(slot, self._constants.sums[slot]):
            if self._slot_versions[slot] != version:
                return
            sums.append(block_sum)
        with self._lock:
            if self._slot_versions[slot] != version:
                return
            self._file.seal(slot, step, sums)
            self._constants.store_sums(slot, sums)
        self.sum_seconds = time.perf_counter() - began
        notify(self._notification)

    def load(self, step: int) -> bytes:
        """Copy the state of `step` back and return its note. Discards a newer one, which not all ranks committed.

        Raises CheckpointError if the file does not hold that step, DamagedCheckpoint naming file and byte if it is not
        as written. The state is then unchanged, and no damaged step is offered again.
        """
        self.finish()
        self._follow()
        try:
            slot = self._file.slot_of(step)
        except CheckpointError as error:
            raise (self._unusable or error) from error
        try:
            sealed = self._file.check(slot)
        except DamagedCheckpoint:
            self._discard_damaged()
            raise
        copy_tensors(self.state, self._slots[slot], None)
        self._constants.forget()
        self.forget_after(step)
        if not sealed:
            self._summing = self._summer.submit(self._seal, slot, step, self._slot_versions[slot])
        return self._file.note(slot)

    def _discard_damaged(self) -> None:
        """Of all slots: otherwise the next attempt fails as well, with the other step."""
        for slot in range(SLOTS):
            try:
                self._file.check(slot)
            except DamagedCheckpoint:
                self._begin(slot)
        self._constants.forget()

    def copied_parts(self, step: int) -> dict[str, tuple[torch.Tensor, ...]] | None:
        """The copy of the state of `step`: the tensors of each part by its name; None if there is none. The second copy
        from now overwrites it."""
        self.finish()
        slot = next((slot for slot in range(SLOTS) if self._file.step(slot) == step), None)
        return None if slot is None else {part.name: part.split(self._part(slot, part.name)) for part in self.parts}

    def protect(self, step: int, make_note: Callable[[], bytes]) -> ProtectedSlot:
        """The snapshot of committed step `step`, which is started now if it was not yet, with a note from `make_note`.
        Until `unprotect` its slot is not overwritten, and all snapshots use the other one."""
        slot = self._slot_of(step)
        if slot is None:
            self.start(step, make_note())
            slot = self._slot_of(step)
            assert slot is not None
        self._protected = slot
        return ProtectedSlot(partial(self._part, slot), partial(self._check, slot), self._copier.under_way)

    def unprotect(self) -> None:
        """The protected slot may be overwritten again. All ranks do this at the same step, or they would end up with no
        common step."""
        self._protected = None

    @property
    def protected_step(self) -> int | None:
        """The step whose snapshot is protected; None if none is."""
        return None if self._protected is None else self._file.step(self._protected)

    @property
    def memory_file(self) -> MappedFile:
        """The memory of all slots; it changes if the file does."""
        file = self._file
        if self._memory_file is None or self._memory_file.descriptor != file.descriptor:
            self._memory_file = MappedFile(file.descriptor, file.memory)
        return self._memory_file

    def _slot_of(self, step: int) -> int | None:
        """The slot that holds `step`, or is being filled with it."""
        if self._copier.under_way is not None and self._newest is not None and self._newest[0] == step:
            return self._newest[1]
        return next((slot for slot in range(SLOTS) if self._file.step(slot) == step), None)

    def _part(self, slot: int, name: str) -> torch.Tensor:
        at = self._file.form.payload_at(slot)
        for part in self.parts:
            if part.name == name:
                return torch.frombuffer(self._file.memory, dtype=part.dtype, count=part.length, offset=at)
            at += part.length * part.dtype.itemsize
        raise KeyError(name)

    def _check(self, slot: int) -> None:
        self._summer.submit(lambda: None).result()  # pending checksums come first
        self._file.check(slot)

    def forget_after(self, step: int) -> None:
        """Discard all steps above `step`."""
        self.finish()
        for slot in range(SLOTS):
            slot_step = self._file.step(slot)
            if slot_step is not None and slot_step > step:
                self._begin(slot)

    def _follow(self) -> None:
        """Use the file that is at the path now, if it is a different one: a backup that the agent fetched after this
        process was prepared."""
        if not self.path.exists() or self._file.is_at_its_path():
            return
        file = self._opened(self._file.form)
        if file is not None:
            self._switch_to(file)

    def ensure_at_path(self) -> None:
        """If the file was removed, or another is in its place, make it anew with all that it holds: others find it by
        its path, and what no path leads to ends with this process. What prevents that is logged, and does not end the
        training."""
        self.finish()
        # A protected slot is being read: that comes first.
        if self._protected is not None or self._file.is_at_its_path() or time.monotonic() < self._retry_at:
            return
        try:
            file = self._memory.create(self.path, self._file.form)
        except (OSError, SharedMemoryError) as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            lost = f"the snapshot file {self.path} was removed and cannot be recreated yet: {error}"
            print(f"{lost}; training continues, but if this process ends, its state is lost", flush=True)
            return
        self.wait_for_sums()
        file.copy_from(self._file)
        self._switch_to(file)
        print(f"the snapshot file {self.path} was removed and has been recreated; nothing is lost", flush=True)

    def _switch_to(self, file: SnapshotFile) -> None:
        self.wait_for_sums()
        self._constants.forget()
        self.unprotect()
        self._pinned.release()
        before, self._file, self._memory_file = self._file, file, None
        self._slots = [self._views(slot) for slot in range(SLOTS)]
        self._pinned = self._pin()
        before.close()

    def wait_for_sums(self) -> None:
        """Return once the newest copy has its checksums."""
        self.finish()
        if self._summing is not None:
            self._summing.result()

    def clear(self) -> None:
        """Discard everything: the job starts from a different state. A file that was removed is created again."""
        self.finish()
        if not self._file.is_at_its_path():
            self._switch_to(self._memory.create(self.path, self._file.form))
        self._constants.forget()
        for slot in range(SLOTS):
            self._begin(slot)

    def make_readable(self, step: int | None, make_note: Callable[[], bytes]) -> None:
        """Return once other processes can read committed step `step` (None: the newest steps) here, with its checksums:
        it is copied, with a note from `make_note`, if it was not yet."""
        self.ensure_at_path()
        if step is not None and step not in committed_steps(self.path):
            self.save(step, make_note())
        self.wait_for_sums()  # snapshots are only copied to other nodes with their checksums

    def close(self) -> None:
        """Finish, end the threads and close the file, which stays."""
        self.finish()
        self._copier.close()
        self._summer.shutdown()
        self._slots = []
        self._pinned.release()
        self._file.close()


class NoSnapshots:
    """The snapshots of a rank that makes none: nothing is copied, and there is nothing to wait for or to load."""

    stall_seconds = copy_seconds = 0.0
    protected_step = memory_file = None

    def load(self, step: int) -> bytes:
        """Raises ValueError."""
        raise ValueError(f"cannot resume from a snapshot of step {step} without a location for snapshots")

    def copied_parts(self, step: int) -> dict[str, tuple[torch.Tensor, ...]] | None:
        """None: there is no copy of the step."""
        return None

    def protect(self, step: int, make_note: Callable[[], bytes]) -> ProtectedSlot | None:
        """None: there is no slot."""
        return None

    def finish(self, *about: object) -> bool:
        """False, as nothing is done for any request about copies."""
        return False

    start = save = unprotect = forget_after = make_readable = clear = close = finish
