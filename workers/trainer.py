"""The step loop of one rank."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workers.accounting.flops import step_flops
from workers.checkpoint.checkpointer import Checkpointer
from workers.comm.comm import Comm
from workers.comm.grid import state_peers
from workers.config import JobSpec
from workers.data.batches import Batches
from workers.data.skipped_samples import PassedOver
from workers.engine import Engine
from workers.errors import CheckpointNotSaved, PeerLost, ReplicaDiffers
from workers.learning_rate import learning_rate
from workers.liveness.stragglers import Stragglers
from workers.messages import Resume
from workers.numerics.bad_numbers import Bad, Numbers, RollBack
from workers.numerics.guard import NumberGuard, error_of
from workers.parallel.data.elastic_sums import shared_leaves, sum_of_halves
from workers.parallel.data.replica_check import ReplicaCheck
from workers.parallel.data.zero import StepStatistics
from workers.reporter import Reporter
from workers.snapshot.interval import Pace
from workers.snapshot.reshard import describe, restore_from_snapshots
from workers.snapshot.snapshot_file import NOTE_BYTES, committed_steps
from workers.snapshot.snapshots import Snapshots, fingerprint, layout_tag, remove_other_layouts
from workers.step_clock import StepClock

# Rows of metrics kept in a snapshot: more steps than are ever under way to the database.
JOURNAL_ROWS = 256


@dataclass(frozen=True)
class Places:
    """Where a rank keeps its state outside of its process; None turns the kind off."""

    job: str = "local"
    """Job id, written into checkpoints."""
    snapshots: str | None = None
    """Folder in shared memory."""
    checkpoints: str | None = None
    """Folder for durable checkpoints."""


class Trainer:
    """One rank of a job: its stage of the model, its part of the optimizer, its share of every batch."""

    def __init__(self, spec: JobSpec, comm: Comm, reporter: Reporter, peak_flops: float, places: Places = Places()):
        self.spec, self.comm, self.reporter, self.peak_flops = spec, comm, reporter, peak_flops
        self.engine = Engine(spec, comm)
        self.batches = Batches(spec, comm.index("data"), comm.device, self.engine.model.reads_tokens)
        self._first_peer = state_peers(spec.layout, comm.rank)[0]
        """The first rank that has the same state as this one: perhaps this one."""
        self._places, self._pace = places, Pace(spec.checkpoint.snapshot_every_steps)
        self.guard = NumberGuard(spec.recovery, self.engine, comm)
        self.engine.optimizer.before_update = self._before_update
        self._replica_check = ReplicaCheck(self.engine.optimizer, comm)
        self.snapshots = self._open_snapshots(places)
        self.checkpoints: Checkpointer | None = None
        if places.checkpoints is not None:
            self.checkpoints = Checkpointer(places.checkpoints, places.job, spec, self.engine, comm, reporter.event)
        self.step = 0
        """Last committed step."""
        self._restored = False
        self.clock = StepClock()
        stages = [comm.grid.coordinates(rank).pipeline for rank in range(comm.size("world"))]
        self._stragglers = Stragglers(stages) if comm.rank == 0 and spec.recovery.stragglers != "ignore" else None
        self._journal: deque[bytes] = deque(maxlen=JOURNAL_ROWS)

    def _open_snapshots(self, places: Places) -> Snapshots | None:
        if places.snapshots is None:
            return None
        spec, rank = self.spec.model_dump(mode="json"), self.comm.rank
        table = describe(places.job, spec["parallel"], self.engine, self.comm)
        identity, layout = fingerprint(spec, self._first_peer), layout_tag(spec)
        return Snapshots(places.snapshots, rank, self.engine.state(), identity, layout, table)

    def restore(self, resume: Resume, roll_backs: Sequence[dict[str, Any]] = ()) -> None:
        """Bring the state to committed step `resume.step`; one that is there already stays. `roll_backs`: those of the
        job that are known outside of it. Raises CheckpointError when the state cannot be had."""
        self.comm.progress.belongs_to(self.comm.generation)
        self.comm.progress.at("restoring")
        self.comm.parts.drop()
        stays = resume.source == "snapshot" and self.settled_step == resume.step
        if not stays:
            self._restored = False
            self._journal.clear()
        if self.snapshots is not None:
            self.snapshots.finish()  # what follows changes the state
        self.guard.finish()
        self._pace.begin()
        note, numbers = b"", None if stays else Numbers()
        if resume.source == "start":
            self.engine.initialise(self.spec.train.seed)
        elif resume.source == "snapshot" and self.snapshots is not None:
            if not stays:
                note = self.snapshots.load(resume.step)
        elif resume.source == "memory":
            note = restore_from_snapshots(self.engine, self.comm, resume.paths, resume.step)
        elif resume.source == "checkpoint" and self.checkpoints is not None and resume.path is not None:
            found = self.checkpoints.restore(resume.path)
            numbers = Numbers.from_json(found) if found is not None else numbers
        else:
            raise ValueError(f"cannot resume from {resume} without a place for it")
        if resume.source != "start":
            self.engine.optimizer.publish_parameters()
        self.engine.optimizer.set_step(resume.step)
        self._commit(resume.step)
        self._agree_on_numbers(self._report_again(note) or numbers, roll_backs)
        if self.snapshots is not None and resume.source != "snapshot":
            self.snapshots.clear()
            self.snapshots.save(self.step, self._note())
        if self._places.snapshots is not None:
            self.comm.barrier()  # every rank has read what it needs of other layouts, and has a snapshot of its own
            remove_other_layouts(self._places.snapshots, layout_tag(self.spec.model_dump(mode="json")))

    def _agree_on_numbers(self, numbers: Numbers | None, roll_backs: Sequence[dict[str, Any]]) -> None:
        known = [RollBack.from_json(each) for each in roll_backs]
        for each in self.guard.restored(self.step, numbers, known):
            # Whoever told of it may have died before it was heard.
            self._tell_rolled_back(each, f"step {each.step} had bad numbers")
        self.batches.passed_over = PassedOver.of(self.guard.numbers.passed_over)

    @property
    def settled_step(self) -> int | None:
        """The committed step to which the state belongs; None when an update was broken off."""
        return self.step if self._restored and self.engine.settled else None

    def _commit(self, step: int) -> None:
        self.step, self._restored = step, True
        self.engine.settle()

    def rest(self) -> None:
        """After PeerLost: end what goes on beside the training. What the broken step left behind is cleared by the
        next one."""
        if self.snapshots is not None:
            self.snapshots.finish()  # before this rank says what it can go on from
            held = self.settled_step
            if held is not None and held not in committed_steps(self.snapshots.path):
                self.snapshots.save(held, self._note())  # for ranks of another layout
            self.snapshots.wait_for_sums()  # other nodes are given none without
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def close(self) -> None:
        """End all threads; the object is of no use any more."""
        self.rest()
        self.guard.close()
        if self.snapshots is not None:
            self.snapshots.close()
        if self.checkpoints is not None:
            self.checkpoints.close()

    def train(self) -> None:
        """Run all steps that are left, and save what the last generation did not get to save. Raises CheckpointNotSaved
        when the last checkpoint cannot be saved."""
        self.clock.restart()
        self.comm.progress.at("checkpoint")
        if self.checkpoints is not None:
            self.checkpoints.failure = None  # of a generation before this one
            if self.checkpoints.is_missing(self.step):
                self._save_checkpoint(self.step)
        while self.step < self.spec.train.steps:
            self.comm.leave_between_steps()
            self.train_step()
        if self.snapshots is not None:
            self.snapshots.finish()
        self.comm.progress.at("checkpoint")
        if self.checkpoints is not None:
            with self.clock.waiting("checkpoint_stall"):
                self.checkpoints.finish()
        self.comm.barrier()
        if self.checkpoints is not None and self.checkpoints.failure is not None:
            reason = f"the last checkpoint, of step {self.step}, could not be saved: {self.checkpoints.failure}"
            raise CheckpointNotSaved(f"{reason}; it is tried again, make it possible meanwhile")
        self.comm.progress.at("done")

    def _save_checkpoint(self, step: int) -> None:
        if self.checkpoints is not None:
            self.comm.progress.at("checkpoint")
            with self.clock.waiting("checkpoint_stall"):
                self.checkpoints.start(step, self.guard.numbers.to_json() if self.guard.active else None)

    def train_step(self) -> StepStatistics:
        """One step: compute, agree, update, keep, report. One whose numbers are bad may end at an earlier step than it
        began with. Raises NonFiniteError or SpikeError when the policy is to fail."""
        began, parts = time.perf_counter(), self.comm.parts
        step = self.step + 1
        self.comm.progress.begin_step(step, self.comm.idle_seconds)
        if self._measures(step):
            parts.begin()
        rate = learning_rate(self.spec.train.optimizer, step, self.spec.train.steps)
        with parts.part("data"), self.clock.waiting("data_wait"):
            batch = self.batches.training(step)
        sequences = self.batches.plan.size(step)
        self.guard.begin_step()
        statistics = self.engine.step(batch, sequences, rate, memory_in_use(self.comm.device))
        bad = self.guard.judge(step, statistics)
        if bad is not None and not self._goes_on(step, bad):
            return statistics
        self.comm.progress.commit(step, self.comm.idle_seconds)
        self._name_stragglers(step, statistics)
        more = self._part_means() if parts.measuring else {}
        if self._validates(step):
            more["validation_loss"] = self.validate()

        self._commit(step)
        self.guard.committed(step, statistics)

        def row() -> dict[str, Any]:
            return self._row(step, statistics, rate, time.perf_counter() - began) | more

        self._keep_and_report(step, row)
        if self.checkpoints is not None and self.checkpoints.due(step):
            self._save_checkpoint(step)
        if self.snapshots is not None:
            self._pace.note_step(step, time.perf_counter() - began, self.comm)
        return statistics

    def _name_stragglers(self, step: int, statistics: StepStatistics) -> None:
        for found in self._stragglers.add(statistics.own_seconds) if self._stragglers is not None else ():
            self.reporter.event("straggler", step, found.sentence, found.to_json())

    def _goes_on(self, step: int, bad: Bad) -> bool:
        """What the policy says about a step with bad numbers; whether it is committed."""
        samples = self.batches.samples(step)
        told = f"{bad.sentence} (samples {_named(samples)})"
        if bad.policy == "fail":
            raise error_of(bad)(
                f"{told}; nothing was updated. Lower train.optimizer.learning_rate, or set "
                f"recovery.{'nonfinite' if bad.kind == 'not_finite' else 'spike.policy'} to skip or roll_back"
            )
        if bad.kind == "spike":
            self._tell("spike", step, told, _sample_data(samples))
        if bad.policy == "roll_back":
            self._roll_back(step, samples, bad, told)
            return False
        if bad.policy == "skip":
            # AdamW counts the step too, as it does after a restart.
            self.engine.optimizer.set_step(step)
            self._tell("step_skipped", step, f"{told} and passes without an update", _sample_data(samples))
        return True

    def _roll_back(self, step: int, samples: list[range], bad: Bad, told: str) -> None:
        """Go on from an earlier step, with the step's samples passed over.

        Until the barrier every rank still has the snapshots of before, after it every rank has one of the step gone
        back to. Whatever dies in between, all ranks have a step in common, and the samples are passed over again.
        """
        self.comm.progress.at("restoring")
        done = self.guard.roll_back(step, samples, bad)
        self._commit(done.back_to)
        self.batches.passed_over = PassedOver.of(self.guard.numbers.passed_over)
        undone = [row for row in self._journal if json.loads(row)["step"] > done.back_to]
        for row in undone:
            self._journal.remove(row)
        if self.snapshots is not None:
            self.snapshots.save(self.step, self._note())
        if self.checkpoints is not None:
            self.checkpoints.finish()
        self.comm.barrier()
        if self.snapshots is not None:
            self.snapshots.forget_after(self.step)
        if self.checkpoints is not None:
            self.checkpoints.undo_after(self.step)
        self._tell_rolled_back(done, told)

    def _tell_rolled_back(self, done: RollBack, why: str) -> None:
        message = f"{why}: back to step {done.back_to}, and samples {_named(done.samples)} are passed over"
        self._tell("rolled_back", done.step, message, {**_sample_data(done.samples), **done.to_json()})

    def _tell(self, kind: str, step: int, message: str, data: dict[str, Any]) -> None:
        if self.comm.rank == 0:
            print(message, flush=True)
            self.reporter.event(kind, step, message, data)

    def _keep_and_report(self, step: int, make_row: Callable[[], dict[str, Any]]) -> None:
        """Snapshot the step and report its row. The snapshot holds the rows of the last steps too: a process that is
        killed takes the rows with it that it had not shipped yet. So do those that may stand in for it."""
        report: Callable[[], None] | None = None
        if self._first_peer == 0:
            row = make_row() | self._when() | ({"rank": self.comm.rank} if self.comm.rank else {})
            self._journal.append(json.dumps(row).encode())
            if self.comm.rank == 0:
                report = partial(self.reporter.metrics, row)
        if self.snapshots is not None and self._pace.due(step):
            self.comm.progress.at("snapshot")
            with self.clock.waiting("snapshot_stall"):
                self.snapshots.start(step, self._note(), report)
        elif report is not None:
            report()

    def _before_update(self) -> None:
        """The state is about to change: make sure of what is being copied of it."""
        self.guard.finish()
        if self.snapshots is not None:
            self.comm.progress.at("snapshot")
            with self.clock.waiting("snapshot_stall"):
                if self.snapshots.finish():
                    self._pace.note_stall(self.snapshots.stall_seconds)
        every = self.spec.recovery.check_replicas_every
        if every and (self.step + 1) % every == 0:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Find out whether all ranks still compute with the same parameters, before this step changes them. Where one
        does not, the step is given up: it leaves, and goes on with a state from before. Raises ReplicaDiffers on the
        ranks that differ, PeerLost on the others."""
        self.comm.progress.at("agreement")
        kept = self.snapshots.kept(self.step) if self.snapshots is not None else None
        weights = None if kept is None else kept[: len(self.engine.optimizer.parameters)]
        ranks, certain = self._replica_check.differing(weights)
        if not ranks:
            return
        named = " and ".join(f"rank {rank}" for rank in ranks)
        which = f"of {named} were changed" if certain else f"of {named} differ, and nobody can tell which are right"
        message = f"since step {self.step} parameters {which}"
        self._tell("replica_differs", self.step, message, {"ranks": ranks, "certain": certain})
        raise (ReplicaDiffers if self.comm.rank in ranks else PeerLost)(message)

    def _when(self) -> dict[str, Any]:
        """When and by which generation the step was committed, and where the seconds since the one before went."""
        return {"time": time.time(), "generation": self.comm.generation, "seconds": self.clock.lap()}

    def _note(self) -> bytes:
        """What goes with a snapshot: what later decisions depend on, and the rows of the last steps, as many as fit."""
        lines = deque(self._journal)
        if self.guard.active:
            lines.append(json.dumps({"numbers": self.guard.numbers.to_json()}).encode())
        while sum(len(line) + 1 for line in lines) > NOTE_BYTES:
            lines.popleft()
        return b"\n".join(lines)

    def _report_again(self, note: bytes) -> Numbers | None:
        """Report, on rank 0, the rows that came with a snapshot; the receiver knows most of them already. Returns the
        numbers that came with it."""
        numbers: Numbers | None = None
        for line in note.splitlines():
            row = json.loads(line)
            if "numbers" in row:
                numbers = Numbers.from_json(row["numbers"])
            elif self._first_peer == 0:
                self._journal.append(line)
                if self.comm.rank == 0:
                    self.reporter.metrics(row)
        return numbers

    def validate(self) -> float:
        """Mean loss over the validation batches, in nats a token; the same on every rank."""
        self.comm.progress.at("validation")
        count, (places, mine) = self.batches.validation_batches(), self._loss_places()
        sums = torch.zeros(1 + count * places, dtype=torch.float64, device=self.comm.device)
        losses = sums[1:].view(count, places)
        for index in range(count):
            losses_m, tokens = self.engine.pipeline.evaluate(self.batches.validation(index))
            losses[index, mine.start : mine.stop] = losses_m if len(mine) == len(losses_m) else losses_m.sum()
            sums[0] += tokens
        self.comm.all_reduce("world", sums)
        return float(sum_of_halves(sums[1:]) / sums[0])

    def _loss_places(self) -> tuple[int, range]:
        """How many numbers make up the loss of a validation batch, and which of them this replica knows: one for every
        micro-batch where the number of replicas shall not matter, else their sum."""
        train = self.spec.train
        if train.deterministic == "layout":
            return 1, range(1)
        return shared_leaves(self.spec, train.global_batch_size, self.comm.index("data"))

    def _validates(self, step: int) -> bool:
        every = self.spec.train.validate_every
        return every > 0 and step % every == 0

    def _measures(self, step: int) -> bool:
        every = self.spec.train.time_parts_every
        return every > 0 and step % every == 0

    def _part_means(self) -> dict[str, float]:
        """Where the time of the step that is being measured went: seconds by part, as the mean over ranks. Validation
        comes after it, and `snapshot` is the time of the snapshot before this one."""
        seconds: dict[str, float] = dict(self.comm.parts.end().items())
        seconds["snapshot"] = self.snapshots.stall_seconds if self.snapshots is not None else 0.0
        shared = torch.tensor(list(seconds.values()), dtype=torch.float64, device=self.comm.device)
        self.comm.all_reduce("world", shared)
        means = (shared / self.comm.size("world")).tolist()
        return {f"{part}_seconds": mean for part, mean in zip(seconds, means, strict=True)}

    def _row(self, step: int, statistics: StepStatistics, rate: float, seconds: float) -> dict[str, Any]:
        """The step's numbers by the names of the REST contract. MFU: arXiv:2204.02311, appendix B."""
        plan, length = self.batches.plan, self.spec.model.sequence_length
        flops = step_flops(self.spec, plan.size(step))
        available = seconds * self.peak_flops * self.comm.size("world")
        kept: dict[str, float] = {}
        if self.snapshots is not None:
            kept = {"snapshot_every_steps": self._pace.every, "snapshot_stall_seconds": self.snapshots.stall_seconds}
        return {
            "step": step,
            "loss": statistics.loss,
            "grad_norm": statistics.grad_norm,
            "learning_rate": rate,
            "tokens": plan.first_sample(step + 1) * length,
            "tokens_per_second": plan.size(step) * length / seconds,
            "step_seconds": seconds,
            "mfu_full": flops.model_full / available,
            "mfu_causal": flops.model_causal / available,
            "hfu_full": flops.hardware_full / available,
            "hfu_paper": flops.hardware_paper / available,
            "memory_bytes": statistics.memory_bytes,
            **kept,
        }


def _named(samples: Sequence[range]) -> str:
    return " and ".join(f"{each.start} to {each.stop - 1}" for each in samples)


def _sample_data(samples: Sequence[range]) -> dict[str, Any]:
    """For events: the samples of a step, as [first, one past the last] of each range of them."""
    return {
        "first_sample": samples[0].start,
        "last_sample": samples[-1].stop - 1,
        "samples": [[each.start, each.stop] for each in samples],
    }


def memory_in_use(device: torch.device) -> int:
    """Bytes of device memory at its peak on a GPU; of resident memory now on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
