"""Converts rows of the job database to answers of the API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Row
from sqlalchemy.orm import Session

from manta.api import schemas
from manta.api.schemas import access as access_schemas
from manta.service.cluster.sizes import layout_in_use
from manta.service.identity import Identity
from manta.service.ledger import Ledger
from manta.service.planner.drift import compared
from manta.service.planner.hardware import Machine
from manta.service.planner.machines import StoredCalibration
from manta.service.planner.part_labels import PART_LABELS
from manta.service.planner.refinement import moved
from manta.service.states import JobState
from manta.service.store import checkpoints, exports, installation_tables, jobs, ledgers, metrics, recoveries, tables
from manta.service.store.expected_starts import expected_starts
from manta.service.store.plans import StoredPlan
from manta.service.store.types import Reader
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.liveness.expert_load import expert_load
from manta.workers.liveness.rank_samples import unpacked

Shown = TypeVar("Shown", bound=schemas.Answer)
_ABSENT = object()
MAX_RANKS_LISTED = 4096
LikeJob = tables.Job | Row[Any]
"""A job, or a row of `job_rows.understood`."""
_WITH_ETA = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RECOVERING, JobState.RESIZING})


def moment(seconds: float) -> datetime:
    """Unix seconds as a moment in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def answer(kind: type[Shown], row: object, **other: Any) -> Shown:
    """An answer with the values of `row` under the names of its fields, and with `other` in fields that `row` does not
    have, or not in this form."""
    same = {name: getattr(row, name, _ABSENT) for name in kind.model_fields if name not in other}
    return kind(**{name: value for name, value in same.items() if value is not _ABSENT}, **other)


def job_view(session: Session, job: tables.Job) -> schemas.Job:
    """A job, with its place in the queue, goodput and expected end."""
    return job_views(session, [job])[0]


def job_views(reader: Reader, some: Sequence[LikeJob]) -> list[schemas.Job]:
    """Jobs, with as many queries as for one."""
    started = [job for job in some if job.generation]  # the others have not computed anything yet
    books = ledgers.of_jobs(reader, started, time.time()) if started else {}
    places = jobs.queue_positions(reader, some)
    starts = expected_starts(reader) if places else {}
    means = metrics.means(reader, [job for job in started if job.step > 0])
    return [
        _job_view(
            job,
            books.get(job.id),
            means.get(job.id, {}),
            schemas.Queue(
                position=places.get(job.id),
                waiting_for=job.waiting_for,
                expected_start_seconds=starts.get(job.id),
            ),
        )
        for job in some
    ]


def _job_view(job: LikeJob, book: Ledger | None, means: Mapping[str, float], queue: schemas.Queue) -> schemas.Job:
    known = dict.fromkeys(("step", *tables.METRIC_NAMES))
    step_seconds = means.get("step_seconds") if job.state in _WITH_ETA else None
    return answer(
        schemas.Job,
        job,
        etag=f'"{jobs.version_of(job)}"',
        labels=jobs.labels_of(job),
        eta_seconds=None if step_seconds is None else step_seconds * (job.steps - job.step),
        parallel=_layout_in_use(job),
        metrics=schemas.LatestMetrics(latest={**known, **job.metrics}, mean={**dict.fromkeys(metrics.MEANS), **means}),
        goodput=None if book is None else book.goodput,
        running_seconds=None if book is None else book.running_seconds,
        queue=queue,
    )


def _layout_in_use(job: LikeJob) -> dict[str, Any]:
    """The layout that the job runs with; the stored document if another version wrote a layout that is invalid in this
    one."""
    layout = known_layout(job)
    return job.spec["parallel"] if layout is None else layout_of(layout)


def known_layout(job: LikeJob) -> ParallelConfig | None:
    """The layout that the job runs with; None if another version wrote a layout that is invalid in this one."""
    try:
        return layout_in_use(ParallelConfig.model_validate(job.spec["parallel"]), job)
    except ValidationError:
        return None


def ranks_of(job: LikeJob) -> int | None:
    """How many ranks the job has; None if another version wrote a layout that is invalid in this one."""
    count = _layout_in_use(job).get("world_size")
    return None if count is None else int(count)


def layout_of(layout: ParallelConfig) -> dict[str, Any]:
    """A layout with all defaults resolved: sequence parallelism decided, ranks counted."""
    document = layout.model_dump(mode="json")
    return {**document, "sequence_parallel": layout.sequence_parallel_on, "world_size": layout.world_size}


