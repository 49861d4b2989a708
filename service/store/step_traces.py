"""All queries about traces, and their tables: single steps of jobs, recorded action by action.

A trace is `requested` until rank 0 says that it begins, `recording` until all ranks have reported, and `complete` then;
`partial` where some of it is missing, `failed` where there is nothing of it, both with a sentence.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String, delete, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from manta.service.cluster.sizes import layout_in_use
from manta.service.states import is_final
from manta.service.store import events, jobs, ranks
from manta.service.store.errors import TraceNotFound, TraceNotPossible
from manta.service.store.tables import Base, Job
from manta.service.store.types import AnyText, Document, Real
from manta.service.stored_specs import stored_spec
from manta.service.words import no_such_rank
from manta.workers.config import ParallelConfig
from manta.workers.protocol.json_codec import from_json, to_json
from manta.workers.timing.recording import INTERRUPTED, PackedRecording

MAX_SLICES = 500_000
"""Most slices that are stored of one trace."""
REQUESTED, RECORDING, COMPLETE, PARTIAL, FAILED = "requested", "recording", "complete", "partial", "failed"
"""States of a trace."""
UNFINISHED = (REQUESTED, RECORDING)
_ID = re.compile(r"trace_([1-9][0-9]{0,8})")
MAX_TRACES = 10
"""Most traces kept per job: the next one replaces the oldest."""
MAX_WAITING = 5
"""Most unfinished traces of a job."""
MAX_RANK_STEPS = 4096
"""Most steps of one trace times ranks of the job."""


class StepTrace(Base):
    """A trace, from its request on."""

    __tablename__ = "step_traces"
    __table_args__ = (Index(None, "state"),)

    job_id: Mapped[str] = mapped_column(String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    """The job."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Number of the trace within the job, from 1; none is reused."""
    state: Mapped[str] = mapped_column(String(16))
    """requested, recording, complete, partial or failed."""
    message: Mapped[str | None] = mapped_column(AnyText)
    """Why it is partial, has failed, or does not begin."""
    steps: Mapped[int]
    """Number of requested steps."""
    wanted_step: Mapped[int] = mapped_column(BigInteger)
    """The first step is not before this one; 0: as soon as possible."""
    profiler_ranks: Mapped[list[int]] = mapped_column(Document, default=list)
    """Ranks whose steps torch's profiler records too."""
    generation: Mapped[int | None]
    """Of the ranks that record it; null before they begin, like the following ones."""
    first_step: Mapped[int | None] = mapped_column(BigInteger)
    """The first recorded step."""
    parallel: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The layout at that time."""
    nodes: Mapped[list[str | None] | None] = mapped_column(Document)
    """The node of each rank."""
    slices: Mapped[int] = mapped_column(BigInteger, default=0)
    """Number of slices stored so far."""
    requested_at: Mapped[float] = mapped_column(Real)
    """When it was requested."""
    finished_at: Mapped[float | None] = mapped_column(Real)
    """When it ended."""


class StepTracePart(Base):
    """What one rank has recorded for a trace."""

    __tablename__ = "step_trace_parts"

    job_id: Mapped[str] = mapped_column(String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    """The job."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The trace's number."""
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The rank."""
    recording: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """A `PackedRecording`; null if only the profile has arrived."""
    profile: Mapped[bytes | None] = mapped_column(LargeBinary)
    """The profile of torch's profiler, as a Chrome trace, compressed with gzip."""


def id_of(number: int) -> str:
    """The name of a trace over REST."""
    return f"trace_{number}"


def number_of(trace_id: str) -> int | None:
    """The number in a trace's id; None if it is not one."""
    match = _ID.fullmatch(trace_id)
    return int(match[1]) if match else None


def get(session: Session, job_id: str, number: int | None, lock: bool = False) -> StepTrace:
    """One trace. Raises TraceNotFound."""
    row = None if number is None else session.get(StepTrace, (job_id, number), with_for_update=lock or None)
    if row is None:
        raise TraceNotFound(job_id)
    return row


def of_job(session: Session, job_id: str) -> list[StepTrace]:
    """All traces of a job, the oldest first."""
    return list(session.scalars(select(StepTrace).where(StepTrace.job_id == job_id).order_by(StepTrace.number)))


def parts(session: Session, job_id: str, number: int) -> dict[int, PackedRecording]:
    """The recordings of a trace, by rank."""
    query = select(StepTracePart.rank, StepTracePart.recording)
    rows = session.execute(query.where(StepTracePart.job_id == job_id, StepTracePart.number == number))
    return {rank: from_json(PackedRecording, recording) for rank, recording in rows if recording is not None}


