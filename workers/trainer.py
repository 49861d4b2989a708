"""The step loop of one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from manta.workers.accounting.device_table import peak_of_stages
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batches import Batches, Prefetch
from manta.workers.data.order import SkippedSamples
from manta.workers.data.prepare import Corpus
from manta.workers.engine import Engine
from manta.workers.errors import DataError, PeerLost, ReplicaDiffers, RestRequested
from manta.workers.liveness.expert_load import ExpertLoads
from manta.workers.liveness.rank_samples import RankSampler, Straggler, Stragglers, packed
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.parallel.data.replica_check import ReplicaCheck
from manta.workers.protocol.messages import Resume
from manta.workers.training.bad_numbers import BadStep
from manta.workers.training.learning_rate import learning_rate
from manta.workers.training.number_guard import error_of
from manta.workers.training.rank_state import NO_PATHS, RankState, StatePaths
from manta.workers.training.reporter import DataWatch, Reporter, announce, named_samples, sample_data
from manta.workers.training.step_row import StepRows, Validation, mean_part_seconds, memory_in_use
from manta.workers.training.tracing import Tracing


class Trainer:
    """One rank of a job: its stage of the model, its part of the optimizer, its share of every batch."""

    def __init__(self, spec: JobSpec, comm: Comm, reporter: Reporter, peak_flops: float, paths: StatePaths = NO_PATHS):
        """`peak_flops`: peak FLOP/s of this rank's device, for MFU. Raises DataError if the corpus cannot be trained
        on, or has changed since the job began, SharedMemoryError if there is no room for the snapshots."""
        self.spec, self.comm, self.reporter = spec, comm, reporter
        self.clock = comm.step.clock
        self.engine = Engine(spec, comm)
        reads, records = self.engine.model.reads_tokens, comm.rank == 0
        self.batches = Batches(
            spec,
            comm.index("data"),
            comm.device,
            reads,
            paths.corpus_record,
            records,
            paths.token_cache,
            DataWatch(comm, reporter),
            comm.index("context"),
        )
        self.prefetch = Prefetch(self.batches, spec.train.steps)
        self.state = RankState(spec, self.engine, comm, reporter, paths)
        self.guard = self.state.guard
        self.validation = Validation(self.engine, self.batches, comm)
        self.tracing = Tracing(comm, reporter, peak_flops)
        self.ends_early = False
        """Whether all ranks have saved their state after a step before the last one, because that was requested."""
        self._recording_reported = self._sharding_reported = False
        each = peak_of_stages(peak_flops, spec.layout.stage_accelerators or (), spec.train.precision)
        self._rows = StepRows(spec, self.batches.plan, each * comm.size("world"))
        self._replica_check = ReplicaCheck(self.engine.optimizer, comm)
        stages = [comm.grid.coordinates(rank).pipeline for rank in range(comm.size("world"))]
        self._sampler = RankSampler() if comm.rank == 0 else None
        self._stragglers = Stragglers(stages) if comm.rank == 0 and spec.recovery.stragglers != "ignore" else None
        self._loads = ExpertLoads(spec) if comm.rank == 0 and spec.model.moe is not None else None

    @property
    def step(self) -> int:
        """Last committed step."""
        return self.state.step

    @property
    def settled_step(self) -> int | None:
        """The committed step that the state belongs to; None if an update was aborted."""
        return self.state.settled_step

    def restore(self, resume: Resume, roll_backs: Sequence[dict[str, Any]] = ()) -> None:
        """Bring the state to committed step `resume.step`, unless it is there already. `roll_backs`: those of the job
        that are known from outside. Raises CheckpointError if the state cannot be read, DataError if ranks have
        different tokens."""
        check_same_tokens(self.batches.corpus, self.comm)
        self.state.restore(resume, roll_backs)
        self._skip_samples()

    def _skip_samples(self) -> None:
        self.batches.skipped = SkippedSamples.of(self.guard.history.skipped_samples)

    def train(self, stop_after_step: int | None = None) -> None:
        """Run all remaining steps, or those up to `stop_after_step`, or until some rank is asked to end early; also
        make saves that the last generation did not complete. Raises RestRequested between two steps if some rank was
        asked to leave the generation, CheckpointNotSaved if the last checkpoint cannot be saved."""
        try:
            self._train(stop_after_step)
        finally:
            self.tracing.abort()

    def _train(self, stop_after_step: int | None) -> None:
        self.clock.restart()
        self.state.save_missing_checkpoint()
        last = self.spec.train.steps if stop_after_step is None else min(stop_after_step, self.spec.train.steps)
        ends = False
        while self.step < last and not ends:
            statistics = self.train_step()
            ends = statistics.asked.end > 0
            if statistics.asked.rest and not ends and self.step < last:
                self.engine.optimizer.wait_for_parameters()
                self.comm.settle()
                raise RestRequested("it was asked to stop there")
        self.engine.optimizer.wait_for_parameters()
        if self.step < last:
            self.state.save_before_end()
            self.ends_early = True
        else:
            self.state.finish()
        self.comm.step.enter("done")

    def train_step(self) -> StepStatistics:
        """One step: compute, agree, update, snapshot, report. A step with bad numbers may end at an earlier step than
        it began with. Raises NonFiniteError or SpikeError if the policy is to fail."""
        self.tracing.begin_step(self.step + 1)
        statistics = self._train_step()
        self.tracing.end_step(statistics)
        return statistics

    def _train_step(self) -> StepStatistics:
        began, step = time.perf_counter(), self.step + 1
        self.comm.step.begin(step, self._measures(step))
        rate = learning_rate(self.spec.train.optimizer, step, self.spec.train.steps)
        with self.comm.step.phase("data"):
            batch = self.prefetch.training(step)
        sequences = self.batches.plan.size(step)
        self.guard.begin_step()
        statistics = self.engine.step(batch, sequences, rate, memory_in_use(self.comm.device), self._before_update)
        bad = self.guard.judge(step, statistics)
        if bad is not None and not self._apply_policy(step, bad):
            return statistics
        self.comm.progress.commit(step, self.comm.device_step_seconds)
        self._report_ranks(step, statistics)
        self._report_without_effect(step)
        more = mean_part_seconds(self.comm, self.state.snapshots.stall_seconds) if self._measures(step) else {}
        validating = 0.0
        if self.validation.due(step):
            validation_began = time.perf_counter()
            more |= self.validation.losses()
            validating = time.perf_counter() - validation_began
        self.state.commit(step, statistics)

        def row() -> dict[str, Any]:
            seconds = time.perf_counter() - began - validating
            return self._rows.row(step, statistics, rate, seconds) | self.state.snapshot_figures() | more

        self.state.keep(step, row)
        self.state.save_checkpoint(step)
        self.state.interval.note_step(step, time.perf_counter() - began, self.comm)
        return statistics

    def _measures(self, step: int) -> bool:
        every = self.spec.train.time_parts_every
        return every > 0 and step % every == 0

    def _before_update(self) -> None:
        """The state is about to change: wait until it has been copied, and verify that it is still right."""
        self.state.finish_copies()
        every = self.spec.recovery.check_replicas_every
        if every and (self.step + 1) % every == 0:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Check whether all ranks still have the same parameters, before this step changes them. If one has not, the
        step is given up: that rank leaves, and continues from an earlier state. Raises ReplicaDiffers on the ranks that
        differ, PeerLost on the others."""
        with self.comm.step.phase("replica_check"):
            ranks, certain = self._replica_check.differing(self.state.snapshot_parameters())
        if not ranks:
            return
        named = " and ".join(f"rank {rank}" for rank in ranks)
        which = f"of {named} were changed" if certain else f"of {named} differ, and which are right is not known"
        message = f"since step {self.step} parameters {which}"
        data = {"ranks": ranks, "certain": certain}
        announce(self.comm, self.reporter, "replica_differs", self.step, message, data)
        raise (ReplicaDiffers if self.comm.rank in ranks else PeerLost)(message)

    def _apply_policy(self, step: int, bad: BadStep) -> bool:
        """Apply the policy for a step with bad numbers; returns whether the step is to be committed."""
        samples = self.batches.samples(step)
        sentence = f"{bad.sentence} (samples {named_samples(samples)})"
        if bad.policy == "fail":
            raise error_of(bad)(
                f"{sentence}; nothing was updated. Lower train.optimizer.learning_rate, or set "
                f"recovery.{'nonfinite' if bad.kind == 'not_finite' else 'spike.policy'} to skip or roll_back"
            )
        if bad.kind == "spike":
            announce(self.comm, self.reporter, "spike", step, sentence, sample_data(samples))
        if bad.policy == "roll_back":
            self.state.roll_back(step, samples, bad, sentence)
            self._skip_samples()
            return False
        if bad.policy == "skip":
            # AdamW counts the step too, as it would after a restart.
            self.engine.optimizer.set_step(step)
            message = f"{sentence}; it is committed without an update"
            announce(self.comm, self.reporter, "step_skipped", step, message, sample_data(samples))
        return True

    def _report_ranks(self, step: int, statistics: StepStatistics) -> None:
        """On rank 0: report stragglers and unbalanced experts, and every few seconds the state of all ranks."""
        if self._sampler is None:
            return
        tokens, loads = statistics.expert_tokens, None
        if self._loads is not None and tokens is not None:
            loads = self._loads.by_rank(tokens)
            if (most := self._loads.add(tokens)) is not None:
                self.reporter.event("experts_unbalanced", step, most.sentence, most.to_json())
        for straggler in self._stragglers.add(statistics.own_seconds, loads) if self._stragglers is not None else ():
            self.reporter.event("straggler", step, straggler.sentence, straggler.to_json())
        own, memory = statistics.own_seconds, statistics.memory_by_rank
        sample = self._sampler.add(step, statistics.agreed_seconds, own, memory, self._named_stragglers)
        if sample is not None:
            counts = None if tokens is None else packed(count for layer in tokens for count in layer)
            self.reporter.ranks(replace(sample, expert_tokens=counts))

    def _report_without_effect(self, step: int) -> None:
        """Report, once, that `train.cuda_graphs` has no effect because recording a micro-batch failed, or that
        `parallel.zero` has little because there is nobody to share with."""
        reason, layout = self.engine.not_recorded, self.spec.layout
        if reason is not None and not self._recording_reported:
            self._recording_reported = True
            message = f"micro-batches run without CUDA graphs: recording one failed ({reason})"
            announce(self.comm, self.reporter, "cuda_graph_not_recorded", step, message, {"reason": reason})
        if layout.sharding < layout.zero and not self._sharding_reported:
            self._sharding_reported = True
            message = f"parallel.zero: {layout.zero} shards nothing: no two ranks hold the same parameters"
            announce(self.comm, self.reporter, "nothing_sharded", step, message, {"zero": layout.zero})

    def _named_stragglers(self) -> list[Straggler]:
        return self._stragglers.named if self._stragglers is not None else []

    def rest(self) -> None:
        """After PeerLost: end all concurrent work. The next step clears what the aborted one left behind."""
        self.state.rest()

    def close(self) -> None:
        """End all threads; the object cannot be used any more."""
        self.prefetch.close()
        self.state.close()


def check_same_tokens(corpus: Corpus, comm: Comm) -> None:
    """Raise DataError unless all ranks have the same tokens, or read files of the same sizes: nodes without shared
    storage may have different ones. Raises PeerLost."""
    if comm.size("world") == 1:
        return
    words = [float(int(corpus.digest[at : at + 8], 16)) for at in range(0, 64, 8)]
    sums = torch.tensor([*words, *(-word for word in words)], dtype=torch.float64, device=comm.device)
    comm.all_reduce("world", sums, largest=True)
    highest, lowest = sums[:8], -sums[8:]
    same = torch.equal(highest, lowest)
    comm.confirm()
    if not same:
        raise DataError(
            "the ranks of this job have different tokens: the files of the corpus, or of the tokenizer, are not the "
            "same on all of its nodes, or were changed since the job began"
        )