def dry_run_view(
    spec: JobSpec,
    plan: schemas.Plan | None,
    note: str | None,
    lacks_slots: bool,
    data_problem: str | None,
    notes: Sequence[str],
) -> schemas.DryRun:
    """What submitting `spec` would do. `plan`: of its layout, with a `note` on it, or on why there is none;
    `lacks_slots`: whether its layout needs more than there are; `data_problem`: why its data could not be trained on;
    `notes`: what was decided."""
    layout = spec.layout
    listed = layout.world_size <= MAX_RANKS_LISTED
    return schemas.DryRun(
        spec=spec.model_dump(mode="json"),
        layout=schemas.Layout(
            parallel=layout_of(layout),
            world_size=layout.world_size,
            micro_batches=spec.micro_batches,
            ranks=[_place(rank, layout) for rank in range(layout.world_size)] if listed else None,
        ),
        plan=plan,
        plan_note=note,
        lacks_slots=lacks_slots,
        data_problem=data_problem,
        notes=list(notes),
    )


def _place(rank: int, layout: ParallelConfig) -> schemas.RankPlace:
    at = RankGrid(layout).coordinates(rank)
    return answer(schemas.RankPlace, at, rank=rank, expert=layout.expert_index(at.tensor, at.data, at.context))


NOT_PLANNED_YET = "a job is planned when it starts"
PLAN_OF_OTHER_RELEASE = "this job was planned by another release, in an unknown format"


def job_plan_view(kept: StoredPlan | None) -> schemas.JobPlan:
    """A job's plan, compared with its measured steps; None: there is none yet."""
    if kept is None:
        return _no_plan(None, NOT_PLANNED_YET)
    try:
        return _job_plan_view(kept)
    except (KeyError, TypeError, ValidationError):
        return _no_plan(kept.generation, PLAN_OF_OTHER_RELEASE)


def _no_plan(generation: int | None, problem: str) -> schemas.JobPlan:
    return schemas.JobPlan(
        generation=generation,
        parallel=None,
        planned=None,
        problem=problem,
        measured=None,
        compared=[],
        drift=None,
    )


def _job_plan_view(kept: StoredPlan) -> schemas.JobPlan:
    planned, measured = kept.plan["planned"], kept.measured
    groups = compared(planned, measured) if planned and measured else ()
    return schemas.JobPlan.model_validate(
        {
            **kept.plan,
            "generation": kept.generation,
            "measured": measured and measured.to_json(),
            "compared": [{**vars(group), "label": PART_LABELS[group.name]} for group in groups],
            "drift": kept.drift,
        }
    )


def machine_view(kept: StoredCalibration, own: str, refined: Machine | None) -> schemas.Machine:
    """A type of node that was calibrated. `own`: the type of this control plane's node; `refined`: the machine, if jobs
    have refined it."""
    calibration = kept.calibrated
    return schemas.Machine(
        name=kept.name,
        measured_at=moment(kept.measured_at),
        device=calibration and calibration.device,
        cores=calibration and calibration.cores,
        constants=calibration and calibration.constants,
        this_node=kept.name == own,
        problem=kept.problem,
        warning=calibration and calibration.warning,
        links=(calibration and calibration.between) or None,
        links_note=calibration and calibration.links_note,
        **_refinement(refined),
    )


def refined_machine_view(name: str, at: float, own: str, refined: Machine) -> schemas.Machine:
    """A type of node that was not calibrated but refined by jobs, the newest of which began `at` that Unix time."""
    return schemas.Machine(
        name=name,
        measured_at=moment(at),
        device=None,
        cores=None,
        constants=vars(refined.core or refined.constants),
        this_node=name == own,
        problem=None,
        **_refinement(refined),
    )


def _refinement(machine: Machine | None) -> dict[str, Any]:
    if machine is None or machine.refined is None:
        return {}
    return {"refined": moved(machine), "refined_by_jobs": machine.refined.jobs}


def event_view(event: tables.Event) -> schemas.Event:
    """An event."""
    return answer(schemas.Event, event, id=str(event.id))


def job_event_view(event: tables.Event) -> schemas.JobEvent:
    """An event, and its job."""
    return answer(schemas.JobEvent, event, id=str(event.id), job=event.job_id)


