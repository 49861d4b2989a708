"""The state of one rank: which committed step it belongs to, and the copies of it from which the job can continue.

The state itself is in the engine. The copies are snapshots in the node's shared memory, durable checkpoints, and those
in host memory that a rollback needs (`number_guard.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manta.workers.checkpoint.checkpointer import Checkpointer, NoCheckpoints
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.errors import CheckpointNotSaved
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.parallel.data.state import FROZEN, MODEL, same_state
from manta.workers.parallel.tensor.shards import NamedShard, fill_initial
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.files import fingerprint, layout_tag, remove_other_layouts
from manta.workers.snapshot.interval import SnapshotInterval
from manta.workers.snapshot.node_memory import ANY_MEMORY, SnapshotMemory
from manta.workers.snapshot.note import RowJournal, read_note
from manta.workers.snapshot.reshard import describe, restore_from_snapshots
from manta.workers.snapshot.snapshots import NoSnapshots, Snapshots
from manta.workers.storage.locations import Location
from manta.workers.training.bad_numbers import BadStep, NumericsHistory, RollBack
from manta.workers.training.number_guard import NumberGuard
from manta.workers.training.reporter import Reporter, announce, named_samples, sample_data
from manta.workers.weights.initial_record import FILE_NAME as WEIGHTS_RECORD
from manta.workers.weights.initial_record import check_unchanged


@dataclass(frozen=True)
class StatePaths:
    """Where a rank keeps its state outside of its process; None turns the kind off."""

    job: str = "local"
    """Job id, written into checkpoints."""
    snapshots: str | None = None
    """Folder of the snapshots, in shared memory."""
    checkpoints: str | None = None
    """Folder for durable checkpoints."""
    corpus_record: Location | None = None
    """File that describes the corpus as it was when the job began."""
    token_cache: Path | None = None
    """Folder for tokens; None if the corpus needs none."""
    deletes_old_checkpoints: bool = True
    """Whether durable checkpoints beyond `checkpoint.keep` are deleted here; False: by someone else."""
    memory: SnapshotMemory = ANY_MEMORY
    """Which memory the snapshots use."""


NO_PATHS = StatePaths()


class RankState:
    """Restores, keeps and rolls back the state of one rank. All ranks call the same methods at the same steps, on their
    training threads."""

    def __init__(self, spec: JobSpec, engine: Engine, comm: Comm, reporter: Reporter, paths: StatePaths):
        """Raises SharedMemoryError if there is no room for the snapshots."""
        self.spec, self.engine, self.comm, self.reporter = spec, engine, comm, reporter
        self._paths = paths
        self.guard = NumberGuard(spec.recovery, engine, comm)
        self.interval = SnapshotInterval(0 if paths.snapshots is None else spec.checkpoint.snapshot_every_steps)
        self.snapshots = open_snapshots(spec, engine, comm, paths)
        self._journal = RowJournal()
        # Not a method of this object: a reference back to it would delay freeing its memory.
        self._note = partial(_note_of, self._journal, self.guard)
        self.checkpoints = self._checkpointer()
        self.step = 0
        """Last committed step."""
        self._restored = False
        # Rank 0 may be restored from a rank with the same state, so those keep its rows as well.
        self._retains_rows = same_state(engine.parts())[0] == 0

    def _checkpointer(self) -> Checkpointer | NoCheckpoints:
        paths = self._paths
        if paths.checkpoints is None:
            return NoCheckpoints()
        checkpoints = Checkpointer(
            folder=paths.checkpoints,
            job=paths.job,
            spec=self.spec,
            engine=self.engine,
            comm=self.comm,
            event=self.reporter.event,
            snapshots=self.snapshots,
            note=self._note,
        )
        checkpoints.deletes_old = paths.deletes_old_checkpoints
        return checkpoints

    @property
    def settled_step(self) -> int | None:
        """The committed step that the state belongs to; None if an update was aborted."""
        return self.step if self._restored and self.engine.settled else None

    def restore(self, resume: Resume, roll_backs: Sequence[dict[str, Any]] = ()) -> None:
        """Bring the state to committed step `resume.step`, unless it is there already. `roll_backs`: those of the job
        that are known from outside. Raises CheckpointError if the state cannot be read."""
        self.comm.progress.belongs_to(self.comm.generation)
        self.comm.step.enter("restoring")
        self.comm.step.parts.drop()
        self.engine.optimizer.forget_arriving()
        is_current = resume.source == "snapshot" and self.settled_step == resume.step
        if not is_current:
            self._restored = False
            self._journal.clear()
        self.snapshots.finish()  # what follows changes the state
        self.checkpoints.finish_copy()
        self.checkpoints.finish()
        began = self.comm.generation if resume.source == "start" else resume.began
        self.checkpoints.enter_generation(began, resume.step)
        self.snapshots.unprotect()
        self.guard.finish()
        self.interval.restart()
        note, history = (b"", None) if is_current else self._load(resume)
        if resume.source != "start":
            self.engine.optimizer.publish_parameters()
            self.engine.optimizer.publish_frozen()
        self.engine.optimizer.set_step(resume.step)
        self._settle(resume.step)
        rows, noted = read_note(note)
        self._resend_rows(rows)
        self._agree_on_history(noted or history, roll_backs)
        if isinstance(self.snapshots, Snapshots):
            if resume.source != "snapshot":
                self.snapshots.clear()
                self.snapshots.save(self.step, self._note())
            # After its sum over all ranks, each has its own snapshot, and has read what it needs of other layouts'.
            self._report_memory_of(self.snapshots)
            if remove_other_layouts(self.snapshots.path.parent, layout_tag(self.spec.layout)):
                self._paths.memory.free_unlinked()

    def _report_memory_of(self, snapshots: Snapshots) -> None:
        """Report if the snapshots of some ranks did not fit into shared memory, or are in memory that a GPU's driver
        does not pin. All ranks call it together."""
        outside, refused = snapshots.bytes_outside, snapshots.pin_error != 0
        counts = torch.tensor([outside, outside > 0, refused], dtype=torch.float64, device=self.comm.device)
        self.comm.all_reduce("world", counts)
        total, ranks, unpinned = (round(count) for count in counts.tolist())
        self.comm.confirm()
        everybody = self.comm.size("world")
        if ranks and self.spec.checkpoint.snapshots == "auto":
            message = (
                f"shared memory has no room for the snapshots of {ranks} of {everybody} ranks: their {total} bytes are "
                "in the memory of the nodes' daemons, and are lost with those"
            )
            data = {"ranks": ranks, "bytes": total}
            announce(self.comm, self.reporter, "snapshots_in_node_memory", self.step, message, data)
        if unpinned:
            message = (
                f"the GPU's driver does not pin the memory of the snapshots of {unpinned} of {everybody} ranks: each "
                "takes much longer and stalls the GPU. Allow them more locked memory (ulimit -l)"
            )
            data = {"ranks": unpinned}
            announce(self.comm, self.reporter, "snapshots_not_pinned", self.step, message, data)

    def _load(self, resume: Resume) -> tuple[bytes, NumericsHistory]:
        """Load the state that `resume` names. Returns the snapshot's note, empty if there is none, and the history that
        applies if the note has none. Raises CheckpointError, WeightsError."""
        if resume.source == "start":
            self._begin()
        elif resume.source == "snapshot":
            return self.snapshots.load(resume.step), NumericsHistory()
        elif resume.source == "memory":
            return restore_from_snapshots(self.engine, self.comm, resume.paths, resume.step), NumericsHistory()
        elif resume.source == "checkpoint" and resume.path is not None:
            history = self.checkpoints.restore(resume.path)
            return b"", NumericsHistory() if history is None else NumericsHistory.from_json(history)
        else:
            raise ValueError(f"cannot resume from {resume} without a location for it")
        return b"", NumericsHistory()

    def _begin(self) -> None:
        """The state before the first step. Raises WeightsError."""
        spec, lora, record = self.spec, self.spec.train.lora, self._paths.corpus_record
        if self.comm.rank == 0 and record is not None:
            check_unchanged(spec, record.parent / WEIGHTS_RECORD)
        fill: Callable[[NamedShard, torch.Tensor], None] = partial(fill_initial, seed=spec.train.seed)
        fill_router_bias: Callable[[torch.Tensor], object] = torch.Tensor.zero_
        # Imported here, since only these jobs need safetensors, which bare GPU images lack.
        if spec.model.from_ is not None:
            from manta.workers.weights.reading import Weights

            weights = Weights(spec, self.comm.progress.moved)
            fill, fill_router_bias = weights.fill, weights.fill_router_bias
            if self.comm.rank == 0 and weights.notice:
                print(weights.notice, flush=True)
        if lora is not None and lora.from_ is not None:
            from manta.workers.weights.reading import with_adapter

            fill = with_adapter(spec, lora, fill)
        self.engine.begin_with(fill, fill_router_bias)

    def _resend_rows(self, rows: list[dict[str, Any]]) -> None:
        """Report, on rank 0, the rows that came with a snapshot; the receiver knows most of them already."""
        for row in rows if self._retains_rows else ():
            self._journal.add(row)
            if self.comm.rank == 0:
                self.reporter.metrics(row)

    def _agree_on_history(self, history: NumericsHistory | None, roll_backs: Sequence[dict[str, Any]]) -> None:
        known = [RollBack.from_json(roll_back) for roll_back in roll_backs]
        for each in self.guard.restored(self.step, history, known):
            # The rank that announced it may have died before the event arrived.
            self._announce(each, f"step {each.step} had bad numbers")

    def _settle(self, step: int) -> None:
        self.step, self._restored = step, True
        self.engine.settle()

    def commit(self, step: int, statistics: StepStatistics) -> None:
        """The state is that of `step`, which is complete on all ranks."""
        self._settle(step)
        if not statistics.asked.saving:
            self.snapshots.unprotect()
        self.guard.committed(step, statistics)

    def keep(self, step: int, make_row: Callable[[], dict[str, Any]]) -> None:
        """Begin a snapshot of committed step `step` if one is due, and report the step's row once it is complete. The
        snapshot also holds the rows of the last steps, since a killed process loses those that it has not shipped; so
        do the snapshots of ranks with the same state as rank 0."""
        report: Callable[[], None] | None = None
        if self._retains_rows:
            row = make_row() | self._when() | ({"rank": self.comm.rank} if self.comm.rank else {})
            self._journal.add(row)
            if self.comm.rank == 0:
                report = partial(self.reporter.metrics, row)
        if self.interval.due(step):
            with self.comm.step.phase("snapshot"):
                self.snapshots.start(step, self._note(), report)
        elif report is not None:
            report()

    def _when(self) -> dict[str, Any]:
        """When and by which generation the step was committed, and what the time since the previous one was spent
        on."""
        return {"time": time.time(), "generation": self.comm.generation, "seconds": self.comm.step.clock.lap()}

    def finish_copies(self) -> None:
        """The state is about to change: wait until pending copies of it are complete."""
        self.guard.finish()
        if self.interval.every:  # otherwise the step has no such phase
            with self.comm.step.phase("snapshot"):
                if self.snapshots.finish():
                    self.interval.note_stall(self.snapshots.stall_seconds)
        if self.checkpoints.copying:
            with self.comm.step.phase("checkpoint"):
                self.checkpoints.finish_copy()
        self.comm.requests.saving = self.checkpoints.writing

    def snapshot_parameters(self) -> list[torch.Tensor] | None:
        """This rank's weights of the last committed step, read from its snapshot, frozen ones last; None if it has no
        snapshot of that step."""
        copied = self.snapshots.copied_parts(self.step)
        return None if copied is None else [*copied[MODEL], *copied.get(FROZEN, ())]

    def snapshot_figures(self) -> dict[str, float]:
        """For the row of metrics: the current interval between snapshots, in steps, and the seconds by which the last
        one delayed the training thread. A snapshot that is held while it is written as a checkpoint may be the only one
        that all ranks have, so its age counts too."""
        if not self.interval.every:
            return {}
        protected_step = self.snapshots.protected_step
        every = self.interval.every if protected_step is None else max(self.interval.every, self.step - protected_step)
        return {"snapshot_every_steps": every, "snapshot_stall_seconds": self.snapshots.stall_seconds}

    def roll_back(self, step: int, samples: list[range], bad: BadStep, sentence: str) -> None:
        """Continue from a step before `step`, which is bad and would have used `samples`.

        Until the barrier every rank still has its earlier snapshots; after it every rank has one of the restored step.
        So all ranks always have a step in common, whichever of them dies, and the samples are skipped again. Raises
        PeerLost; NonFiniteError or SpikeError if the job has reached its limit of rollbacks.
        """
        self.comm.step.enter("restoring")
        self.checkpoints.finish_copy()
        done = self.guard.roll_back(step, samples, bad)
        self._settle(done.back_to)
        self._journal.forget_after(done.back_to)
        self.snapshots.save(self.step, self._note())
        self.checkpoints.finish()
        self.comm.barrier()
        self.snapshots.unprotect()
        self.snapshots.forget_after(self.step)
        self.checkpoints.undo_after(self.step)
        self._announce(done, sentence)

    def _announce(self, done: RollBack, why: str) -> None:
        samples, data = named_samples(done.samples), sample_data(done.samples) | done.to_json()
        message = f"{why}: rolled back to step {done.back_to}; samples {samples} are skipped"
        announce(self.comm, self.reporter, "rolled_back", done.step, message, data)

    def save_checkpoint(self, step: int) -> None:
        """Begin a durable checkpoint of committed step `step` if one is due. Raises PeerLost."""
        if self.checkpoints.is_needed(step):
            with self.comm.step.phase("checkpoint"):
                self.checkpoints.begin(step, self._numbers())

    def _numbers(self) -> dict[str, Any] | None:
        return self.guard.history.to_json() if self.guard.active else None

    def save_missing_checkpoint(self) -> None:
        """Begin the checkpoint that earlier generations should have completed and did not. Raises PeerLost."""
        with self.comm.step.phase("checkpoint"):
            self.checkpoints.failure = None  # of an earlier generation
            self.checkpoints.begin_missing_save(self.step, self._numbers())
            self.checkpoints.prepare_memory()

    def finish(self) -> None:
        """After the job's last step: return once all ranks have saved everything. Raises CheckpointNotSaved if the last
        checkpoint cannot be saved."""
        self.snapshots.finish()
        with self.comm.step.phase("checkpoint"):
            self.checkpoints.finish()
        self.comm.barrier()
        failure = self.checkpoints.failure
        if failure is not None:
            raise CheckpointNotSaved(f"the last checkpoint, of step {self.step}, could not be saved: {failure}")

    def save_before_end(self) -> None:
        """All ranks end after this step, and it is unknown when and where the job continues: return once the state is
        in memory and on disk. A failure to write it to disk is an event. Raises PeerLost."""
        with self.comm.step.phase("checkpoint"):
            self._keep_in_memory()
            self.checkpoints.save_now(self.step, self._numbers())
            self.comm.barrier()

    def rest(self) -> None:
        """After PeerLost: end what runs alongside the training."""
        self._keep_in_memory()
        self.checkpoints.leave()

    def _keep_in_memory(self) -> None:
        """Make sure that this rank's snapshot has the newest state, before this rank reports which step it can resume
        from, since other ranks, of any layout, may read it."""
        self.snapshots.make_readable(self.settled_step, self._note)

    def close(self) -> None:
        """End all threads; the object cannot be used any more."""
        self.rest()
        self.guard.close()
        self.snapshots.close()
        self.checkpoints.close()


def _note_of(journal: RowJournal, guard: NumberGuard) -> bytes:
    return journal.note(guard.history if guard.active else None)


def open_snapshots(spec: JobSpec, engine: Engine, comm: Comm, paths: StatePaths) -> Snapshots | NoSnapshots:
    """The snapshots of a rank; none are made if `paths` has no folder for them. Raises SharedMemoryError if there is no
    room for them."""
    if paths.snapshots is None:
        return NoSnapshots()
    parts = engine.parts()
    return Snapshots(
        folder=paths.snapshots,
        rank=comm.rank,
        parts=parts,
        identity=fingerprint(spec, same_state(parts)[0]),
        layout=layout_tag(spec.layout),
        table=describe(paths.job, spec.layout.model_dump(mode="json"), engine, comm),
        memory=paths.memory,
    )
