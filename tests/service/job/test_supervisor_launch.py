"""A supervisor's job that cannot be launched, is given up, or is cancelled."""

import itertools
import time
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.placement_groups import NotPlaced
from manta.service.job.context import DEFAULT_MEMORY_SECONDS, JobContext
from manta.service.job.inbox import LEAVE, Cancel, Overdue, Pause
from manta.service.job.launch import LaunchFailed
from manta.service.job.supervisor import Supervisor
from manta.service.recovery import decisions
from manta.service.recovery.decisions import Death
from manta.service.store import jobs, pauses_and_retries
from tests.service.support.supervised_job import AGAIN, LAUNCHED, UP
from tests.service.support.waiting import reached

pytestmark = pytest.mark.usefixtures("short_waits")


def refusing(method, times):
    """What lets the first so many agents that are started fail at `method`, those of rank 1."""
    started = itertools.count()
    return lambda agent: agent.refuse(method, "broken") if next(started) < times and agent.rank == 1 else None


async def test_launch_that_fails_is_tried_again_with_other_agents(job, cluster):
    cluster.agents.on_start = refusing("snapshot_steps", job.world_size)
    await job.train(1)
    await job.finish()
    assert job.log == [
        "STARTING",
        "RECOVERING",
        "rank_lost",
        "generation_started",
        "RUNNING",
        "first_step",
        "SUCCEEDED",
    ]
    assert job.generations == [("submitted", "start", 0)]
    assert job.recoveries == []
    assert cluster.nothing_held


async def test_launch_that_always_fails_fails_the_job(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 2})
    cluster.agents.on_start = lambda agent: agent.refuse("snapshot_steps", "broken")
    await job.start()
    await job.task
    assert job.log == ["STARTING", "RECOVERING", "rank_lost", "rank_lost", "held_back", "rank_lost", "FAILED"]
    assert (job.row.reason, job.row.restarts) == ("restarts_exhausted", 0)
    assert job.row.message.startswith("could not be launched 3 times in a row; last failure: rank 0")
    assert cluster.nothing_held


async def test_launch_failures_are_counted_since_the_last_success(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 2})
    cluster.agents.on_start = refusing("snapshot_steps", 2 * job.world_size)
    await job.train(1)
    assert job.log.count("held_back") == 1
    again = itertools.count()
    cluster.agents.on_start = lambda agent: agent.refuse("snapshot_steps", "broken") if not next(again) else None
    job.ranks[0].refuse("snapshot_steps", "broken")
    job.ranks[2].die()
    await job.finish(generation=2)
    assert job.log.count("rank_lost") == 5
    assert job.log.count("held_back") == 2, "the second of either time, though there was a step in between"
    assert job.row.state == "SUCCEEDED"


async def test_agent_that_does_not_take_its_order_is_a_death_of_the_new_generation(job, cluster):
    cluster.agents.on_start = refusing("launch", job.world_size)
    await job.start()
    await job.finish(1, generation=2)
    assert job.log == [*LAUNCHED, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert job.message("rank_lost") == "rank 1 could not be launched (broken)"


async def test_silent_agents_before_a_launch_are_lost_with_those_of_a_lost_node(job, cluster):
    await job.train()
    death, lost = await job.supervisor._launch_failure(LaunchFailed({1: "it is gone", 3: "no answer"}))
    assert (death.sentence, lost) == ("rank 1 could not be launched (it is gone)", (1, 3))
    cluster.nodes.lost.add(job.supervisor._gang.nodes[1])
    _, lost = await job.supervisor._launch_failure(LaunchFailed({3: "no answer"}))
    assert lost == (0, 1, 2, 3), "all are on that node"
    cluster.nodes.lost.clear()
    await job.finish()


async def test_job_with_exhausted_restarts_fails_and_keeps_its_snapshots(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 1})
    await job.start()
    for generation in (1, 2):
        await job.watched(generation)
        await job.commit(generation)
        job.ranks[0].die()
    await job.task
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "RECOVERING", "rank_lost", "FAILED", "memory_kept"]
    assert (job.row.reason, job.row.restarts) == ("restarts_exhausted", 1)
    assert not cluster.agents.living and not cluster.groups.held, "only snapshots are kept"
    assert abs(job.row.memory_kept_until - time.time() - DEFAULT_MEMORY_SECONDS) < 60


async def test_failed_job_is_retried_from_its_last_step_with_a_new_restart_budget(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 1})

    async def fail(generation):
        await job.watched(generation)
        await job.commit(generation)
        job.ranks[0].die()

    await job.start()
    await fail(1)
    await fail(2)
    await job.task
    assert job.row.state == "FAILED"
    job.store.write(lambda s: pauses_and_retries.request_retry(s, job.id))
    assert (job.row.state, job.row.memory_kept_until, job.row.finished_at) == ("QUEUED", None, None)
    await job.start()
    await fail(3)  # which the first budget would not have allowed
    await job.finish(5, generation=4)
    assert job.row.state == "SUCCEEDED"
    assert [each[1:] for each in job.generations] == [("start", 0), ("snapshot", 1), ("snapshot", 2), ("snapshot", 3)]
    assert job.generations[2][0] == "retried by the user"
    assert job.row.restarts == 2, "a try that the user asks for is no restart"
    assert cluster.nothing_held


