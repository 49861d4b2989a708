"""A job that may hold places always has somebody who looks after it, whatever fails."""

import asyncio
import contextlib
from unittest.mock import AsyncMock

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.job import launch, resize_and_drain, resume
from manta.service.job import owner as owning
from manta.service.job.context import JobContext
from manta.service.job.inbox import Cancel, NodeDraining, Pause, Resize
from manta.service.job.owner import JobOwner
from manta.service.job.record import JobRecord
from manta.service.job.resize_and_drain import ElasticityPlanner
from manta.service.job.supervisor import Supervisor
from manta.service.leases.decisions import LeaseLost, LeaseUncertain
from manta.service.recovery import durable_state
from manta.service.states import JobState
from manta.service.store import database, jobs, pauses_and_retries
from manta.service.store.tables import Event
from manta.workers.protocol.messages import ProtocolMismatch
from tests.service.support.virtual_time import in_virtual_time
from tests.service.support.waiting import reached


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(owning, "INITIAL_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(database, "INITIAL_BACKOFF_SECONDS", 0.001)


@pytest.fixture
def owned(two_replicas, cluster, monkeypatch):
    """A job of four ranks whose supervisors come from an owner."""
    job = two_replicas(cluster)

    def supervise(scheduled_generation):
        job.owner = JobOwner(job.store, cluster, job.id)
        job.task = asyncio.create_task(job.owner.run(scheduled_generation))
        job.task.add_done_callback(lambda task: cluster.agents.changed())

    attend = Supervisor._observe

    def attended(self, running):
        attend(self, running)
        job.supervisor = self
        cluster.agents.changed()

    monkeypatch.setattr(Supervisor, "_observe", attended)
    job.supervise = supervise
    job.supervisor = Supervisor(JobContext.of(job.store, cluster, job.row))
    return job


def raises(monkeypatch, name, *errors):
    """The supervisor's method `name` raises these, one after the other, before it does what it does."""
    method, left = getattr(Supervisor, name), list(errors)

    async def broken(self, *arguments):
        if left:
            raise left.pop(0)
        return await method(self, *arguments)

    monkeypatch.setattr(Supervisor, name, broken)


@pytest.mark.parametrize("where", ["_first", "_start", "_launch", "_watch", "_recover", "_end"])
async def test_supervision_error_ends_no_job(owned, monkeypatch, where):
    errors = [RuntimeError("nobody expected this"), KeyError("nor this")][: 1 if where == "_start" else 2]
    raises(monkeypatch, where, *errors)
    await owned.train(3)
    owned.ranks[1].die()
    await owned.finish(4, generation=2)
    assert owned.row.state == "SUCCEEDED"
    assert owned.log.count("supervision_failed") == len(errors)
    assert f"up again after an error: {type(errors[-1]).__name__}" in owned.message("supervision_failed")
    assert owned.generations[-1][1:] == ("snapshot", 3), "nothing is begun anew"
    assert owned.cluster.nothing_held


async def test_repeated_supervision_error_is_reported_once(owned, monkeypatch):
    raises(monkeypatch, "_start", *[RuntimeError("again")] * 5)
    raises(monkeypatch, "_adopt", *[RuntimeError("again")] * 5)
    await owned.train(1)
    await owned.finish()
    assert owned.log.count("supervision_failed") == 1


async def test_cancel_ends_the_retry_pause_after_a_supervision_error(owned, monkeypatch):
    monkeypatch.setattr(owning, "INITIAL_BACKOFF_SECONDS", 1000.0)
    monkeypatch.setattr(owning, "MAX_BACKOFF_SECONDS", 1000.0)
    raises(monkeypatch, "_launch", RuntimeError("nobody expected this"))
    await owned.start()
    await reached(lambda: "supervision_failed" in owned.log)
    owned.store.write(lambda s: jobs.request_cancel(s, owned.id))
    owned.owner.tell(Cancel())  # once, and perhaps before the pause has begun
    await owned.task
    assert owned.row.state == "CANCELLED"
    assert owned.cluster.nothing_held


@pytest.mark.parametrize("wish", [Resize(), NodeDraining("one", 60.0)])
async def test_resize_or_drain_requested_between_supervisors_is_made_later(owned, cluster, monkeypatch, wish):
    monkeypatch.setattr(resize_and_drain, "ROOM_SECONDS", 1000.0)  # it does not look by itself
    job, wanted = owned, asyncio.Event()

    async def plan(self, running):
        self._job.inbox.remove(Resize)
        wanted.set()

    await job.train(1)
    await job.die_with_control_plane()
    monkeypatch.setattr(ElasticityPlanner, "plan", plan)
    owner = job.owner = JobOwner(job.store, cluster, job.id)
    owner.tell(wish)
    job.task = asyncio.create_task(owner.run(None))
    await wanted.wait()
    await job.finish()


def write_spec_of_another_release(owned):
    """The stored spec has a key that its user wrote and this release does not know."""
    understood = dict(owned.row.spec)
    owned.store.write(lambda s: setattr(jobs.get(s, owned.id), "spec", {**understood, "newer": 1}))
    owned.store.write(lambda s: setattr(jobs.get(s, owned.id), "submitted", {"newer": 1}))


def other_release(agent):
    """The agent describes itself as one of another release."""
    agent.describe = AsyncMock(side_effect=ProtocolMismatch("the agent", 1))


@pytest.mark.parametrize("what", ["spec", "agents"])
async def test_job_with_a_spec_or_agents_of_another_release_trains_on_until_cancelled(owned, cluster, what):
    await owned.train(1)
    await owned.die_with_control_plane()
    if what == "spec":
        write_spec_of_another_release(owned)
    else:
        for agent in cluster.agents.living.values():
            other_release(agent)
    owned.supervise(None)
    await reached(lambda: "not_understood" in owned.log)
    assert all(agent.running for agent in cluster.agents.living.values()) and owned.row.state == "RUNNING"
    owned.store.write(lambda s: jobs.request_cancel(s, owned.id))
    owned.owner.tell(Cancel())
    await owned.task
    assert (owned.log.count("not_understood"), owned.row.state) == (1, "CANCELLED")
    assert cluster.nothing_held


async def test_job_with_agents_of_another_release_trains_on_until_that_release_returns(owned, cluster):
    await owned.train(1)
    await owned.die_with_control_plane()
    agents = list(cluster.agents.living.values())
    for agent in agents:
        other_release(agent)
    owned.supervise(None)
    await reached(lambda: "not_understood" in owned.log)
    await asyncio.sleep(0.05)  # it is tried again
    assert owned.row.state == "RUNNING" and all(agent.running for agent in agents)
    assert not owned.task.done() and len(cluster.groups.held) == 2
    for agent in agents:
        del agent.describe
    await owned.watched(1)
    assert all(len(agent.orders) == 1 and agent.stops == 0 for agent in agents)
    await owned.finish(2)
    assert owned.log.count("not_understood") == 1 and "supervision_failed" not in owned.log
    assert "the agent speaks protocol 1 and this process 2: " in owned.message("not_understood")
    assert (owned.row.state, owned.row.generation, owned.row.restarts) == ("SUCCEEDED", 1, 0)


async def test_key_of_a_newer_release_that_had_its_default_is_done_without(owned):
    newer = {**owned.row.spec, "newer": 1, "recovery": {**owned.row.spec["recovery"], "newer": True}}
    owned.store.write(lambda s: setattr(jobs.get(s, owned.id), "spec", newer))
    await owned.train(1)
    await owned.finish()
    assert owned.log.count("keys_left_out") == 1 and "not_understood" not in owned.log
    assert "does not know newer, recovery.newer of the spec" in owned.message("keys_left_out")
    decided = {**newer, "resources": {**newer["resources"], "threads": 1}}
    assert owned.row.spec == decided, "for the release that knows them"
    assert owned.row.state == "SUCCEEDED"


async def test_job_with_a_spec_of_another_release_is_paused_with_its_snapshots(owned, cluster):
    await owned.train(1)
    await owned.die_with_control_plane()
    write_spec_of_another_release(owned)
    owned.store.write(lambda s: pauses_and_retries.request_pause(s, owned.id))
    owned.supervise(None)
    await owned.task
    assert owned.row.state == "PAUSED"
    assert not cluster.agents.living and not cluster.groups.held
    assert all(cluster.agents.memory["one"].values())


def test_owner_of_a_paused_job_returns_at_once(store, submit, cluster):
    job = submit()
    store.write(lambda s: pauses_and_retries.request_pause(s, job.id))
    asyncio.run(JobOwner(store, cluster, job.id).run(None))


def test_owner_of_a_final_job_returns_at_once(store, started, cluster):
    store.write(lambda s: jobs.transition(s, started.id, JobState.FAILED))
    asyncio.run(JobOwner(store, cluster, started.id).run(None))
    with store.read() as session:
        assert jobs.get(session, started.id).state == "FAILED"


@contextlib.contextmanager
def database_gone(store, monkeypatch):
    """No operation is taken; the number that were refused."""
    refused = []
    write = type(store).write_async

    async def refuse(self, operation):
        refused.append(operation)
        raise OperationalError("BEGIN IMMEDIATE", {}, Exception("database is locked"))

    monkeypatch.setattr(type(store), "write_async", refuse)
    try:
        yield refused
    finally:
        monkeypatch.setattr(type(store), "write_async", write)


async def test_locked_database_stops_no_trainer_and_loses_no_report(owned, cluster, monkeypatch):
    await owned.train(1)
    with database_gone(owned.store, monkeypatch) as refused:
        owned.ranks[0].commit(2)
        owned.ranks[1].die()
        while len(refused) < 20:
            await asyncio.sleep(0.001)
        assert [agent.running for agent in owned.ranks] == [True, False, True, True]
    await owned.finish(3, generation=2)
    assert owned.row.state == "SUCCEEDED"
    assert owned.log.count("rank_lost") == 1
    assert "supervision_failed" not in owned.log


def test_slow_database_does_not_fail_a_launch(owned, monkeypatch):
    """What agents may take is limited; what the database takes says nothing about them."""
    begin, generations = JobRecord.begin, JobRecord.generations

    async def slow_begin(self, *arguments):
        await asyncio.sleep(2 * launch.LAUNCH_SECONDS)
        return await begin(self, *arguments)

    async def slow_generations(self):
        await asyncio.sleep(2 * resume.MEMORY_SECONDS)
        return await generations(self)

    monkeypatch.setattr(JobRecord, "begin", slow_begin)
    monkeypatch.setattr(JobRecord, "generations", slow_generations)

    async def body():
        await owned.train(1)
        await owned.finish()

    in_virtual_time(monkeypatch, body)
    assert owned.log == ["STARTING", "generation_started", "RUNNING", "first_step", "SUCCEEDED"]


async def test_ray_that_does_not_answer_during_a_launch_costs_no_agent(owned, cluster, monkeypatch):
    monkeypatch.setattr(durable_state, "INITIAL_HOLD_SECONDS", 0.001)
    ensure, left = cluster.daemons.ensure, [ClusterUnavailable(TimeoutError("no answer"))] * 3

    async def silent(*arguments):
        if left and owned.row.generation == 1:
            raise left.pop()
        return await ensure(*arguments)

    monkeypatch.setattr(cluster.daemons, "ensure", silent)
    await owned.train(1)
    agents = list(owned.ranks)
    owned.ranks[1].die()
    await owned.watched(2)
    assert owned.ranks == agents
    await owned.finish(2)
    assert owned.row.state == "SUCCEEDED"
    assert left == []
    assert owned.log.count("held") == 1 and "Ray refused a request (no answer)" in owned.message("held")
    assert owned.row.restarts == 1


@pytest.fixture
def tried(store, submit, cluster, monkeypatch):
    """Has the owner of a job try with these outcomes, each an error or an answer; what each try was asked with and the
    seconds between them."""

    def run(*outcomes, lived=0.0, scheduled_generation=7):
        owner, left, asked, paused = JobOwner(store, cluster, submit().id), list(outcomes), [], []
        monkeypatch.setattr(owning, "INITIAL_BACKOFF_SECONDS", 0.5)

        async def supervise(placed):
            asked.append(placed)
            outcome = left.pop(0)
            now[0] += lived[len(asked) - 1] if isinstance(lived, list) else lived
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        now = [100.0]
        monkeypatch.setattr(owner, "_supervise", supervise)
        monkeypatch.setattr(owner, "_pause", AsyncMock(side_effect=paused.append))
        monkeypatch.setattr(owning.time, "monotonic", lambda: now[0])
        asyncio.run(owner.run(scheduled_generation))
        return asked, paused

    return run


def log_of(store):
    return store.query(lambda session: list(session.scalars(select(Event.type))))


AGAIN = RuntimeError("again")


@pytest.mark.parametrize(
    ("outcomes", "lived", "pauses", "failed"),
    [
        ([AGAIN] * 8, 0.0, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], True),
        ([AGAIN] * 4, [0.0, 60.0, 61.0, 0.0, 0.0], [0.5, 1.0, 0.5, 1.0], True),  # one that lived a minute begins anew
        ([False, False], 0.0, [0.5, 1.0], False),  # nobody supervises it yet
        ([LeaseUncertain("job_1")], 0.0, [0.5], False),
    ],
)
def test_supervisor_retry_pauses_are_capped_and_only_the_first_try_has_queue_places(
    tried, store, outcomes, lived, pauses, failed
):
    assert tried(*outcomes, True, lived=lived) == ([7] + [None] * len(outcomes), pauses)
    assert ("supervision_failed" in log_of(store)) is failed


def test_job_leased_by_another_control_plane_is_released(tried, store):
    with pytest.raises(LeaseLost):
        tried(LeaseLost("job_1"))
    assert "supervision_failed" not in log_of(store)


@pytest.mark.parametrize("wish", [Cancel(), Pause()])
async def test_cancel_or_pause_ends_the_current_wait_of_an_owner_only(store, submit, cluster, wish):
    owner = JobOwner(store, cluster, submit().id)
    owner.tell(wish)
    async with asyncio.timeout(10):
        await owner._pause(1000.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await owner._pause(1000.0)


def test_snapshots_of_a_job_that_fails_are_kept_for_as_long_as_its_owner_says(store, started, cluster, monkeypatch):
    made = []

    class Noted(Supervisor):
        def __init__(self, job):
            super().__init__(job)
            made.append((job.id, job.memory_seconds))

        async def run(self, scheduled_generation):
            made.append(scheduled_generation)

        async def settled(self):
            pass

    monkeypatch.setattr(owning, "Supervisor", Noted)
    owner = JobOwner(store, cluster, started.id, 123.0)
    asyncio.run(owner.run(3))
    assert made == [(started.id, 123.0), 3]
