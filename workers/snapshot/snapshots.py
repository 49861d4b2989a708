"""Snapshots of one rank's state in the node's shared memory, which survive the death of the trainer.

A rank has one file with two slots (`snapshot_file.py`). The state rests during forward and backward: a thread copies
it then, and before the next update `finish` makes sure of the copy. All ranks do so before they agree on that update,
so once any rank updates for step s + 1, every rank's snapshot of s is whole, and two slots always hold a common step.
Another thread sums each copy after that, for whoever reads it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.checkpoint.checksums import DamagedCheckpoint
from workers.errors import CheckpointError
from workers.snapshot.notification import bell_path, ring
from workers.snapshot.snapshot_file import NOTE_BYTES, SLOTS, Form, SnapshotFile, committed_steps

if TYPE_CHECKING:
    import torch

REPLICA_PREFIX = "replica-"
"""Start of the name of a file that a rank's partner keeps; what follows is the name of the rank's own."""
_NAME = re.compile(rf"({REPLICA_PREFIX})?rank-(\d{{5,}})\.(?:([0-9a-f]{{8}})\.)?snapshot")


def snapshot_path(folder: str | Path, rank: int, layout: str = "") -> Path:
    """The snapshot file of `rank` in the layout with tag `layout` (`layout_tag`). Each layout has files of its own, so
    a new one can be written while the old one is read."""
    tag = f".{layout}" if layout else ""
    return Path(folder) / f"rank-{rank:05d}{tag}.snapshot"


def replica_path(folder: str | Path, rank: int, layout: str) -> Path:
    """The copy of the snapshot file of `rank` that another rank's node keeps."""
    path = snapshot_path(folder, rank, layout)
    return path.with_name(f"{REPLICA_PREFIX}{path.name}")


@dataclass(frozen=True)
class Kept:
    """A snapshot file of a job, by its name."""

    path: Path
    rank: int
    layout: str
    """Tag of the layout."""
    is_replica: bool
    """Whether the rank lives on another node."""


def kept_files(folder: str | Path) -> list[Kept]:
    """All snapshot files of a job on this node."""
    folder = Path(folder)
    found = [(path, _NAME.fullmatch(path.name)) for path in (sorted(folder.iterdir()) if folder.is_dir() else [])]
    return [Kept(path, int(match[2]), match[3] or "", match[1] is not None) for path, match in found if match]


def steps_kept(folder: str | Path, rank: int, layout: str | None = None) -> list[int]:
    """Committed steps of `rank` that are whole in its own files on this node, ascending; with `layout`, the tag of
    one, only those of that layout."""
    own = [file for file in kept_files(folder) if file.rank == rank and not file.is_replica]
    wanted = [file.path for file in own if layout in (None, file.layout)]
    return sorted({step for path in wanted for step in committed_steps(path)})


def remove_other_layouts(folder: str | Path, layout: str) -> None:
    """Remove the files of all layouts but the one with tag `layout`, once nobody needs them any more."""
    for file in kept_files(folder):
        if file.layout != layout:
            file.path.unlink(missing_ok=True)


