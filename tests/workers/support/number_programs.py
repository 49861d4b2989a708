"""Programs of ranks whose numbers are bad at certain samples, or whose memory is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from reported import events_of, rows_of

from manta.workers.checkpoint import checkpointer
from manta.workers.comm.comm import Comm
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.parallel.data.flat import overlap
from manta.workers.parallel.data.units import ElasticUnitReduction
from manta.workers.protocol.messages import Resume
from manta.workers.snapshot.files import stored_steps
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

START = Resume()


@dataclass
class Run:
    """What one rank knows after some steps."""

    steps: list[int]
    """The last committed step after each step that was computed."""
    statistics: dict[int, tuple[float, float]]
    """(Loss, gradient norm) by committed step, as it was done last."""
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    parameters: Any
    snapshots: list[list[int]]
    """Steps in this rank's snapshot file after each step."""
    copies: list[list[int]]
    """The same of the copies in its memory."""
    numbers: dict[str, Any]


@mock.patch.object(checkpointer, "PATIENCE_SECONDS", 60.0)  # each save at its step, however slow the disk is
def train(
    comm: Comm,
    document: dict[str, Any],
    bad: dict[int, float] | None = None,
    until: int | None = None,
    resume: Resume = START,
    roll_backs: tuple[dict[str, Any], ...] = (),
    snapshots: str | None = None,
    checkpoints: str | None = None,
    once: bool = False,
) -> Run:
    """Train a job whose last rank adds to its gradient the number of `bad` where a step uses such a sample; `once`: at
    the first time only. `until`: stop when that step is committed."""
    spec, messages = parse_job_spec(document), []
    reporter = Reporter(messages.extend)
    trainer = Trainer(spec, comm, reporter, 1e12, StatePaths("test", snapshots, checkpoints))
    harm(trainer, dict(bad or {}), once)
    trainer.restore(resume, roll_backs)
    run = Run([], {}, [], [], None, [], [], {})
    while trainer.step < (spec.train.steps if until is None else until):
        before, statistics = trainer.step, trainer.train_step()
        if trainer.step == before + 1:
            run.statistics[trainer.step] = (statistics.loss, statistics.grad_norm)
        run.steps.append(trainer.step)
        if snapshots is not None:
            trainer.state.snapshots.finish()
            run.snapshots.append(stored_steps(snapshots, comm.rank))
        if trainer.guard.copies is not None:
            run.copies.append(trainer.guard.copies.steps)
    comm.barrier()
    run.parameters = trainer.engine.flat.parameters.float().clone().numpy()
    run.numbers = trainer.guard.history.to_json()
    trainer.close()
    reporter.close()
    run.rows = rows_of(messages)
    run.events = events_of(messages)
    return run


def harm(trainer: Trainer, bad: dict[int, float], once: bool = False) -> None:
    """Have the last rank add to its gradient the number of `bad` where a step uses such a sample; `once`: at the first
    time only."""
    batches, optimizer, flat = trainer.batches, trainer.engine.optimizer, trainer.engine.flat
    spec = trainer.spec
    usual_batch, usual_step = trainer.prefetch.training, optimizer.step
    now: list[float] = []

    def training(step: int) -> Any:
        used = {sample for each in batches.samples(step) for sample in each}
        now[:] = [value for sample, value in bad.items() if sample in used]
        for sample in used & set(bad) if once else ():
            del bad[sample]
        return usual_batch(step)

    def step(*arguments: Any) -> StepStatistics:
        # Of the tail, which is reduced last.
        reduction, place = optimizer.reduction, flat.slots[-1].start
        (start, end), in_last_group = optimizer.owned[-1], trainer.comm.index("tensor") == spec.layout.tensor - 1
        if now and isinstance(reduction, ElasticUnitReduction):  # which has reduced it
            if start <= place < end and in_last_group:
                reduction._tail_sums[0].total()[0][place - start] += now[0]
        elif now and trainer.comm.rank == trainer.comm.size("world") - 1:
            flat.sums.of(place, place + 1).add_(now[0])
        return usual_step(*arguments)

    trainer.prefetch.training, optimizer.step = training, step  # type: ignore[method-assign]


def flip(comm: Comm, document: dict[str, Any], culprit: int, name: str, at_step: int, snapshots: str | None) -> Any:
    """Train until `culprit` finds one bit of its parameter `name` flipped while it computes step `at_step`: (what was
    raised, its message, the events, the last committed step)."""
    spec, messages = parse_job_spec(document), []
    reporter = Reporter(messages.extend)
    trainer = Trainer(spec, comm, reporter, 1e12, StatePaths("test", snapshots))
    trainer.restore(Resume())
    usual = trainer.engine.optimizer.step

    def step(*arguments: Any) -> StepStatistics:
        if comm.rank == culprit and trainer.step == at_step - 1:
            trainer.guard.finish()
            trainer.state.snapshots.finish()
            flat = trainer.engine.flat
            slot = next(slot for slot in (*flat.slots, *flat.frozen) if slot.entry.name == name)
            kept = (overlap((slot.start, slot.end), stored) for stored in flat.values.ranges)
            start = next(start for start, end in kept if start < end)
            flat.values.of(start, start + 2).view(torch.uint8)[0] ^= 1
        return usual(*arguments)

    trainer.engine.optimizer.step = step  # type: ignore[method-assign]
    raised: tuple[str, str] | None = None
    try:
        while trainer.step < spec.train.steps:
            trainer.train_step()
    except Exception as error:  # noqa: BLE001 - the test shall see which
        raised = (type(error).__name__, str(error))
    reporter.close()
    events = events_of(messages)
    return raised, events, trainer.step, trainer.settled_step
