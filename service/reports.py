"""Writes a gang's reports into the database: metrics, events, checkpoints, the state of ranks and of the job."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from service.states import JobState
from service.store import Store, checkpoints, events, generations, jobs, metrics, ranks


class ReportWriter:
    """Takes the reports of one generation of a job. Each report and what follows from it is one transaction."""

    def __init__(self, store: Store, job_id: str, generation: int, resume_step: int):
        """`resume_step`: the committed step that the generation began with."""
        self._store, self._job_id, self._generation = store, job_id, generation
        self._resume_step, self._stepped = resume_step, False

    async def take(self, report: dict[str, Any]) -> None:
        """Store one report. Reports seen before, and those of replaced generations, change nothing."""
        operations = {"metrics": self._metrics, "event": self._event, "started": self._started, "exit": self._exit}
        operation = operations.get(report["kind"])
        if operation is not None:
            await self._store.write_async(lambda session: operation(session, report))

    def _metrics(self, session: Session, report: dict[str, Any]) -> None:
        rows = report["data"]["rows"]
        stored = metrics.record(session, self._job_id, self._generation, report["rank"], report["sequence"], rows)
        newest = max(row["step"] for row in rows)
        if stored and not self._stepped and newest > self._resume_step:
            self._stepped = True
            self._first_step(session, newest)

    def _first_step(self, session: Session, step: int) -> None:
        if not generations.mark_first_step(session, self._job_id, self._generation):
            return
        if jobs.get(session, self._job_id).state in (JobState.STARTING, JobState.RECOVERING):
            jobs.transition(session, self._job_id, JobState.RUNNING)
        message = f"generation {self._generation} committed its first step, {step}"
        events.append(session, self._job_id, "first_step", message, generation=self._generation, step=step)

    def _started(self, session: Session, report: dict[str, Any]) -> None:
        ranks.set_state(session, self._job_id, self._generation, report["rank"], "running", pid=report["data"]["pid"])

    def _exit(self, session: Session, report: dict[str, Any]) -> None:
        ranks.set_state(session, self._job_id, self._generation, report["rank"], "exited")

    def _event(self, session: Session, report: dict[str, Any]) -> None:
        if not jobs.accept_report(session, self._job_id, self._generation, report["rank"], report["sequence"]):
            return
        data = dict(report["data"])
        kind, step, message = data.pop("type"), data.pop("step"), data.pop("message")
        events.append(
            session,
            self._job_id,
            kind,
            message,
            generation=self._generation,
            rank=report["rank"],
            step=step,
            data=data,
            at=report["time"],
        )
        if kind.startswith("checkpoint_"):
            self._checkpoint(session, kind, step, data)

    def _checkpoint(self, session: Session, kind: str, step: int, data: dict[str, Any]) -> None:
        if kind == "checkpoint_saving":
            checkpoints.begin(session, self._job_id, self._generation, step, data["path"])
            return
        if kind == "checkpoint_deleted":
            for old in checkpoints.complete_ones(session, self._job_id):
                if old.path == data["path"]:
                    checkpoints.mark_deleted(session, old.id)
            return
        row = checkpoints.find(session, self._job_id, self._generation, step)
        if row is not None and kind == "checkpoint_saved":
            checkpoints.complete(session, row.id, data["bytes"])
        elif row is not None:
            checkpoints.fail(session, row.id)
