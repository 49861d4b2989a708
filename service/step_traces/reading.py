"""Traces and budgets of a job as they are returned: read from the database, analysed, and compared with what the
planner expects of the step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy.orm import Session

from manta.service.cluster.sizes import in_use
from manta.service.errors import ErrorKind, ServiceError
from manta.service.planner.budget import step_shares
from manta.service.planner.explain import MAX_PASSES
from manta.service.planner.hardware import Cluster, UnknownMachine
from manta.service.planner.pipeline import Bar
from manta.service.planner.search import plan_of
from manta.service.planner.step_time import StepModel, StepTime, step_model
from manta.service.step_traces import budget
from manta.service.step_traces.budget import Part, of_plan
from manta.service.store import StepTrace as Row
from manta.service.store import Store, generations, jobs, metrics, step_traces
from manta.service.store.errors import TraceNotFound
from manta.service.stored_specs import SpecNotUnderstood, stored_spec
from manta.workers.comm.grid import Coordinates, RankGrid
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.protocol.json_codec import MalformedMessage
from manta.workers.schedules import SCHEDULES
from manta.workers.step_traces.analysis import analysis_document, rank_documents, slice_document
from manta.workers.step_traces.assembly import StepTrace, assembled
from manta.workers.step_traces.perfetto import perfetto
from manta.workers.timing.recording import Slice, SliceKind

MAX_CACHED = 128
"""Number of traces whose analysis is cached."""
MEASURED_STEPS = 10
"""A budget by phases is the mean of this many of the newest steps."""
PlannerCluster = Callable[[JobSpec], Cluster | None]
"""The cluster that the planner assumes for a job; None if it knows none."""


class NothingMeasured(ServiceError):
    """Nothing is known yet about how a job's steps spend their time."""

    kind = ErrorKind("nothing_measured", 409, "nothing has been measured yet of where the job's steps go")

    def __init__(self, job_id: str, step: int, of_phases: bool):
        """`step`: the last step that it has committed; `of_phases`: whether other sources than a trace would have been
        enough."""
        why = (
            "has committed no step of its own yet" if of_phases else "has no whole trace in the layout that it runs in"
        )
        super().__init__(f"job {job_id}, at step {step}, {why}; `manta trace {job_id}` makes one while it trains")


@dataclass(frozen=True)
class ReadTrace:
    """One trace with what was recorded for it."""

    row: Row
    spec: JobSpec | None
    """Spec of the job, in the layout of the trace; None if nothing was recorded, or if this release does not understand
    it."""
    trace: StepTrace | None
    """None if nothing was recorded."""
    profiles: tuple[int, ...] = ()
    """Ranks that have a profile."""


