"""A job that gives its places back before its last step: its user pauses it, its time is up, or its nodes are being
drained and there is no room elsewhere.

One rank is asked, and informs the others with the agreement of the present step; all save the state of that step, in
memory and on disk, and end. A rank that dies meanwhile is recovered as usual, and the next generation is asked again.
All of this may take `seconds_allowed`: then the job leaves with what is saved, or sooner if the store of a save does
not answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

from manta.service.cluster.agents import query
from manta.service.job.actions import End
from manta.service.job.context import JobContext
from manta.service.job.generation import RunningGeneration
from manta.service.job.inbox import LEAVE, Overdue, TimeUp
from manta.service.job.record import JobRecord
from manta.service.job.resume import known_checkpoints
from manta.service.ledger import StateEntry, seconds_taken
from manta.service.states import JobState
from manta.service.store import checkpoints
from manta.workers.protocol.requests import SaveAndEnd

log = logging.getLogger(__name__)

SAVE_SECONDS = 300.0
"""Seconds that saving its state may take before a job leaves without it, unless its saves always take longer."""
SAVE_TIME_FACTOR = 6
"""A save may take this many times the expected time if the state is in memory too: one that takes longer most likely
waits for a store that does not answer."""
MAX_SAVE_SECONDS = 3600.0
"""Upper limit of the time that a job is assumed to need: saves that were recorded late are no measure."""
LATEST = 5
"""The median of this many saves counts."""
UNKNOWN_SAVE_SECONDS = 30.0
"""Assumed seconds of a save if none of the job's is known."""
SPARE_SECONDS = 10.0
"""Seconds until it is noticed that time is short, all ranks are asked, and everything is given back."""
REQUEST_SECONDS = 10.0
RETRY_SECONDS = 2.0
"""Seconds before ranks are asked again, if no agent could pass it on: trainers are still starting, or their agents do
not answer."""
PROGRESS_SECONDS = 2.0
"""Seconds between checks of the saves in progress, and in which rank 0 must report its progress."""


async def time_to_save(record: JobRecord) -> float:
    """Seconds that the job needs to have its state saved, from its last saves and steps."""
    saves = await record.read(lambda s: checkpoints.latest_seconds(s, record.id, LATEST))
    return seconds_to_save(saves, (await record.job()).metrics.get("step_seconds"))


def seconds_to_save(saves: Sequence[float], step_seconds: float | str | None) -> float:
    """Seconds that a job needs to have its state saved if its last saves took `saves` seconds, from the first to the
    last rank, and its last step took `step_seconds`; None, or a word, if unknown. Another save may have to end before
    this one, and a step that has just begun has to end too; each may take twice as long as ever before."""
    save = median(saves) if saves else UNKNOWN_SAVE_SECONDS
    step = step_seconds if isinstance(step_seconds, int | float) else 0.0
    return min(MAX_SAVE_SECONDS, 2 * save + 2 * step + SPARE_SECONDS)


def seconds_allowed(needed: float) -> float:
    """Seconds that a job may take that needs `needed` seconds to have its state saved."""
    return max(needed, SAVE_SECONDS)


async def watch_deadline(job: JobContext) -> None:
    """Note that the job is to leave when its time is up, and that it has had long enough to do so. Until cancelled."""
    limit, before = job.submitted.max_duration, await job.record.state_changes()
    if limit is not None:
        left = limit - seconds_taken(before, time.time(), job.history.retried_at)
        await job.inbox.wait(*LEAVE, seconds=left)
        if not job.inbox.has(*LEAVE):
            job.inbox.put(TimeUp())
    await job.inbox.wait(*LEAVE)
    seconds = await _seconds_to_save(job, before)
    # What is in memory is lost with its nodes, and without snapshots there is nothing in memory.
    keeps_memory = job.has_snapshots and not job.inbox.no_room
    await (_until_a_save_hangs(job, seconds) if keeps_memory else asyncio.sleep(seconds))
    job.inbox.put(Overdue())


async def _until_a_save_hangs(job: JobContext, seconds: float) -> None:
    """Return when a save has been in progress for several times as long as the job's saves take, or after `seconds`."""
    patience, since = SAVE_TIME_FACTOR * await time_to_save(job.record), dict[object, float]()
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        since = {save: since.get(save, now) for save in await _unfinished_saves(job)}
        if any(now - began >= patience for began in since.values()):
            return
        await asyncio.sleep(max(0.0, min(PROGRESS_SECONDS, end - time.monotonic())))