def rank_views(
    rows: Sequence[tables.Rank], numbers: tables.RankNumbers | None, layout: ParallelConfig | None = None
) -> list[schemas.Rank]:
    """Ranks, with the `numbers` of those of the same generation. `layout`: the one that the job runs with."""
    known = [] if numbers is None else _numbers_by_rank(numbers)
    experts = [None if layout is None else layout.expert_index(row.tensor, row.data, row.context) for row in rows]
    return [
        answer(schemas.Rank, row, expert=expert, **(known[row.rank] if row.rank < len(known) else {}))
        for row, expert in zip(rows, experts, strict=True)
    ]


def expert_tokens_view(spec: JobSpec, counted: tuple[int, Sequence[float]] | None) -> schemas.ExpertTokens:
    """The step and the tokens that chose each expert in it, layer by layer."""
    moe = spec.model.moe
    if counted is None or moe is None:
        return schemas.ExpertTokens(step=None, layers=[], tokens=[], load=[])
    step, flat = counted
    starts = range(0, len(flat), moe.experts)
    tokens = [[round(count) for count in flat[start : start + moe.experts]] for start in starts]
    load = [expert_load([counts]) for counts in tokens]
    return schemas.ExpertTokens(step=step, layers=[*spec.model.expert_layers], tokens=tokens, load=load)


def _numbers_by_rank(numbers: tables.RankNumbers) -> list[dict[str, Any]]:
    memory, seconds = unpacked(numbers.memory_bytes), numbers.seconds
    own = [None] * len(memory) if numbers.own_seconds is None else unpacked(numbers.own_seconds)
    stragglers = {straggler["rank"]: schemas.Straggler.model_validate(straggler) for straggler in numbers.stragglers}
    return [
        {
            "own_seconds": own_seconds,
            "wait_seconds": None if own_seconds is None else max(0.0, seconds - own_seconds),
            "memory_bytes": int(memory_bytes),
            "straggler": stragglers.get(rank),
        }
        for rank, (own_seconds, memory_bytes) in enumerate(zip(own, memory, strict=True))
    ]


def ledger_view(ledger: Ledger, with_intervals: bool = False) -> schemas.Ledger:
    """A ledger."""
    shown = ledger.intervals if with_intervals else ()
    line = [answer(schemas.LedgerInterval, each, seconds=_by_class(each.seconds)) for each in shown]
    seconds = _by_class(ledger.seconds)
    return answer(schemas.Ledger, ledger, seconds=seconds, intervals=line if with_intervals else None)


def _by_class(seconds: Mapping[Any, float]) -> dict[str, float]:
    return {str(name): spent for name, spent in seconds.items()}


def recovery_view(row: tables.Recovery) -> schemas.Recovery:
    """A recovery."""
    timeline = recoveries.timeline(row)
    about = {"time": timeline.began_at, "seconds": timeline.phases(), "total_seconds": timeline.total_seconds}
    return answer(schemas.Recovery, row, **about)


def checkpoint_view(
    row: tables.Checkpoint,
    now: float,
    kept_because: Mapping[str, str] | None = None,
    losses: Mapping[int, Mapping[str, float | None]] | None = None,
) -> schemas.Checkpoint:
    """A checkpoint at Unix time `now`; `kept_because`: the reason, by id; `losses`: those of its job, by step."""
    completed_at = row.completed_at if row.state == checkpoints.COMPLETE else None
    return answer(
        schemas.Checkpoint,
        row,
        exists=None if row.state == checkpoints.SAVING else row.state == checkpoints.COMPLETE,
        age_seconds=None if completed_at is None else max(0.0, now - completed_at),
        kept_because=(kept_because or {}).get(row.id),
        **(losses or {}).get(row.step, {}),
    )


def export_view(row: tables.Export, now: float) -> schemas.Export:
    """An export at `now`, by the database's clock."""
    lost = row.state == exports.RUNNING and not exports.is_running(row, now)
    said = f"the service that wrote it has ended; check whether {row.path} exists" if lost else row.message
    state = "failed" if lost else row.state
    about = {"job": row.job_id, "checkpoint": row.checkpoint_id, "to": row.path, "state": state, "message": said}
    return answer(schemas.Export, row, **about)


def me_view(identity: Identity, browser: bool) -> access_schemas.Me:
    """The caller. `browser`: identified by a browser session."""
    return answer(access_schemas.Me, identity, key=identity.key_id, browser=browser)


def audit_view(entry: installation_tables.AuditEntry) -> access_schemas.AuditEntry:
    """An entry of the audit."""
    return answer(access_schemas.AuditEntry, entry, id=str(entry.id), key=entry.key_id)