def wanted(session: Session, job_id: str) -> list[StepTrace]:
    """Traces of a job that have not begun, the oldest first."""
    return [row for row in of_job(session, job_id) if row.state == REQUESTED]


def jobs_with_waiting_traces(session: Session) -> set[str]:
    """Jobs with traces that have not begun."""
    return set(session.scalars(select(StepTrace.job_id).where(StepTrace.state == REQUESTED).distinct()))


def begin(
    session: Session,
    row: StepTrace,
    generation: int,
    first_step: int,
    layout: ParallelConfig,
    nodes: Sequence[str | None],
) -> None:
    """The ranks of `generation`, in `layout` on `nodes`, record from `first_step` on."""
    row.state, row.generation, row.first_step, row.message = RECORDING, generation, first_step, None
    row.parallel = {**layout.model_dump(mode="json"), "world_size": layout.world_size}
    row.nodes = list(nodes)


def part_of(session: Session, row: StepTrace, rank: int) -> StepTracePart:
    """The row of `rank` in a trace; a new one if there is none."""
    known = session.get(StepTracePart, (row.job_id, row.number, rank))
    if known is None:
        known = StepTracePart(job_id=row.job_id, number=row.number, rank=rank)
        session.add(known)
    return known


def profiled(session: Session, job_id: str, number: int) -> list[int]:
    """Ranks whose profile a trace has."""
    query = select(StepTracePart.rank).where(StepTracePart.job_id == job_id, StepTracePart.number == number)
    return list(session.scalars(query.where(StepTracePart.profile.is_not(None)).order_by(StepTracePart.rank)))


def profile(session: Session, job_id: str, number: int | None, rank: int) -> bytes:
    """The profile of one rank. Raises TraceNotFound."""
    known = None if number is None else session.get(StepTracePart, (job_id, number, rank))
    if known is None or known.profile is None:
        raise TraceNotFound(job_id)
    return known.profile


def add(session: Session, row: StepTrace, rank: int, recording: PackedRecording) -> None:
    """Add the recording of `rank`. With the last rank's the trace is complete, unless it was aborted: then the caller
    that knows the reason ends it."""
    if row.slices + recording.count > MAX_SLICES:
        recording = PackedRecording("", problem=f"the trace has more than {MAX_SLICES:,} slices without it")
    row.slices += recording.count
    part_of(session, row, rank).recording = to_json(recording)
    session.flush()
    of_trace = StepTracePart.job_id == row.job_id, StepTracePart.number == row.number
    there = select(func.count()).select_from(StepTracePart).where(*of_trace, StepTracePart.recording.is_not(None))
    if session.scalar(there) != _ranks_of(row):
        return
    known = parts(session, row.job_id, row.number)
    problems = {each.problem for each in known.values()} - {""}
    if INTERRUPTED not in problems:
        _end(session, row, PARTIAL if problems else COMPLETE, _sentence(known) if problems else None)


def _ranks_of(row: StepTrace) -> int:
    return int((row.parallel or {}).get("world_size", 0))


def _sentence(known: dict[int, PackedRecording]) -> str:
    """What ranks say about missing parts."""
    by_problem: dict[str, list[int]] = {}
    for rank, each in sorted(known.items()):
        if each.problem:
            by_problem.setdefault(each.problem, []).append(rank)
    return "; ".join(f"{_named(of)}: {problem}" for problem, of in by_problem.items())


def _named(some: Collection[int]) -> str:
    shown = ", ".join(map(str, list(some)[:8])) + (", ..." if len(some) > 8 else "")
    return f"rank{'' if len(some) == 1 else 's'} {shown}"


def interrupt(session: Session, job_id: str, why: str) -> None:
    """The generation is over, because of `why`: recordings in progress do not continue."""
    for row in of_job(session, job_id):
        if row.state == RECORDING:
            known = parts(session, job_id, row.number)
            whole = [rank for rank, each in known.items() if each.count]
            missing = [rank for rank in range(_ranks_of(row)) if rank not in whole]
            left = f"; there is no recording of {_named(missing)}" if whole and missing else ""
            _end(session, row, PARTIAL if whole else FAILED, f"the recording was interrupted: {why}{left}")


def end_all(session: Session, job_id: str, why: str) -> None:
    """The job is over, because of `why`: nothing more is recorded."""
    interrupt(session, job_id, why)
    for row in wanted(session, job_id):
        _end(session, row, FAILED, f"it did not begin: {why}")


