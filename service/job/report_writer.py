"""Writes the reports of a job's ranks into the database: metrics, events, checkpoints, states of ranks and job."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy.orm import Session

from manta.service.job.received_lines import ReceivedLines
from manta.service.leases.decisions import LeaseLost
from manta.service.states import JobState
from manta.service.store import (
    Store,
    checkpoints,
    events,
    generations,
    jobs,
    metrics,
    plans,
    ranks,
    recoveries,
    step_traces,
)
from manta.service.store.database import until_done
from manta.service.store.generations import TrainedStep
from manta.service.store.tables import Recovery
from manta.workers.checkpoint.catalog import generation_of
from manta.workers.protocol.json_codec import JsonObject
from manta.workers.protocol.reports import (
    Event,
    Exited,
    Finished,
    Metrics,
    Printed,
    Profiled,
    Report,
    Started,
    TraceBegan,
    Traced,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
FirstStep = Callable[[str, int], None]
"""Called with a job's id and one of its generations, whose first step is in the database; at least once by each control
plane that handles the generation. Returns at once."""

# The rank that ships metrics; the ledger follows its time.
REPORTING_RANK = 0


class ReportWriter:
    """Stores the reports of one generation of a job. Each report and its consequences are one transaction."""

    def __init__(
        self,
        store: Store,
        job_id: str,
        generation: int,
        resume_step: int,
        lines: ReceivedLines,
        first_step: FirstStep | None = None,
    ):
        """`resume_step`: the committed step that the generation began with; `lines`: takes the output of ranks;
        `first_step`: see `FirstStep`."""
        self._say_first_step = first_step
        self._lines = lines
        self._store, self._job_id, self._generation = store, job_id, generation
        self._resume_step, self._stepped, self._settled = resume_step, False, False

    async def take(self, report: Report) -> None:
        """Store one report. Repeated reports, and those of replaced generations, change nothing. If the database does
        not answer this is repeated, and the report stays unacknowledged. A report that can never be stored is recorded
        as such and skipped: no report ends a job."""
        try:
            await self._store_report(report)
        except LeaseLost:
            raise  # its owner gets the report now
        except Exception as error:
            log.exception("report %d of rank %d of %s cannot be stored", report.sequence, report.rank, self._job_id)
            await self._write_once(self._left_out, report, error)

    async def _store_report(self, report: Report) -> None:
        match report.payload:
            case Metrics(rows) as payload:
                await self._write(self._metrics, report, payload)
                self._record_stepped(rows)
            case Event() as event:
                await self._write_once(self._event, report, event)
            case Printed() as printed:
                await self._lines.take(report, printed)
            case Started() as started:
                await self._write(self._started, report, started)
            case TraceBegan() as began:
                await self._write_once(self._trace_began, report, began)
            case Traced() as traced:
                await self._write_once(self._traced, report, traced)
            case Profiled() as profiled:
                await self._write_once(self._profiled, report, profiled)
            case Finished() as finished:
                if finished.seconds is not None and report.rank == REPORTING_RANK:
                    await self._write_once(self._finished, report, finished.seconds)
            case Exited():
                await self._write(self._exit, report, None)

    def _record_stepped(self, rows: Sequence[JsonObject]) -> None:
        if self._stepped or all(row["step"] <= self._resume_step for row in rows):
            return
        self._stepped = True
        if self._say_first_step is not None:
            self._say_first_step(self._job_id, self._generation)

    async def _write(self, operation: Callable[[Session, Report, T], None], report: Report, content: T) -> None:
        await until_done(lambda: self._store.write_async(lambda session: operation(session, report, content)))

    async def _write_once(self, operation: Callable[[Session, Report, T], None], report: Report, content: T) -> None:
        """Store a report by `operation`, unless it was already stored or belongs to an earlier generation."""

        def once(session: Session, report: Report, content: T) -> None:
            if jobs.accept_report(session, self._job_id, self._generation, report.rank, report.sequence):
                operation(session, report, content)

        await self._write(once, report, content)

    def _left_out(self, session: Session, report: Report, error: Exception) -> None:
        kind = type(report.payload).__name__.lower()
        message = f"a report of rank {report.rank} ({kind}) could not be stored and is left out: {_in_a_line(error)}"
        about = {"generation": self._generation, "rank": report.rank}
        events.append(session, self._job_id, "report_left_out", message, data={"kind": kind}, **about)

    def _metrics(self, session: Session, report: Report, payload: Metrics) -> None:
        rows = payload.rows
        committed = jobs.get(session, self._job_id).step
        stored = metrics.record(session, self._job_id, self._generation, report.rank, report.sequence, rows)
        if stored and payload.ranks is not None:
            ranks.store_numbers(session, self._job_id, self._generation, payload.ranks, report.time)
        own = [row for row in rows if row["step"] > self._resume_step]
        if stored and own and not self._stepped:
            self._first_step(session, own[0], committed)
        if stored and own and not self._settled:
            self._settled = plans.settle(session, self._job_id, self._generation, int(own[-1]["step"]))

    def _first_step(self, session: Session, row: JsonObject, committed: int) -> None:
        """`row` is of the generation's first step; `committed`: the job's last step before it."""
        step, at = row["step"], float(row.get("time") or time.time())
        if not generations.mark_first_step(session, self._job_id, self._generation, at):
            return
        if jobs.get(session, self._job_id).state in (JobState.STARTING, JobState.RECOVERING, JobState.RESIZING):
            jobs.transition(session, self._job_id, JobState.RUNNING)
        message = f"generation {self._generation} committed its first step, {step}"
        events.append(session, self._job_id, "first_step", message, generation=self._generation, step=step)
        redone = max(0, committed - self._resume_step)
        over = recoveries.end(session, self._job_id, self._generation, at, redone)
        if over is not None:
            self._append_recovered(session, over, step)

    def _append_recovered(self, session: Session, over: Recovery, step: int) -> None:
        timeline = recoveries.timeline(over)
        phases = timeline.phases()
        words = {"re_form": "re-form", "redo": "next step"}
        durations = ", ".join(f"{words.get(phase, phase)} {seconds or 0.0:.2f}" for phase, seconds in phases.items())
        message = (
            f"recovered in {timeline.total_seconds or 0.0:.2f} s ({durations}), "
            f"{over.steps_redone} committed steps are repeated"
        )
        data = {
            "seconds": phases,
            "total_seconds": timeline.total_seconds,
            "steps_redone": over.steps_redone,
            "source": over.source,
            "resume_step": over.resume_step,
            "forked": over.forked,
            "kept": over.kept,
        }
        about = {"generation": self._generation, "rank": over.rank, "step": step}
        events.append(session, self._job_id, "recovered", message, data=data, **about)

    def _started(self, session: Session, report: Report, started: Started) -> None:
        """`report` comes when the rank has its state."""
        ranks.set_state(session, self._job_id, self._generation, report.rank, "running", pid=started.pid)
        times = {"connected_at": started.connected_at, "restored_at": report.time}
        recoveries.record_latest(session, self._job_id, self._generation, **times)

    def _finished(self, session: Session, report: Report, seconds: dict[str, float]) -> None:
        """The last step was committed before; later work, such as the last checkpoint, is reported here."""
        step = TrainedStep.of(seconds, report.time, counts=False)
        generations.add_training(session, self._job_id, self._generation, step)

    def _trace_began(self, session: Session, report: Report, began: TraceBegan) -> None:
        step_traces.record_beginning(session, self._job_id, began.number, self._generation, began.first_step)

    def _traced(self, session: Session, report: Report, traced: Traced) -> None:
        about = (self._job_id, traced.number, self._generation, traced.first_step, report.rank)
        step_traces.record_recorded(session, *about, traced.recording)

    def _profiled(self, session: Session, report: Report, profiled: Profiled) -> None:
        about = (self._job_id, profiled.number, self._generation, profiled.first_step, report.rank)
        step_traces.record_profiled(session, *about, base64.b85decode(profiled.content))

    def _exit(self, session: Session, report: Report, _: None) -> None:
        ranks.set_state(session, self._job_id, self._generation, report.rank, ranks.EXITED)

    def _event(self, session: Session, report: Report, event: Event) -> None:
        about = {"generation": self._generation, "rank": report.rank, "step": event.step}
        events.append(session, self._job_id, event.type, event.message, data=event.data, at=report.time, **about)
        if event.type.startswith("checkpoint_") and event.step is not None:
            self._checkpoint(session, event.type, event.step, event.data)

    def _checkpoint(self, session: Session, kind: str, step: int, data: JsonObject) -> None:
        if kind == "checkpoint_saving":
            checkpoints.begin(session, self._job_id, self._generation, step, data["path"])
            return
        if kind == "checkpoint_deleted":
            for old in checkpoints.complete_ones(session, self._job_id):
                if old.path == data["path"]:
                    checkpoints.mark_deleted(session, old.id)
            return
        if kind in ("checkpoint_saved", "checkpoint_failed"):
            # A slow store may have delayed its report until after the next generation began.
            made_by = generation_of(data["path"]) or self._generation
            row = checkpoints.find(session, self._job_id, made_by, step)
            if row is not None and kind == "checkpoint_saved":
                checkpoints.complete(session, row.id, data["bytes"])
            elif row is not None:
                checkpoints.fail(session, row.id)


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
