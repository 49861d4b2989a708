"""What is written when a trace of a job is requested, and when its ranks report about it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy.orm import Session

from manta.service.cluster.sizes import layout_in_use
from manta.service.states import is_final
from manta.service.store import jobs, ranks, step_traces
from manta.service.store.errors import TraceNotPossible
from manta.service.store.step_traces import RECORDING, REQUESTED, UNFINISHED, StepTrace
from manta.service.store.tables import Job
from manta.service.stored_specs import stored_spec
from manta.service.words import no_such_rank
from manta.workers.config import ParallelConfig
from manta.workers.timing.recording import PackedRecording

MAX_TRACES = 10
"""Most traces kept per job: the next one replaces the oldest."""
MAX_WAITING = 5
"""Most unfinished traces of a job."""
MAX_RANK_STEPS = 4096
"""Most steps of one trace times ranks of the job."""


def request(
    session: Session, job_id: str, steps: int, first_step: int = 0, profiler_ranks: Sequence[int] = ()
) -> StepTrace:
    """Request a trace of `steps` steps, none of them before `first_step`. Raises JobNotFound, TraceNotPossible,
    SpecNotUnderstood."""
    job = jobs.get(session, job_id, lock=True)
    known = step_traces.of_job(session, job_id)
    _refuse_impossible(job, steps, first_step, profiler_ranks, [row for row in known if row.state in UNFINISHED])
    over = [row for row in known if row.state not in UNFINISHED]
    for row in over[: max(0, len(known) + 1 - MAX_TRACES)]:
        step_traces.delete_one(session, job_id, row.number)
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
        raise TraceNotPossible(f"job {job.id} is {job.state}: only a job that still trains can be traced")
    if first_step > job.steps or job.step >= job.steps:
        raise TraceNotPossible(f"job {job.id} ends with step {job.steps}, and has committed {job.step}")
    if steps * world > MAX_RANK_STEPS:
        most = MAX_RANK_STEPS // world
        advice = f"trace {most} at most" if most else "such a job cannot be traced"
        raise TraceNotPossible(f"{steps} steps of {world} ranks are too many for one trace: {advice}")
    if len(unfinished) >= MAX_WAITING:
        raise TraceNotPossible(f"{len(unfinished)} traces of job {job.id} are unfinished: wait for one of them")
    if foreign := [rank for rank in profiler_ranks if rank >= world]:
        raise TraceNotPossible(no_such_rank(f"job {job.id}", foreign[0], world))


def _layout(job: Job) -> ParallelConfig:
    """The layout that the job runs in. Raises SpecNotUnderstood."""
    return layout_in_use(stored_spec(job).spec.layout, job)


def record_beginning(session: Session, job_id: str, number: int, generation: int, first_step: int) -> None:
    """Ranks of `generation` record from `first_step` on, or have done so; only the first call has an effect. Raises
    JobNotFound."""
    row = session.get(StepTrace, (job_id, number), with_for_update=True)
    if row is not None and row.state == REQUESTED:
        nodes = [each.node for each in ranks.of_job(session, job_id)]
        step_traces.begin(session, row, generation, first_step, _layout(jobs.get(session, job_id)), nodes)


def record_profiled(
    session: Session, job_id: str, number: int, generation: int, first_step: int, rank: int, profile: bytes
) -> None:
    """The profile of `rank` by torch's profiler; ignored if empty. Raises JobNotFound."""
    record_beginning(session, job_id, number, generation, first_step)
    row = session.get(StepTrace, (job_id, number), with_for_update=True)
    if profile and row is not None and row.state == RECORDING and row.generation == generation:
        step_traces.part_of(session, row, rank).profile = profile


def record_recorded(
    session: Session, job_id: str, number: int, generation: int, first_step: int, rank: int, recording: PackedRecording
) -> None:
    """The recording of `rank` of `generation` from `first_step` on. Raises JobNotFound."""
    record_beginning(session, job_id, number, generation, first_step)
    row = session.get(StepTrace, (job_id, number), with_for_update=True)
    if row is not None and row.state == RECORDING and row.generation == generation:
        step_traces.add(session, row, rank, recording)