def fail(session: Session, job_id: str, number: int, why: str) -> None:
    """A trace that has not begun cannot begin."""
    row = session.get(StepTrace, (job_id, number), with_for_update=True)
    if row is not None and row.state == REQUESTED:
        _end(session, row, FAILED, why)


def _end(session: Session, row: StepTrace, state: str, message: str | None) -> None:
    row.state, row.message, row.finished_at = state, message, time.time()
    said = f"{id_of(row.number)} is {state}" + (f": {message}" if message else "")
    data = {"trace": id_of(row.number)}
    about: dict[str, Any] = {"generation": row.generation, "step": row.first_step, "data": data}
    events.append(session, row.job_id, f"trace_{state}", said, **about)


def delete_one(session: Session, job_id: str, number: int) -> None:
    """Delete a trace and all its recordings."""
    for table in (StepTracePart, StepTrace):
        session.execute(delete(table).where(table.job_id == job_id, table.number == number))


def request(
    session: Session, job_id: str, steps: int, first_step: int = 0, profiler_ranks: Sequence[int] = ()
) -> StepTrace:
    """Request a trace of `steps` steps, none of them before `first_step`. Raises JobNotFound, TraceNotPossible,
    SpecNotUnderstood."""
    job = jobs.get(session, job_id, lock=True)
    known = of_job(session, job_id)
    _refuse_impossible(job, steps, first_step, profiler_ranks, [row for row in known if row.state in UNFINISHED])
    over = [row for row in known if row.state not in UNFINISHED]
    for row in over[: max(0, len(known) + 1 - MAX_TRACES)]:
        delete_one(session, job_id, row.number)
    number = max((row.number for row in known), default=0) + 1
    made = StepTrace(
        job_id=job_id,
        number=number,
        state=REQUESTED,
        steps=steps,
        wanted_step=first_step,
        profiler_ranks=list(profiler_ranks),
        slices=0,
        requested_at=time.time(),
    )
    session.add(made)
    session.flush()
    return made


def _refuse_impossible(
    job: Job, steps: int, first_step: int, profiler_ranks: Sequence[int], unfinished: Sequence[StepTrace]
) -> None:
    world = _layout(job).world_size
    if is_final(job.state):
        raise TraceNotPossible(f"{job.id} is {job.state}: only a job that still trains can be traced")
    if first_step > job.steps or job.step >= job.steps:
        raise TraceNotPossible(f"{job.id} ends with step {job.steps}, and has committed {job.step}")
    if steps * world > MAX_RANK_STEPS:
        most = MAX_RANK_STEPS // world
        advice = f"trace {most} at most" if most else "such a job cannot be traced"
        raise TraceNotPossible(f"{steps} steps of {world} ranks are too many for one trace: {advice}")
    if len(unfinished) >= MAX_WAITING:
        raise TraceNotPossible(f"{len(unfinished)} traces of {job.id} are unfinished: wait for one of them")
    if foreign := [rank for rank in profiler_ranks if rank >= world]:
        raise TraceNotPossible(no_such_rank(job.id, foreign[0], world))


def _layout(job: Job) -> ParallelConfig:
    """The layout that the job runs in."""
    return layout_in_use(stored_spec(job).spec.layout, job)


def record_beginning(session: Session, job_id: str, number: int, generation: int, first_step: int) -> None:
    """Ranks of `generation` record from `first_step` on, or have done so; only the first call has an effect. Raises
    JobNotFound."""
    row = session.get(StepTrace, (job_id, number), with_for_update=True)
    if row is not None and row.state == REQUESTED:
        nodes = [each.node for each in ranks.of_job(session, job_id)]
        begin(session, row, generation, first_step, _layout(jobs.get(session, job_id)), nodes)


def record_profiled(
    session: Session, job_id: str, number: int, generation: int, first_step: int, rank: int, profile: bytes
) -> None:
    """The profile of `rank` by torch's profiler; ignored if empty. Raises JobNotFound."""
    record_beginning(session, job_id, number, generation, first_step)
    row = session.get(StepTrace, (job_id, number), with_for_update=True)
    if profile and row is not None and row.state == RECORDING and row.generation == generation:
        part_of(session, row, rank).profile = profile


def record_recorded(
    session: Session, job_id: str, number: int, generation: int, first_step: int, rank: int, recording: PackedRecording
) -> None:
    """The recording of `rank` of `generation` from `first_step` on. Raises JobNotFound."""
    record_beginning(session, job_id, number, generation, first_step)
    row = session.get(StepTrace, (job_id, number), with_for_update=True)
    if row is not None and row.state == RECORDING and row.generation == generation:
        add(session, row, rank, recording)
