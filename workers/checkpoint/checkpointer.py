"""Saves durable checkpoints concurrently with training: a thread writes the state from its snapshot. Without snapshots,
it copies the state during the next step's forward and backward, which do not modify it, and writes the copy.

A failed save is an event and never fails the job; the next save tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from manta.workers.checkpoint import catalog, durable, pruning
from manta.workers.checkpoint.catalog import Condition, FrozenWeights, Manifest
from manta.workers.checkpoint.checksums import DamagedCheckpoint, FileSums, SummedFiles
from manta.workers.checkpoint.opening import read_own_contents
from manta.workers.checkpoint.state_parts import agree, load_parts, needed_rectangles, owned_rectangles, part_lengths
from manta.workers.checkpoint.uploads import SharedBuffer, Uploads
from manta.workers.comm.comm import Comm
from manta.workers.comm.shared_work import WORLD, SharedWork
from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.errors import CheckpointError, MantaError, PeerLost
from manta.workers.parallel.data.state import FROZEN, MODEL, StatePart, tensors_of
from manta.workers.snapshot.snapshots import NoSnapshots, ProtectedSlot, Snapshots
from manta.workers.snapshot.state_copy import Ready, copy_tensors, event_after
from manta.workers.spec.parameters import frozen_names
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location, ObjectPath, parse_location
from manta.workers.system.gpu import PinnedMemory

Parts = Callable[[], AbstractContextManager[dict[str, torch.Tensor]]]
"""Opens the parts of the state to save, by name, which stay unchanged within the block."""
Event = Callable[[str, int, str, dict[str, Any]], None]
"""Called to report an event: type, step, message, data."""

SAVE_WAITS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each attempt of a save that must be on disk before all ranks end."""
PATIENCE_SECONDS = 1.0
"""Maximum total seconds that a save may delay training if other saves become due before it is written."""
CLOSE_SECONDS = 2.0
"""Seconds that a rank that leaves a generation waits for a save that cannot be completed any more, or whose store does
not answer. A process that uploads gets half of that to end."""
POLL_SECONDS = 1.0
"""Seconds between checks of whether an awaited save makes progress."""