class TraceReader:
    """Reads traces. Safe to use from any thread."""

    def __init__(self, store: Callable[[], Store]):
        self._store = store
        self._analyses: OrderedDict[tuple[str, int, float], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def list(self, job_id: str) -> list[dict[str, Any]]:
        """All traces of a job, the newest first, without what each rank did. Raises JobNotFound."""
        with self._store().read() as session:
            jobs.get(session, job_id)
            rows = step_traces.of_job(session, job_id)
            profiles = {row.number: step_traces.profiled(session, job_id, row.number) for row in rows}
        return [
            {
                **self._summary(self._known(row) or self._read(job_id, row.number), row),
                "profiles": profiles[row.number],
            }
            for row in reversed(rows)
        ]

    def document(self, job_id: str, trace_id: str, cluster: PlannerCluster) -> dict[str, Any]:
        """One trace in full. Raises JobNotFound, TraceNotFound."""
        read = self._read(job_id, step_traces.number_of(trace_id))
        planned = None
        if read.spec is not None and read.trace is not None:
            planned = planned_on(read.spec, cluster)
        nodes = dict(enumerate(read.row.nodes or []))
        return {
            **self._summary(read, read.row, planned),
            "profiles": read.profiles,
            "ranks": [] if read.trace is None else rank_documents(read.trace, nodes),
            "planned": None if planned is None else planned.to_json(),
        }

    def perfetto(self, job_id: str, trace_id: str) -> bytes:
        """One trace in Perfetto's format. Raises JobNotFound, TraceNotFound."""
        read = self._read(job_id, step_traces.number_of(trace_id))
        if read.trace is None:
            raise TraceNotFound(job_id)
        return perfetto(read.trace)

    def profile(self, job_id: str, trace_id: str, rank: int) -> bytes:
        """The result of torch's profiler for a rank, as a Chrome trace compressed by gzip. Raises JobNotFound,
        TraceNotFound."""
        with self._store().read() as session:
            jobs.get(session, job_id)
            return step_traces.profile(session, job_id, step_traces.number_of(trace_id), rank)

    def _read(self, job_id: str, number: int | None) -> ReadTrace:
        with self._store().read() as session:
            job = jobs.get(session, job_id)
            row = step_traces.get(session, job_id, number)
            known = step_traces.parts(session, job_id, row.number)
            profiles = tuple(step_traces.profiled(session, job_id, row.number))
        try:
            recordings = {rank: each.unpack() for rank, each in known.items() if each.packed}
        except MalformedMessage:  # from a release that packs them differently
            recordings = {}
        if not recordings or row.parallel is None:
            return ReadTrace(row, None, None, profiles)
        layout = _layout(row.parallel)
        trace = assembled(recordings, RankGrid(layout))
        try:
            spec = stored_spec(job).spec.model_copy(update={"parallel": layout})
        except SpecNotUnderstood:
            return ReadTrace(row, None, trace, profiles)
        return ReadTrace(row, spec, trace, profiles)

    def _known(self, row: Row) -> dict[str, Any] | None:
        """The analysis of a finished trace, if it was made before."""
        with self._lock:
            return self._analyses.get((row.job_id, row.number, row.finished_at or 0.0))

    def _analysis(self, read: ReadTrace) -> dict[str, Any]:
        known = self._known(read.row)
        if known is not None:
            return known
        if read.trace is None:
            return {"clock": {"error_seconds": None, "device": False}, "bubble": None, "critical_path": [], "parts": ()}
        parts = budget.of_trace(read.trace, read.spec) if read.spec is not None else ()
        made = {**analysis_document(read.trace), "parts": parts}
        if read.row.finished_at is not None:
            with self._lock:
                self._analyses[read.row.job_id, read.row.number, read.row.finished_at] = made
                while len(self._analyses) > MAX_CACHED:
                    self._analyses.popitem(last=False)
        return made

    def _summary(
        self, read: ReadTrace | dict[str, Any], row: Row, planned: PlannedStep | None = None
    ) -> dict[str, Any]:
        analysis = dict(read if isinstance(read, dict) else self._analysis(read))
        parts = analysis.pop("parts")
        name = step_traces.id_of(row.number)
        return {
            "id": name,
            "job_id": row.job_id,
            "state": row.state,
            "message": row.message,
            "generation": row.generation,
            "schedule": (row.parallel or {}).get("schedule"),
            "parallel": row.parallel,
            "first_step": row.first_step,
            "steps": row.steps,
            "requested_at": row.requested_at,
            "finished_at": row.finished_at,
            **analysis,
            "budget": budget_document(parts, planned, name) if parts else None,
        }

    def budget(self, job_id: str, of_trace: bool, of_phases: bool, cluster: PlannerCluster) -> dict[str, Any]:
        """How a job's step spends its time: from its newest complete trace in the layout that it runs in, or from what
        is measured in each step. Raises JobNotFound, SpecNotUnderstood, NothingMeasured."""
        with self._store().read() as session:
            job = jobs.get(session, job_id)
            spec = in_use(stored_spec(job).spec, job)
            rows = step_traces.of_job(session, job_id)
            parts, where = _phases(session, job, spec) if of_phases else (), "phases"
        whole = [row for row in rows if row.state == step_traces.COMPLETE and _layout(row.parallel) == spec.layout]
        if of_trace and whole:
            read = self._read(job_id, whole[-1].number)
            parts, where = self._analysis(read)["parts"], step_traces.id_of(whole[-1].number)
        if not parts:
            raise NothingMeasured(job_id, job.step, of_phases)
        return budget_document(parts, planned_on(spec, cluster), where)


def budget_document(parts: Any, planned: PlannedStep | None, measured_from: str) -> dict[str, Any]:
    """In the form of `manta.api.schemas.traces.StepBudget`."""
    return {
        "step_seconds": sum(part.seconds for part in parts),
        "parts": budget.to_json(parts),
        "planned": None if planned is None else budget.to_json(planned.parts),
        "measured_from": measured_from,
    }


def planned_on(spec: JobSpec, cluster: PlannerCluster) -> PlannedStep | None:
    """What the planner expects of a step; None if it cannot plan it."""
    where = cluster(spec)
    return None if where is None else planned_step(spec, where)


def _layout(document: dict[str, Any] | None) -> ParallelConfig:
    known = {name: value for name, value in (document or {}).items() if name in ParallelConfig.model_fields}
    return ParallelConfig.model_validate(known)


def _phases(session: Session, job: Any, spec: JobSpec) -> tuple[budget.Part, ...]:
    """From the newest steps that were measured, otherwise from what is known about each step."""
    every = spec.train.time_parts_every
    if every:
        newest = job.step - job.step % every
        steps = [newest - back * every for back in range(MEASURED_STEPS) if newest > back * every]
        if parts := budget.of_phases(metrics.rows_at(session, job.id, job.generation, steps), spec):
            return parts
    seconds = metrics.means(session, [job]).get(job.id, {}).get("step_seconds")
    current = [each for each in generations.of_job(session, job.id) if each.committed_steps]
    if seconds is None or not current:
        return ()
    last = current[-1]
    waits = {
        "data_wait": last.data_wait_seconds / last.committed_steps,
        "snapshot": (last.snapshot_stall_seconds + last.checkpoint_stall_seconds) / last.committed_steps,
    }
    mfu = job.metrics.get("mfu_full" if spec.attention_is_explicit else "mfu_causal")
    return budget.of_ledger(seconds, waits, mfu)


@dataclass(frozen=True)
class PlannedStep:
    """One step of a job as planned."""

    seconds: float
    parts: tuple[Part, ...]
    bubble_ratio: float
    ranks: list[dict[str, Any]] | None
    """For each stage of one replica a rank with its slices, as in a trace; None if they are too many."""

    def to_json(self) -> dict[str, Any]:
        """In the form of `manta.api.schemas.traces.PlannedTrace`."""
        return {"step_seconds": self.seconds, "bubble": {"mean": self.bubble_ratio}, "ranks": self.ranks}


def planned_step(spec: JobSpec, cluster: Cluster) -> PlannedStep | None:
    """A step of `spec`, which has a layout, on `cluster`; None if the planner cannot plan it."""
    if not spec.model.is_counted or spec.layout.world_size > sum(part.gpus for part in cluster.parts):
        return None
    try:
        model = step_model(spec, cluster)
    except UnknownMachine:
        return None
    plan = plan_of(spec, cluster, time=model.time())
    time, parts = plan.time, of_plan(step_shares(model, plan.time, plan.peak_flops))
    return PlannedStep(time.seconds, parts, time.bubble_ratio, _ranks(spec, model, time))


def _ranks(spec: JobSpec, model: StepModel, time: StepTime) -> list[dict[str, Any]] | None:
    layout = spec.layout
    passes = (3 if SCHEDULES[layout.schedule].splits_backward else 2) * layout.pipeline * layout.virtual_stages
    if passes * spec.micro_batches > MAX_PASSES:
        return None
    bars: dict[int, list[Bar]] = {stage: [] for stage in range(layout.pipeline)}
    for bar in model.pipeline().bars(spec.micro_batches):
        bars[bar.rank].append(bar)
    return [_rank(RankGrid(layout), stage, bars[stage], time) for stage in range(layout.pipeline)]


def _rank(grid: RankGrid, stage: int, bars: list[Bar], time: StepTime) -> dict[str, Any]:
    slices = [Slice(cast("SliceKind", bar.kind), bar.begin, bar.end, 1, bar.stage, bar.micro_batch) for bar in bars]
    reduced = time.pipeline + time.gradients + time.tied
    updated = reduced + time.optimizer
    tail: list[tuple[SliceKind, float, float]] = [
        ("reduction", time.pipeline, reduced),
        ("optimizer", reduced, updated),
    ]
    slices += [Slice(kind, start, end, 1) for kind, start, end in tail if end > start]
    return {
        "rank": grid.rank(Coordinates(0, stage, 0, 0)),
        "tensor": 0,
        "pipeline": stage,
        "data": 0,
        "context": 0,
        "node": None,
        "steps": [{"step": 1, "start": 0.0, "end": time.seconds}],
        "slices": [slice_document(slice_) for slice_ in slices],
    }