async def _unfinished_saves(job: JobContext) -> list[object]:
    """What tells each save that is under way from any other: those that were reported, and what rank 0 does between two
    steps, as its agent sees it. It lists the store after a recovery and deletes older checkpoints: the next save waits
    for either, and no report shows it."""
    reported = await job.record.unfinished_saves()
    first = {rank: agent for rank, agent in job.gang.by_rank.items() if rank == 0}
    answers, _ = await query(first, lambda rank, agent: agent.progress(), PROGRESS_SECONDS)
    records = [status.record for status in answers.values() if status is not None]
    return [*reported, *(record.commits for record in records if record is not None and record.phase == "checkpoint")]


async def _seconds_to_save(job: JobContext, before: Sequence[StateEntry]) -> float:
    """Seconds that the job, which is to leave, may take. `before`: its changes of state when it was taken over here."""
    asked, changes = JobState.RESIZING if job.inbox.no_room else JobState.PAUSING, await job.record.state_changes()
    needed = await time_to_save(job.record)
    allowed = seconds_allowed(needed)
    if changes[-1].state != asked or len(changes) > len(before):
        return allowed
    # Another control plane has begun. The difference between their clocks is unknown: a save's duration is assumed.
    return min(allowed, max(changes[-1].at + allowed - time.time(), needed))


async def request_save(job: JobContext, running: RunningGeneration) -> None:
    """Have the ranks of `running` save and end. Returns when one agent has passed that on, which is enough."""
    request = SaveAndEnd(running.generation)
    while True:
        answers, _ = await query(job.gang.by_rank, lambda rank, agent: agent.tell(request), REQUEST_SECONDS)
        if any(answers.values()):
            return
        await asyncio.sleep(RETRY_SECONDS)


async def leave(job: JobContext) -> End | None:
    """Give back all places of a job whose ranks have ended, and keep its snapshots. Returns None if it is then PAUSED
    or QUEUED, otherwise how it ends: its time is up, or its user has cancelled it meanwhile."""
    row = await job.record.job()
    saved = await _newest_checkpoint(job)
    if row.step and saved is not None and saved < row.step:
        message = _not_saved(row.step, saved, job.has_snapshots)
        await job.record.event("not_saved", message, step=row.step, data={"step": row.step, "saved": saved or None})
    if row.state == JobState.CANCELLING:
        return End(JobState.CANCELLED)
    if row.state == JobState.PAUSING:
        return await _give_back(job, JobState.PAUSED, None, job.record.pause)
    if why := job.inbox.no_room:
        return await _give_back(job, JobState.QUEUED, why, lambda: job.record.wait_in_queue(why))
    limit = job.submitted.max_duration or 0.0
    message = f"ran for the {limit:g} s that max_duration allows; manta retry {job.id} allows as long again"
    return End(JobState.FAILED, "max_duration", message)


def _not_saved(step: int, saved: int, has_snapshots: bool) -> str:
    """What became of the state of `step`, which is newer than the newest checkpoint, of step `saved`; 0: there is none.
    `has_snapshots`: whether the job keeps any."""
    newest = f"the newest checkpoint is of step {saved}" if saved else "there is no checkpoint"
    if has_snapshots:
        return f"the state of step {step} is only in memory, and {newest}: a step whose state is lost is repeated"
    again = f"steps {saved + 1} to {step} are" if step > saved + 1 else f"step {step} is"
    return f"the state of step {step} is lost, as checkpoint.snapshots is off: {newest}, and {again} repeated"


async def _give_back(
    job: JobContext, state: JobState, why: str | None, done: Callable[[], Awaitable[bool]]
) -> End | None:
    """Give back all places of a job that will be in `state`, for the reason `why`, after `done` has recorded that.
    Returns None, or how it ends if its user has cancelled it meanwhile."""
    # From here on it owns no known places, and the next owner must not acquire others.
    await job.record.record_outcome(state, None, why)
    await job.cluster.end_job(job.id, keep_snapshots=True)
    return None if await done() else End(JobState.CANCELLED)


async def _newest_checkpoint(job: JobContext) -> int | None:
    """The step of the newest durable checkpoint, 0 if there is none; None if that is unknown."""
    try:
        durable = await known_checkpoints(job)
    except Exception as error:  # noqa: BLE001 - the places are given back in any case
        log.warning("the checkpoints of %s are not known: %s", job.id, error)
        return None
    saved = [step for step, path in durable.checkpoints if path not in durable.unreported]
    return saved[-1] if saved else 0
