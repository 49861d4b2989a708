"""What everything that acts for a job shares: its wanted replicas, the failures that count against it, its inbox."""

import asyncio
from types import SimpleNamespace

import pytest

from manta.service.job.context import JobContext
from manta.service.job.inbox import LEAVE, Cancel, Inbox, Resize, Trace, WaitInQueue
from manta.service.recovery.decisions import Death, FailureHistory, Incident, PastFailure
from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.store import jobs
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.virtual_time import in_virtual_time

ELASTIC = {"parallel": {"tensor": 2, "data": 2}, "elastic": {"min_data": 1, "max_data": 4, "reshape": True}}


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path, one=8)


def life(number, failure=None):
    """Generation `number`, which began at as many seconds, after a failure a moment before."""
    data = {"failure": None if failure is None else {"kind": failure, "at": number - 0.5}}
    return SimpleNamespace(started_at=float(number), first_step_at=number + 0.1, resume_step=0, data=data)


def at(*failures):
    return [(failure.kind, failure.at) for failure in failures]


LIVES = [life(1), life(2, "killed"), life(3, "hung"), life(4), life(5, "exception")]


def test_job_failures_list_those_of_generations_then_of_launches():
    history = FailureHistory(0.0)
    assert at(*history.failures(LIVES)) == [("killed", 1.5), ("hung", 2.5), ("exception", 4.5)]
    history.failed_launches.append(PastFailure("agent_lost", 6.0))
    assert at(*history.failures(LIVES))[-2:] == [("exception", 4.5), ("agent_lost", 6.0)]


def test_cause_of_a_failed_launch_counts_once_among_failures():
    history = FailureHistory(0.0)
    killed = PastFailure("killed", 6.0)
    incident = Incident(Death(0, "killed"), killed, RecoveryTimeline(6.0))
    assert at(*history.failures(LIVES, incident))[-1] == ("killed", 6.0)
    history.failed_launches.append(PastFailure("agent_lost", 7.0))
    assert at(*history.failures(LIVES, incident))[-2:] == [("killed", 6.0), ("agent_lost", 7.0)], "the newest is last"
    history.failed_launches = [killed]
    assert at(*history.failures(LIVES, incident))[-2:] == [("exception", 4.5), ("killed", 6.0)]


def test_failures_before_a_retry_by_the_user_are_not_counted(store, cluster, submit):
    job = submit()
    store.write(lambda s: setattr(jobs.get(s, job.id), "retried_at", 2.9))
    context = store.query(lambda session: JobContext.of(store, cluster, jobs.get(session, job.id), memory_seconds=7.0))
    assert at(*context.history.failures(LIVES)) == [("exception", 4.5)]
    assert (context.history.retried_at, context.memory_seconds) == (2.9, 7.0)


def test_wanted_replicas_follow_the_last_resize_request(store, cluster, submit):
    job = submit(**ELASTIC)
    context = JobContext.of(store, cluster, job)
    assert asyncio.run(context.wanted_replicas()) == 2
    store.write(lambda s: jobs.request_resize(s, job.id, 4))
    assert asyncio.run(context.wanted_replicas()) == 4


def test_gang_uses_the_stored_layout_rather_than_the_submitted_one(store, cluster, submit):
    job = submit(**ELASTIC)
    smaller = JobContext.of(store, cluster, job).submitted.layout.model_copy(update={"tensor": 1, "data": 3})
    store.write(lambda s: jobs.set_layout(s, job.id, smaller))
    context = store.query(lambda session: JobContext.of(store, cluster, jobs.get(session, job.id)))
    assert (context.gang.layout.tensor, context.gang.layout.data) == (1, 3)
    assert (context.submitted.layout.tensor, context.submitted.layout.data) == (2, 2)


def test_inbox_ends_the_waits_for_a_class_of_notes_and_keeps_the_newest(monkeypatch):
    async def body():
        inbox, ended = Inbox(), []

        async def wait(name, *kinds, seconds=None):
            await inbox.wait(*kinds, seconds=seconds)
            ended.append((name, asyncio.get_running_loop().time() - began))

        began = asyncio.get_running_loop().time()
        waits = [wait("cancel", Cancel), wait("leave", Cancel, *LEAVE), wait("briefly", Trace, seconds=3.0)]
        async with asyncio.TaskGroup() as tasks:
            for each in waits:
                tasks.create_task(each)
            await asyncio.sleep(1.0)
            inbox.put(WaitInQueue("first"))
            inbox.put(WaitInQueue("then"))
            await asyncio.sleep(4.0)
            inbox.put(Cancel())
        assert [(name, round(at)) for name, at in ended] == [("leave", 1), ("briefly", 3), ("cancel", 5)]
        assert (inbox.no_room, inbox.has(Resize), inbox.has(Resize, Cancel)) == ("then", False, True)
        inbox.remove(WaitInQueue)
        assert (inbox.no_room, inbox.has(*LEAVE)) == ("", False)

    in_virtual_time(monkeypatch, body)