def layout_tag(spec: dict[str, Any]) -> str:
    """Eight hexadecimal digits that tell the layout of a job, a JobSpec as JSON, from its other layouts."""
    text = json.dumps(spec["parallel"], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def fingerprint(spec: dict[str, Any], rank: int) -> bytes:
    """16 bytes that tell apart states that do not fit each other: the model, the layout and the rank, of several with
    the same state (`grid.state_peers`) the first."""
    text = json.dumps([spec["model"], spec["parallel"], spec["data"], spec["train"]["precision"], rank], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Snapshots:
    """The snapshot file of one rank, mapped; copies `state` (1-D tensors) in and out.

    All methods are called on the training thread.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        state: list[torch.Tensor],
        identity: bytes,
        layout: str = "",
        table: dict[str, Any] | None = None,
    ):
        """Open the rank's file, or make it. `table` says what `state` consists of (`reshard.describe`). Raises
        SharedMemoryError when there is no room for both slots.

        Each slot also holds a note: up to NOTE_BYTES that belong to the same step.
        """
        self.path, self.state = snapshot_path(folder, rank, layout), state
        self._bell = bell_path(folder, rank)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in state)
        form = Form(identity, payload, json.dumps(table or {}, separators=(",", ":"), sort_keys=True).encode())
        self._unusable: CheckpointError | None = None
        """Why the file that was there is not used."""
        self._file = self._opened(form) or SnapshotFile.create(self.path, form)
        self._slots = [self._views(slot) for slot in range(SLOTS)]
        """For each slot, a tensor over its memory for each tensor of the state."""
        self.stall_seconds = 0.0
        """For how long the last snapshot held the training thread up."""
        self.copy_seconds = 0.0
        """What the last copy took, beside the training."""
        self.sum_seconds = 0.0
        """What the last sums took, beside the training."""
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._summer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot-sums")
        self._copying: Future[None] | None = None
        self._summing: Future[None] | None = None
        self._stalled = 0.0
        self._turns = [0] * SLOTS
        """How often each slot was begun: a sum that took too long is of nothing."""
        self._lock = threading.Lock()

    def _opened(self, form: Form) -> SnapshotFile | None:
        if not self.path.exists():
            return None
        try:
            found = SnapshotFile.open(self.path, mmap.ACCESS_WRITE)
        except CheckpointError as error:
            self._unusable = error
            return None
        if found.form == form:
            return found
        found.close()
        self._unusable = CheckpointError(f"{self.path} was of another job or layout")
        return None

    def _views(self, slot: int) -> list[torch.Tensor]:
        import torch

        position, views = self._file.form.payload_at(slot), []
        for tensor in self.state:
            views.append(torch.frombuffer(self._file.memory, dtype=tensor.dtype, count=tensor.numel(), offset=position))
            position += tensor.numel() * tensor.element_size()
        return views

    def start(self, step: int, note: bytes = b"", then: Callable[[], object] | None = None) -> None:
        """Begin to copy the state of committed step `step` into the older slot, and return. The state must not change
        before `finish`. Once the copy is whole, `then` is called, on another thread.

        Raises ValueError for a note of more than NOTE_BYTES.
        """
        began = time.perf_counter()
        self.finish()
        if len(note) > NOTE_BYTES:
            raise ValueError(f"a note of {len(note)} bytes does not fit into {NOTE_BYTES}")
        self._unusable = None
        self._copying = self._copier.submit(self._copy, step, note, then, event_of(self.state))
        self._stalled = time.perf_counter() - began

    def finish(self) -> bool:
        """Return once the copy that was begun is whole, and whether there was one; raises what kept it from that."""
        if self._copying is None:
            return False
        began, copying, self._copying = time.perf_counter(), self._copying, None
        copying.result()
        self.stall_seconds = self._stalled + time.perf_counter() - began
        return True

    def save(self, step: int, note: bytes = b"") -> None:
        """`start` and `finish`."""
        self.start(step, note)
        self.finish()

    def _copy(self, step: int, note: bytes, then: Callable[[], object] | None, ready: Any) -> None:
        began, slot = time.perf_counter(), self._file.oldest()
        turn = self._begin(slot)
        copy_beside(self._slots[slot], self.state, ready)
        self._file.write_note(slot, note)
        self._file.commit(slot, step)
        self.copy_seconds = time.perf_counter() - began
        if then is not None:
            then()
        self._summing = self._summer.submit(self._seal, slot, step, turn)

    def _begin(self, slot: int) -> int:
        with self._lock:
            self._turns[slot] += 1
            self._file.begin(slot)
            return self._turns[slot]

    def _seal(self, slot: int, step: int, turn: int) -> None:
        began, sums = time.perf_counter(), []
        for found in self._file.sums(slot):
            if self._turns[slot] != turn:
                return
            sums.append(found)
        with self._lock:
            if self._turns[slot] != turn:
                return
            self._file.seal(slot, step, sums)
        self.sum_seconds = time.perf_counter() - began
        ring(self._bell)

    def load(self, step: int) -> bytes:
        """Copy the state of `step` back and return its note. Forgets a newer one, which not all ranks committed.

        Raises CheckpointError when the file does not hold that step, DamagedCheckpoint naming file and byte when it
        is not what was written. Then the state is as it was, and a damaged step is not offered again.
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
            self._begin(slot)
            raise
        copy_beside(self.state, self._slots[slot], None)
        self.forget_after(step)
        if not sealed:
            self._summing = self._summer.submit(self._seal, slot, step, self._turns[slot])
        return self._file.note(slot)

    def kept(self, step: int) -> list[torch.Tensor] | None:
        """The copy of the state of `step`, in the order of `state`; None where there is none. It is overwritten by the
        second copy from now."""
        self.finish()
        slot = next((slot for slot in range(SLOTS) if self._file.step(slot) == step), None)
        return None if slot is None else self._slots[slot]

    def forget_after(self, step: int) -> None:
        """Forget all steps above `step`."""
        self.finish()
        for slot in range(SLOTS):
            held = self._file.step(slot)
            if held is not None and held > step:
                self._begin(slot)

    def _follow(self) -> None:
        """Use the file that lies at the path now, where it is another one: a replica that the agent fetched after this
        process was made ready."""
        if not self.path.exists() or self._is_at_its_path():
            return
        found = self._opened(self._file.form)
        if found is not None:
            self._go_on_in(found)

    def _is_at_its_path(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.descriptor))
        except FileNotFoundError:
            return False

    def _go_on_in(self, file: SnapshotFile) -> None:
        self.wait_for_sums()
        before, self._file = self._file, file
        self._slots = [self._views(slot) for slot in range(SLOTS)]
        before.close()

    def wait_for_sums(self) -> None:
        """Return once the newest copy has its sums."""
        self.finish()
        if self._summing is not None:
            self._summing.result()

    def clear(self) -> None:
        """Forget everything: the job starts from another state than these. A file that was removed is made anew."""
        self.finish()
        if not self._is_at_its_path():
            self._go_on_in(SnapshotFile.create(self.path, self._file.form))
        for slot in range(SLOTS):
            self._begin(slot)

    def close(self) -> None:
        """Finish, end the threads and let go of the file, which stays."""
        self.finish()
        self._copier.shutdown()
        self._summer.shutdown()
        self._slots = []
        self._file.close()


def event_of(state: list[torch.Tensor]) -> Any:
    """On a GPU, an event after all work on the state so far; else None."""
    import torch

    if not state or not state[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(state[0].device))
    return event


def copy_beside(targets: list[torch.Tensor], sources: list[torch.Tensor], ready: Any) -> None:
    """Copy each source into its target. `ready`: a GPU's event to wait for, on a stream beside that of the training
    thread, so that no copy waits for the forward pass that was queued before it."""
    import torch

    beside: AbstractContextManager[Any] = nullcontext()
    if ready is not None:
        stream = torch.cuda.Stream(sources[0].device)
        stream.wait_event(ready)
        beside = torch.cuda.stream(stream)
    with torch.no_grad(), beside:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
