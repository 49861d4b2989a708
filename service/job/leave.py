"""A job that is to give its places back before its last step: its user pauses it, its time is up, or its nodes are
being drained and there is no room elsewhere.

Any one rank is asked, and tells the others with the agreement of the step under way; all save the state of that step,
in memory and on disk, and end. A rank that dies meanwhile is recovered from like any other, and the next generation is
asked again. All that has `seconds_allowed`: after that the job leaves with what is saved by then, and sooner where a
save lies with a store that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from service.cluster.agents import ask
from service.duration import seconds_taken
from service.job.actions import End
from service.job.context import JobContext
from service.job.generation import RunningGeneration
from service.job.resume import known_checkpoints
from service.job.time_to_save import PATIENCE, seconds_allowed, time_to_save
from service.ledger import StateEntry
from service.states import JobState

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0
AGAIN_SECONDS = 2.0
"""Before it is asked again, where no agent could pass it on: trainers still start, or their agents do not answer."""
LOOK_SECONDS = 2.0
"""Between two looks which saves are under way."""


async def keep_time(job: JobContext) -> None:
    """Say that the job is to leave when its time is up, and that it has had long enough to do so. Until cancelled."""
    limit, before = job.submitted.max_duration, await job.record.state_changes()
    if limit is not None:
        left = limit - seconds_taken(before, time.time(), job.retried_at)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await job.leaving.wait()
        job.leaving.set()
    await job.leaving.wait()
    seconds = await _seconds_to_save(job, before)
    # What is in memory goes with nodes that are about to, and without snapshots there is nothing.
    keeps_memory = not job.no_room and job.submitted.checkpoint.snapshots != "off"
    await (_until_a_save_hangs(job, seconds) if keeps_memory else asyncio.sleep(seconds))
    job.overdue.set()


async def _until_a_save_hangs(job: JobContext, seconds: float) -> None:
    """Return once a save has been under way for several times as long as the job's saves take, or after so many
    seconds."""
    patience, since = PATIENCE * await time_to_save(job.record), dict[object, float]()
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        since = {save: since.get(save, now) for save in await job.record.saves_under_way()}
        if any(now - began >= patience for began in since.values()):
            return
        await asyncio.sleep(min(LOOK_SECONDS, end - now))


async def _seconds_to_save(job: JobContext, before: Sequence[StateEntry]) -> float:
    """How long the job, which is to leave, has for it. `before`: its entries into states when it was taken up here."""
    asked, changes = JobState.RESIZING if job.no_room else JobState.PAUSING, await job.record.state_changes()
    needed = await time_to_save(job.record)
    allowed = seconds_allowed(needed)
    if changes[-1].state != asked or len(changes) > len(before):
        return allowed
    # Another control plane has begun. By how much their clocks differ is not known: it is as long as a save takes.
    return min(allowed, max(changes[-1].at + allowed - time.time(), needed))


async def ask_to_save(job: JobContext, running: RunningGeneration) -> None:
    """Have the ranks of `running` save and end. Returns once an agent has passed that on: one is enough."""
    while True:
        agents = job.gang.by_rank
        answers, _ = await ask(agents, lambda rank, agent: agent.save_and_end(running.generation), ASK_SECONDS)
        if any(answers.values()):
            return
        await asyncio.sleep(AGAIN_SECONDS)


async def leave(job: JobContext) -> End | None:
    """Give back all places of a job whose ranks have ended, and keep its snapshots. None when it is PAUSED or QUEUED
    then, else how it ends: its time is up, or its user has cancelled it meanwhile."""
    row = await job.record.job()
    saved = await _newest_checkpoint(job)
    if row.step and saved is not None and saved < row.step:
        newest = f"the newest checkpoint is of step {saved}" if saved else "there is no checkpoint"
        message = f"the state of step {row.step} is in memory alone, {newest}: what its nodes lose is done again"
        await job.record.event("not_saved", message, step=row.step, data={"step": row.step, "saved": saved or None})
    if row.state == JobState.CANCELLING:
        return End(JobState.CANCELLED)
    if row.state == JobState.PAUSING:
        return await _give_back(job, JobState.PAUSED, None, job.record.pause)
    if job.no_room:
        why = job.no_room
        return await _give_back(job, JobState.QUEUED, why, lambda: job.record.wait_in_queue(why))
    limit = job.submitted.max_duration or 0.0
    message = f"has taken the {limit:g} s that max_duration allows; `manta retry {job.id}` gives it as long again"
    return End(JobState.FAILED, "max_duration", message)


async def _give_back(
    job: JobContext, state: JobState, why: str | None, done: Callable[[], Awaitable[bool]]
) -> End | None:
    """Give back all places of a job that will be in `state`, `why`, once `done` has noted that. None, or how it ends
    where its user has cancelled it meanwhile."""
    # From here on no places are known to belong to it, and the next owner must not acquire others.
    await job.record.note_outcome(state, None, why)
    await job.cluster.end_job(job.id, keep_snapshots=True)
    return None if await done() else End(JobState.CANCELLED)


async def _newest_checkpoint(job: JobContext) -> int | None:
    """The step of the newest durable checkpoint, 0 where there is none; None where that is not known."""
    try:
        durable = await known_checkpoints(job)
    except Exception as error:  # noqa: BLE001 - whatever it is, the places are given back
        log.warning("the checkpoints of %s are not known: %s", job.id, error)
        return None
    return durable.checkpoints[-1][0] if durable.checkpoints else 0