@pytest.mark.parametrize(("facts", "steps"), [({}, ()), ({"memory_seconds": 0.0}, (1,))])
async def test_job_that_fails_before_its_first_step_or_keeps_no_snapshots_leaves_nothing(job, cluster, facts, steps):
    job.facts = facts
    await job.train(*steps)
    job.ranks[0].fail("bad_data", 2, "one clear sentence")
    await job.task
    assert (job.row.state, job.log[-1], job.row.memory_kept_until) == ("FAILED", "FAILED", None)
    assert cluster.nothing_held


async def test_exception_recurring_at_one_step_fails_the_job_as_user_error(job):
    await job.start()
    for generation in (1, 2):
        await job.watched(generation)
        if generation == 1:
            await job.commit(1)
        job.ranks[2].fail("exception", 2, "no such column")
    await job.task
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN[:2], "rank_lost", "FAILED", "memory_kept"]
    assert (job.row.reason, job.row.restarts) == ("user_error", 1)
    assert "no such column" in job.row.message


@pytest.mark.parametrize("kind", ["no_shared_memory", "bad_data", "bad_model", "not_finite", "spike"])
async def test_failure_that_no_restart_cures_fails_the_job_at_once(job, kind):
    await job.train()
    job.ranks[0].fail(kind, 1, "one clear sentence")
    await job.task
    assert job.log == [*LAUNCHED, "FAILED"]
    assert (job.row.reason, job.row.message, job.row.restarts) == (kind, "one clear sentence", 0)


async def test_job_cancelled_while_waiting_for_places_leaves_nothing_behind(job, cluster):
    """Its snapshots would stay in the nodes' memory for as long as the control plane lives."""

    def refuse():
        job.cancel()
        raise NotPlaced("there is no room")

    await job.train(1)
    cluster.groups.refuse = refuse
    for agent in list(job.ranks):
        cluster.agents.living.pop(agent.name)
        agent.lose()
    await job.task
    assert job.log[-2:] == ["CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


async def test_job_cancelled_during_its_launch_leaves_nothing_behind(job, cluster):
    await job.start()
    await cluster.agents.until(lambda: bool(cluster.agents.living))
    job.cancel()
    await job.task
    assert job.log[0] == "STARTING" and job.log[-1] == "CANCELLED"
    assert "CANCELLING" in job.log and "rank_lost" not in job.log
    assert cluster.nothing_held


@pytest.mark.parametrize("during", ["placement", "start of its agents"])
async def test_job_cancelled_before_its_launch_gets_no_generation(job, cluster, during):
    if during == "placement":
        cluster.groups.refuse = lambda: job.store.write(lambda s: jobs.request_cancel(s, job.id))
    else:
        cluster.agents.on_start = lambda agent: job.cancel() if agent.rank == 3 else None
    await job.start()
    await job.task
    assert job.log == ["STARTING", "CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


async def test_running_job_is_cancelled(job, cluster):
    await job.train(1)
    agents = list(job.ranks)
    job.cancel()
    await job.task
    assert all(agent.stops > agent.closes for agent in agents), "trainers end before their places are given back"
    assert job.log == [*UP, "CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


@pytest.mark.parametrize("leave", ["cancel", "pause"])
async def test_cancel_or_pause_ends_the_wait_before_the_next_try(job, cluster, monkeypatch, leave):
    monkeypatch.setattr(decisions, "INITIAL_WAIT_SECONDS", 1000.0)
    monkeypatch.setattr(decisions, "MAX_WAIT_SECONDS", 1000.0)

    async def held_back():
        await reached(lambda: "held_back" in job.log)

    await job.train()
    job.ranks[0].die()
    await job.watched(2)
    job.ranks[0].die()
    await held_back()
    if leave == "pause":
        job.pause()
        await job.watched(3)  # so that its newest state can be saved
    job.cancel()
    await job.task
    assert job.log[-2:] == ["CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


async def test_backoff_of_a_leaving_job_ends_when_its_time_to_leave_is_over(store, submit, cluster):
    context, waits = JobContext.of(store, cluster, submit()), []
    supervisor = Supervisor(context)
    context.inbox.wait = AsyncMock(side_effect=lambda *kinds, seconds: waits.append((seconds, *kinds)))
    await supervisor._wait_before_generation(2.0, Death(0, "killed"))
    supervisor.tell(Pause())
    await supervisor._wait_before_generation(4.0, Death(0, "killed"))
    assert waits == [(2.0, Cancel, *LEAVE), (4.0, Cancel, Overdue)]