class Checkpointer:
    """Saves and loads the durable checkpoints of one rank. All ranks call the same methods at the same steps."""

    def __init__(
        self,
        folder: str,
        job: str,
        spec: JobSpec,
        engine: Engine,
        comm: Comm,
        event: Event,
        snapshots: Snapshots | NoSnapshots,
        note: Callable[[], bytes] = bytes,
    ):
        """`snapshots`: of the same state, with notes from `note`."""
        self.folder, self.job, self.spec = folder, job, spec
        self.engine, self.comm, self.event = engine, comm, event
        self._snapshots, self._note = snapshots, note
        owned, self._needed = owned_rectangles(engine), needed_rectangles(engine)
        self._owned = {name: those for name, those in owned.items() if name != FROZEN}
        self._owned_frozen = {name: those for name, those in owned.items() if name == FROZEN}
        self._frozen_names = {f"{MODEL}.{name}" for name in frozen_names(spec)}
        """What is saved once, as checkpoints call it; the same on all ranks."""
        self._frozen: FrozenWeights | None = None
        """Where that is, as far as rank 0 knows, for checkpoints of this generation."""
        self._lengths = part_lengths(engine)
        self._writer = _new_thread()
        self._pending: Future[str | None] | None = None
        self._save: Save | None = None
        """The newest save."""
        self._search: SaveSearch | None = None
        """The search for a save that earlier generations did not complete, until all ranks know its result."""
        self._copy_buffer: SharedBuffer | None = None
        self._pinned: PinnedMemory | None = None
        self._uploads: Uploads | None = None
        self._writes = 0
        """Number of writes of all saves."""
        self._started = 0.0
        """When the newest save or search began, by the monotonic clock."""
        self._patience = 0.0
        """Seconds that the newest save may still hold up training."""
        self._delayed = False
        """Whether a save has been due since an earlier step; the same on all ranks."""
        self.began = 0
        """The generation that began at step 0 and that the state descends from; 0: unknown."""
        self.deletes_old = True
        """Whether a complete checkpoint makes older ones be deleted."""
        self._sealed = 0
        """Step of the newest checkpoint that this process has completed; 0: none."""
        self.failure: str | None = None
        """Why the newest save failed; the same on all ranks."""

    def enter_generation(self, began: int, step: int) -> None:
        """A generation begins at committed step `step`, with a state that descends from that of `began`, which began at
        step 0. Delayed saves are dropped, since a rank that is new to the job does not know of them."""
        self.began, self._delayed, self._search, self._frozen = began, False, None, None
        self._forget_sealed_after(step)

    def _forget_sealed_after(self, step: int) -> None:
        """Later steps are repeated, so checkpoints that were sealed of them no longer count."""
        if self._sealed > step:
            self._sealed = 0

    def due(self, step: int) -> bool:
        """Whether `step` is to be saved: every `checkpoint.every_steps`, and the last step."""
        every = self.spec.checkpoint.every_steps
        return every > 0 and (step % every == 0 or step == self.spec.train.steps)

    def is_needed(self, step: int) -> bool:
        """Whether a save is due at `step`, is overdue since an earlier step, or may be missing."""
        return self._delayed or self._search is not None or self.due(step)

    def begin(self, step: int, numbers: dict[str, Any] | None = None) -> None:
        """`start`, unless some rank is still writing the last save: in that case the due save is delayed, without
        holding up training, to the first step at which no rank is. The save of the last step is not delayed. Raises
        PeerLost."""
        search, is_last = self._search, step == self.spec.train.steps
        is_due = self._delayed or (self.due(step) and (search is None or step != search.step))
        if is_last:
            self.finish()
        are_free, is_missing = (True, False) if is_last and search is None else self._all_are_free()
        if not are_free:
            if is_due and not self._delayed:
                self._delayed = True
                self._report_delay(step)
            return
        self._search = None
        if is_due or is_missing:
            self.start(step, numbers)

    def begin_missing_save(self, step: int, numbers: dict[str, Any] | None = None) -> None:
        """`begin` if no save since the last due one, up to committed step `step`, is complete on disk, because a rank
        died meanwhile. Rank 0 looks for it and informs the others: it reads the listing of all checkpoints, which not
        every rank should do to a shared store, and ranks might see different results. It does so concurrently with
        training, which does not wait for a store that does not answer. Raises PeerLost."""
        every = self.spec.checkpoint.every_steps
        due = step if self.due(step) else step - step % every if every else 0
        if not due:
            return
        self._search = search = SaveSearch(step)
        self._started, self._patience = time.monotonic(), PATIENCE_SECONDS
        if self.comm.rank == 0:
            self._pending = self._writer.submit(self._search_saves, search, due)
        self.begin(step, numbers)

    def _search_saves(self, search: SaveSearch, due: int) -> str | None:
        """Like `_write`, in whose place it runs: nothing here can fail."""
        steps = range(due, search.step + 1)
        search.is_missing = self._sealed not in steps and all(
            each.step not in steps for _, each in catalog.complete_checkpoints(self.folder)
        )
        return None

    def save_now(self, step: int, numbers: dict[str, Any] | None = None, waits: Sequence[float] = SAVE_WAITS) -> bool:
        """Save the state of committed step `step`, due or not, and return when it is complete on disk. Returns False if
        all attempts failed; `waits` are the seconds before each attempt. Raises PeerLost."""
        self.finish()
        for seconds in waits:
            if self._is_complete(step):
                return True
            time.sleep(seconds)
            self.start(step, numbers, "it will be retried" if seconds != waits[-1] else "the state stays in memory")
            self.finish()
        return self._is_complete(step)

    def _is_complete(self, step: int) -> bool:
        """Whether this generation's checkpoint of `step` is complete according to rank 0, which seals checkpoints."""
        path, seen = catalog.checkpoint_path(self.folder, step, self.comm.generation), False
        if self.comm.rank == 0:
            seen = catalog.inspect(path)[0] is Condition.COMPLETE
        return self._on_any_rank(seen)[0]

    def _on_any_rank(self, *values: bool) -> list[bool]:
        """For each of these values, whether it is true on any rank; the same on all ranks. Raises PeerLost."""
        counts = torch.tensor([float(value) for value in values], device=self.comm.device)
        self.comm.all_reduce("world", counts)
        answer = [bool(count) for count in counts.tolist()]
        self.comm.confirm()
        return answer

    def start(self, step: int, numbers: dict[str, Any] | None = None, if_it_fails: str | None = None) -> None:
        """Begin to write the state of committed step `step`, with its `numbers` in the manifest: from its snapshot,
        which is protected and started if necessary, or from a copy. The state must not change before that is complete
        and `finish_copy` has returned. Waits for the last save. `if_it_fails`: the consequence of a failure, in
        words."""
        self.finish()
        self.failure, self._delayed = None, False
        self._started, self._patience = time.monotonic(), PATIENCE_SECONDS
        path = str(catalog.checkpoint_path(self.folder, step, self.comm.generation))
        self._report("checkpoint_saving", step, f"saving the checkpoint of step {step}", {"path": path})
        changing = (part for part in self.engine.parts() if part.changes and not part.ranges)
        small = {part.name: torch.cat(part.tensors).tolist() for part in changing}
        then = if_it_fails or (
            "training continues" if step < self.spec.train.steps else "the job cannot finish without it"
        )
        self._save = save = Save(step, path, self.comm.generation, self.comm.shared_work, small, numbers, then)
        self._pending = self._writer.submit(self._write, save, self._begin_parts(save))

    def _begin_parts(self, save: Save) -> Parts:
        slot = self._snapshots.protect(save.step, self._note)
        if slot is None:
            return partial(self._copied_state, event_after(self.engine.state()), save.copied)
        save.copied.set()
        return partial(self._in_slot, slot)

    @property
    def writing(self) -> bool:
        """Whether the newest save is in progress, or the search for a missing one."""
        return self._pending is not None and not self._pending.done()

    def _all_are_free(self) -> tuple[bool, bool]:
        """Whether no rank is writing or searching any more; and after a search, whether a save is missing. Waits as
        long as the save's patience lasts: saves that take no longer are made at the requested steps."""
        if self._pending is not None:
            began = time.monotonic()
            wait([self._pending], self._patience)
            self._patience = max(0.0, self._patience - (time.monotonic() - began))
        writing, is_missing = self._on_any_rank(self.writing, self._search is not None and self._search.is_missing)
        return not writing, is_missing

    def _report_delay(self, step: int) -> None:
        seconds, data = time.monotonic() - self._started, {}
        reason = f"existing checkpoints have been searched for {seconds:.1f} s"
        if self._search is None and self._save is not None:
            reason = f"that of step {self._save.step} has been saving for {seconds:.1f} s"
            data = {"writing": self._save.step}
        message = f"the checkpoint due at step {step} waits: {reason}"
        self._report("checkpoint_delayed", step, message, {**data, "seconds": seconds})

    @property
    def copying(self) -> bool:
        """Whether the state being saved is still being copied."""
        return self._save is not None and not self._save.copied.is_set()

    def finish_copy(self) -> None:
        """Wait until the state being saved has been copied."""
        if self._save is not None:
            self._save.copied.wait()

    def finish(self) -> None:
        """Wait until the save in progress is on disk or has failed. While it makes progress, the rank does not count as
        hung; if it waits for another rank's part, the record shows that."""
        if self._pending is not None:
            writes, waits = self._writes, False
            while not wait([self._pending], POLL_SECONDS).done:
                if self._writes != writes:
                    self.comm.progress.moved()
                    writes = self._writes
                if (awaited := self.comm.shared_work.awaited) is not None:
                    self.comm.progress.waits_for(awaited, WORLD, sending=False)
                    waits = True
            if waits:
                self.comm.progress.moved()
            self.failure = self._pending.result()
            self._pending = None

    def leave(self) -> None:
        """`finish` for a rank that comes to rest and has little time: an upload that is incomplete by now is aborted,
        and a store that does not answer is not waited for."""
        if self._pending is not None and self._has_left():
            if self._uploads is not None and self.writing:
                self._uploads.abort()
            if wait([self._pending], CLOSE_SECONDS).not_done:
                self._abandon_save()
        self.finish()

    def _abandon_save(self) -> None:
        """Continue with another thread. The abandoned one finishes only its current write: it ends when the store or
        file system answers, or with the process. It may still complete a checkpoint that all ranks have written."""
        if self._save is not None:
            self._save.abandoned = True
        self._pending, self.failure = None, "it was incomplete when its ranks disconnected"
        self._writer.shutdown(wait=False)
        self._writer = _new_thread()

    def _has_left(self) -> bool:
        """Whether the ranks have left each other, so that none can complete a save."""
        return self.comm.size("world") > 1 and self.comm.is_over()

    def _wrote(self, save: Save) -> None:
        """Some part of a save is written. Raises PeerLost if the rest is useless because its ranks have left each
        other, and a rank that comes to rest has little time."""
        self._writes += 1
        if save.abandoned:
            raise PeerLost("the ranks that saved have left each other")
        if self.comm.size("world") > 1:
            self.comm.raise_if_over()

    def close(self) -> None:
        """End the writing thread after the current save."""
        self._writer.shutdown()
        if self._pinned is not None:
            self._pinned.release()
        if self._uploads is not None:
            self._uploads.close()

    def undo_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, which will be repeated. No rank may be saving one."""
        self._delayed, self._search = False, None
        self._forget_sealed_after(step)
        for old in pruning.remove_after(self.folder, step, self.began) if self.comm.rank == 0 else ():
            self._report(
                "checkpoint_deleted",
                step,
                f"deleted checkpoint {old.name}, whose steps were rolled back",
                {"path": str(old)},
            )

    def restore(self, path: str) -> dict[str, Any] | None:
        """Load this rank's part of the state from the checkpoint at `path`; returns the manifest's numbers.

        Raises CheckpointError, or DamagedCheckpoint if an older one may be usable: on every rank, as soon as one of
        them cannot read its part. No rank's state has changed then.
        """
        problem: CheckpointError | None = None
        try:
            manifest, parts = durable.load(path, self._needed, self._lengths, self.comm.progress.moved)
        except CheckpointError as error:
            problem = error
        agree(self.comm, problem)
        self.engine.forget_small()
        load_parts(self.engine, parts | {name: torch.tensor(values) for name, values in manifest.small.items()})
        return manifest.numbers

    def prepare_memory(self) -> None:
        """Prepare the memory that is saved from, and the process that uploads it, before the first save and
        concurrently with training."""
        if self.spec.checkpoint.every_steps > 0:
            self._writer.submit(self._prepare)

    def _prepare(self) -> None:
        memory = self._snapshots.memory_file or self._buffer()
        if self._uploads is not None and self._uploads.buffer is not memory:
            self._uploads.close()
            self._uploads = None
        if self._uploads is None and isinstance(parse_location(self.folder), ObjectPath):
            self._uploads = Uploads(memory)
            self._uploads.start()

    def _buffer(self) -> SharedBuffer:
        """Memory for all trained parts, one after the other. It is kept between saves: allocating new pages takes
        longer than filling them, and the next step's update waits for that."""
        if self._copy_buffer is None:
            trained = self._trained_parts()
            (dtype,) = {part.dtype for part in trained}
            self._copy_buffer = SharedBuffer((sum(part.length for part in trained),), dtype)
            on_gpu = any(tensor.is_cuda for tensor in tensors_of(trained))
            self._pinned = PinnedMemory(self._copy_buffer.tensor, on_gpu)
        return self._copy_buffer

    def _trained_parts(self) -> list[StatePart]:
        return [part for part in self.engine.parts() if part.ranges and part.changes]

    @contextmanager
    def _copied_state(self, ready: Ready, copied: threading.Event) -> Iterator[dict[str, torch.Tensor]]:
        """A copy of the state, whose memory is reused by the next save."""
        try:
            state = self._copy_state(ready)
        finally:
            copied.set()
        yield state

    def _copy_state(self, ready: Ready) -> dict[str, torch.Tensor]:
        trained = self._trained_parts()
        memory = self._buffer().tensor.split([part.length for part in trained])
        copies = {part.name: copy for part, copy in zip(trained, memory, strict=True)}
        copy_tensors([to for part in trained for to in part.split(copies[part.name])], tensors_of(trained), ready)
        return copies

    @contextmanager
    def _in_slot(self, slot: ProtectedSlot) -> Iterator[dict[str, torch.Tensor]]:
        """The state in its snapshot. Other processes can open that memory by its name, so what was written only counts
        if the slot's checksums still match afterwards."""
        slot.wait()
        yield {part.name: slot.part(part.name) for part in self._trained_parts()}
        slot.check()

    def _write(self, save: Save, parts: Parts) -> str | None:
        """Returns why the save has failed; None if it has not."""
        try:
            self._prepare()
            sums = durable.save(save.path, self._owned, parts, save.ranks, lambda: self._wrote(save), self._uploads)
            save.copied.set()
            if self._frozen_names:
                self._save_frozen(save)
            if self.comm.rank == 0:
                self._seal(save, sums)
        except (OSError, RuntimeError, MantaError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            message = f"the checkpoint of step {save.step} could not be saved: {reason}; {save.if_it_fails}"
            self._report("checkpoint_failed", save.step, message, {"path": save.path})
            location = parse_location(save.path)
            # Its remains would keep a full disk full. In a store, which may be slow to answer, a later save removes
            # them.
            in_store = isinstance(location, ObjectPath)
            if self.comm.rank == 0 and not (in_store and (save.abandoned or self._has_left())):
                files_of(location).remove_folder(location)
                frozen = catalog.frozen_path(self.folder, save.step, save.generation)
                if self._frozen_names and (self._frozen is None or self._frozen.folder != frozen.name):
                    files_of(frozen).remove_folder(frozen)
            return reason
        finally:
            save.copied.set()
        # Later generations may have started over, and must not lose checkpoints because of this one.
        if self.comm.rank == 0 and self.deletes_old and not save.abandoned:
            self._prune(save)
        return None

    def _save_frozen(self, save: Save) -> None:
        """Write the parameters that are not trained, unless an earlier checkpoint of this training refers to them."""

        def is_there() -> bool:
            if self.comm.rank == 0:
                self._frozen = self._usable_frozen(parse_location(save.path))
            return self._frozen is not None

        if save.ranks.together(is_there, lambda found: [found[0]] * len(found), (bool, bool)):
            return
        path = catalog.frozen_path(self.folder, save.step, save.generation)
        state = {part.name: part.tensors for part in self.engine.optimizer.frozen_parts()}

        def parts() -> AbstractContextManager[dict[str, torch.Tensor]]:  # of the live ones, since no step changes them
            on_host = {name: [tensor.cpu() for tensor in tensors] for name, tensors in state.items()}
            return nullcontext({n: each[0] if len(each) == 1 else torch.cat(each) for n, each in on_host.items()})

        wrote, rectangles = lambda: self._wrote(save), self._owned_frozen
        sums = durable.save(str(path), rectangles, parts, save.ranks, wrote, self._uploads, number=1)
        if self.comm.rank == 0:
            manifest = self._manifest(save, sums)
            self._frozen = FrozenWeights(path.name, manifest, catalog.seal(path, manifest))

    def _usable_frozen(self, path: Location) -> FrozenWeights | None:
        """Where the frozen parameters of the checkpoint at `path` are already: all states that descend from the same
        beginning have the same. Raises UnreadableCheckpoint."""
        with suppress(DamagedCheckpoint):
            frozen = self._frozen or self._newest_frozen(path)
            if frozen is not None:
                catalog.check_frozen(path, frozen)
                return frozen
        return None

    def _newest_frozen(self, path: Location) -> FrozenWeights | None:
        """What the newest complete checkpoint of this training refers to, if that is what this job does not train."""
        listing = catalog.list_checkpoints(self.folder, self.job)
        whole = [each for _, each in listing.complete if each.generation >= self.began]
        frozen = whole[-1].frozen if whole else None
        if frozen is None:
            return None
        tensors = read_own_contents(frozen.beside(path), frozen.manifest).tensors
        dtype = str(self.engine.flat.parameters.dtype).removeprefix("torch.")
        is_same = tensors.keys() == self._frozen_names and {each.dtype for each in tensors.values()} == {dtype}
        return frozen if is_same else None

    def _manifest(self, save: Save, sums: dict[str, FileSums]) -> Manifest:
        return Manifest(
            job=self.job,
            generation=save.generation,
            step=save.step,
            files={name: each.size for name, each in sorted(sums.items())},
            spec=self.spec.model_dump(mode="json"),
            blocks={name: list(each.blocks or ()) for name, each in sorted(sums.items())},
            block_bytes=next(iter(sums.values())).block_bytes,
        )

    def _seal(self, save: Save, sums: dict[str, FileSums]) -> None:
        path, data, frozen = parse_location(save.path), {"path": save.path}, self._frozen
        message = f"saved the checkpoint of step {save.step}"
        if frozen is not None:
            catalog.refer(path, frozen, files := SummedFiles())
            sums = sums | files.sums
            data["frozen"] = str(frozen.beside(path))
            if frozen.folder == catalog.frozen_path(self.folder, save.step, save.generation).name:
                message += f", and {frozen.manifest.bytes / 1e6:,.1f} MB of frozen weights, which later ones refer to"
        manifest = replace(
            self._manifest(save, sums),
            loss_scale=save.small.get("loss_scale"),
            router_bias=save.small.get("router_bias"),
            numbers=save.numbers,
            frozen=frozen,
        )
        catalog.seal(path, manifest)
        if not save.abandoned:
            self._sealed = save.step
        self._report("checkpoint_saved", save.step, message, {**data, "bytes": manifest.bytes})

    def _prune(self, save: Save) -> None:
        """Delete checkpoints that the completed save makes superfluous, and remains of earlier saves. Raises
        nothing."""
        recovery = self.spec.recovery
        undoes = 2 * recovery.roll_back_steps if recovery.rolls_back else 0
        keep = self.spec.checkpoint.keep
        for old in pruning.prune(self.folder, keep, save.generation, undoes, self.began, save.step, self.job):
            self._report("checkpoint_deleted", save.step, f"deleted checkpoint {old.name}", {"path": str(old)})

    def _report(self, kind: str, step: int, message: str, data: dict[str, Any]) -> None:
        if self.comm.rank == 0:
            self.event(kind, step, message, data)


class NoCheckpoints:
    """The durable checkpoints of a rank that saves none: nothing is due, written or deleted, and none can be loaded."""

    copying = writing = False
    failure: str | None = None

    def due(self, step: int) -> bool:
        """False: no step is saved."""
        return False

    is_needed = due

    def restore(self, path: str) -> dict[str, Any] | None:
        """Raises ValueError."""
        raise ValueError(f"cannot resume from {path} without a location for checkpoints")

    def finish(self, *about: object) -> None:
        """Does nothing, as there is nothing to do for any request about checkpoints."""

    begin = begin_missing_save = save_now = prepare_memory = finish
    finish_copy = leave = close = undo_after = enter_generation = finish


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")


@dataclass
class Save:
    """A save of the state of committed step `step`."""

    step: int
    path: str
    generation: int
    """The generation that saves."""
    ranks: SharedWork
    """Shared work of that generation."""
    small: dict[str, list[float]]
    """Values of the small parts of the state that a step may change, by name."""
    numbers: dict[str, Any] | None
    """The manifest's numbers, for the steps up to this one."""
    if_it_fails: str
    """The consequence of a failure, in words."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once the state may change, since it has been copied."""
    abandoned: bool = False
    """Whether its ranks have left each other, and nothing waits for it any more."""


@dataclass
class SaveSearch:
    """A search for a save that earlier generations did not complete."""

    step: int
    """Committed step at which it began."""
    is_missing: bool = False
    """The result: whether the save is missing."""
