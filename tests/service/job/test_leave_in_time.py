"""A job that is to leave has so long to save its state, and then leaves without."""

import asyncio
import time
from unittest.mock import AsyncMock

import pytest

from manta.service.job import leave
from manta.service.job.actions import End, Launch, Leave, Reacquire, Rearrange, Requeue, Watch, while_leaving
from manta.service.job.changes import Stay
from manta.service.job.context import JobContext
from manta.service.job.inbox import LEAVE, Overdue, Pause, WaitInQueue
from manta.service.job.leave import SAVE_SECONDS
from manta.service.ledger import StateEntry
from manta.service.states import JobState
from manta.service.store import checkpoints, jobs
from manta.workers.protocol.reports import Position, TrainerStatus
from tests.service.support.fake_agents import FakeAgent
from tests.service.support.virtual_time import in_virtual_time


@pytest.fixture
def seconds_until_overdue(monkeypatch):
    """How long a job that is to leave has for it, in virtual time. `before`: done then."""

    def counted(context, before=lambda: None):
        seconds = []

        async def body():
            before()
            context.inbox.put(Pause())
            began = time.monotonic()
            await leave.watch_deadline(context)
            assert context.inbox.has(Overdue)
            seconds.append(time.monotonic() - began)

        in_virtual_time(monkeypatch, body)
        return pytest.approx(seconds[0], abs=0.1)

    return counted


@pytest.mark.parametrize("for_the_queue", [False, True], ids=["pause", "for_the_queue"])
@pytest.mark.parametrize(("paused_ago", "seconds"), [(0.0, 300.0), (200.0, 100.0), (400.0, 70.0), (-50.0, 300.0)])
def test_pause_is_overdue_after_the_allowed_time_under_any_control_plane(
    store, started, cluster, seconds_until_overdue, paused_ago, seconds, for_the_queue
):
    def pause(session):
        if for_the_queue:
            jobs.transition(session, started.id, JobState.RUNNING)
        jobs.transition(session, started.id, JobState.RESIZING if for_the_queue else JobState.PAUSING)
        jobs.states_over_time(session, started.id)[-1].time -= paused_ago

    context = JobContext.of(store, cluster, started)
    if for_the_queue:
        context.inbox.put(WaitInQueue("there is none"))
    assert seconds_until_overdue(context, lambda: store.write(pause)) == seconds


@pytest.mark.parametrize(
    ("snapshots", "no_room", "save", "leaves_after"),
    [
        ("auto", "", "hangs", 84.0),
        ("auto", "", "begun_anew", None),
        ("auto", "", "none", None),
        ("off", "", "hangs", None),
        ("auto", "none", "hangs", None),
    ],
)
def test_job_waits_longest_for_a_hanging_store_if_nothing_else_would_be_left(
    store, submit, cluster, monkeypatch, seconds_until_overdue, snapshots, no_room, save, leaves_after
):
    """A save has six times what the job needs for one: 2 * 2 s, and 10 s. However long a step takes meanwhile."""
    context = JobContext.of(store, cluster, submit(checkpoint={"snapshots": snapshots, "every_steps": 1}))
    if no_room:
        context.inbox.put(WaitInQueue(no_room))

    async def under_way():
        return {"hangs": ["a"], "begun_anew": [time.monotonic() // 60], "none": []}[save]

    context.record.unfinished_saves = under_way
    monkeypatch.setattr(checkpoints, "latest_seconds", lambda session, job_id, limit: [2.0])
    assert seconds_until_overdue(context) == (leaves_after or SAVE_SECONDS)


@pytest.mark.parametrize(
    ("phase", "commits_every", "silent", "leaves_after"),
    [
        ("checkpoint", 0, False, 84.0),
        ("checkpoint", 60, False, SAVE_SECONDS),
        ("checkpoint", 0, True, SAVE_SECONDS),
        ("backward", 0, False, SAVE_SECONDS),
    ],
)
def test_job_judges_a_hanging_store_by_the_progress_of_rank_0(
    store, submit, cluster, monkeypatch, seconds_until_overdue, phase, commits_every, silent, leaves_after
):
    """It lists the store first, or deletes what is old there, and moves in between."""
    context, agent = JobContext.of(store, cluster, submit()), FakeAgent()

    def status(asked):
        commits = time.monotonic() // commits_every if commits_every else 5
        return TrainerStatus(7, record=Position(7, 1, phase, commits=commits, heartbeat=asked))

    agent.status, agent.silent, context.gang.agents = status, silent, [agent]
    monkeypatch.setattr(checkpoints, "latest_seconds", lambda session, job_id, limit: [2.0])
    assert seconds_until_overdue(context) == leaves_after


def test_pause_by_a_host_whose_clock_is_slow_has_as_long_as_any(store, started, cluster, seconds_until_overdue):
    def pause(session):
        jobs.transition(session, started.id, JobState.PAUSING)
        jobs.states_over_time(session, started.id)[-1].time -= 400.0

    context = JobContext.of(store, cluster, started)
    read = context.record.state_changes

    async def state_changes_and_a_pause():
        changes = await read()
        await store.write_async(pause)
        context.record.state_changes = read
        return changes

    context.record.state_changes = state_changes_and_a_pause
    assert seconds_until_overdue(context) == SAVE_SECONDS


def test_job_whose_time_is_up_has_as_long_to_save_as_a_paused_one(store, started, cluster, seconds_until_overdue):
    context = JobContext.of(store, cluster, started)
    store.write(lambda s: setattr(jobs.states_over_time(s, started.id)[-1], "time", 5.0))  # it started long ago
    assert seconds_until_overdue(context) == SAVE_SECONDS


@pytest.mark.parametrize("limit", [None, 1000.0])
async def test_job_paused_before_its_time_is_up_is_overdue_by_its_pause(two_replicas, cluster, monkeypatch, limit):
    monkeypatch.setattr(leave, "seconds_allowed", lambda needed: 0.0)
    job = two_replicas(cluster, **({} if limit is None else {"max_duration": limit}))
    context = JobContext.of(job.store, cluster, job.row)
    changes = [StateEntry(time.time(), JobState.QUEUED)]
    context.record.state_changes = AsyncMock(return_value=changes)
    keeping = asyncio.create_task(leave.watch_deadline(context))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not (context.inbox.has(*LEAVE) or context.inbox.has(Overdue) or keeping.done())
    context.inbox.put(Pause())
    await keeping
    assert context.inbox.has(Overdue)


LAUNCH = Launch("why", counts=True)


@pytest.mark.parametrize(
    ("action", "unlaunched", "overdue", "leaves"),
    [
        (Watch(), False, False, False),
        (Watch(), False, True, True),
        (LAUNCH, False, False, False),
        (LAUNCH, True, False, True),
        (LAUNCH, False, True, True),
        (Launch("why", counts=True, holds=1), False, False, True),
        (Reacquire(LAUNCH), False, False, False),
        (Reacquire(LAUNCH), True, False, True),
        (Reacquire(LAUNCH), False, True, True),
        (Rearrange(Stay("why")), False, True, False),
        (Requeue("why"), True, True, False),
        (End(JobState.SUCCEEDED), True, True, False),
    ],
)
def test_leaving_job_does_only_what_its_newest_state_needs(action, unlaunched, overdue, leaves):
    assert while_leaving(action, unlaunched, overdue) == (Leave() if leaves else action)
