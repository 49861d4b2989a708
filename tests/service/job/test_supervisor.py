"""A supervisor takes its job to an end whatever dies: what is written, in which order, and what is left."""

import asyncio
import itertools
import time

import pytest

from service.faults import FaultNotPossible
from service.job import supervisor
from service.job.context import DEFAULT_MEMORY_SECONDS
from service.recovery import budgets
from service.store import failed_jobs, jobs
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.supervised_job import story
from tests.service.support.waiting import reached
from workers.protocol.messages import Fault

LAUNCHED = ["STARTING", "generation_started"]
UP = [*LAUNCHED, "RUNNING", "first_step"]
AGAIN = ["generation_started", "ranks_replaced", "RUNNING", "first_step", "recovered"]
"""What a recovery ends with in which some rank keeps its process."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Repairs that do not help wait a millisecond before the next."""
    monkeypatch.setattr(budgets, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(budgets, "LONGEST_WAIT_SECONDS", 0.001)


def refusing(method, times):
    """What lets the first so many agents that are started fail at `method`, those of rank 1."""
    started = itertools.count()
    return lambda agent: agent.refuse(method, "broken") if next(started) < times and agent.rank == 1 else None


def test_undisturbed_job_is_launched_once_and_leaves_nothing(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        assert job.rank_states == ["running"] * 4
        assert [agent.orders[0].rank for agent in job.ranks] == [0, 1, 2, 3]
        assert {agent.orders[0].store_port for agent in job.ranks} == {4000}
        await job.commit(1, 2)
        assert job.row.state == "RUNNING"
        await job.finish()
        assert len(asyncio.all_tasks()) == 1, "only this one: nobody looks for room for a job that is over"

    story(body)
    assert job.log == [*UP, "SUCCEEDED"]
    assert job.generations == [("submitted", "start", 0)]
    assert (job.row.restarts, job.row.step, job.rank_states) == (0, 10, ["exited"] * 4)
    assert cluster.nothing_held


def test_job_ends_as_it_has_though_its_checkpoints_cannot_be_looked_at(two_replicas, cluster, monkeypatch):
    async def unreadable(_job):
        raise OSError("the folder is away")

    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        monkeypatch.setattr(supervisor, "known_checkpoints", unreadable)
        await job.finish()

    story(body)
    assert job.row.state == "SUCCEEDED" and cluster.nothing_held


def test_fault_that_an_agent_does_not_take_is_refused(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        job.ranks[1].refuse("arm", "broken")
        with pytest.raises(FaultNotPossible, match="agent of rank 1 does not answer; try again"):
            await job.supervisor.inject(Fault("fault_1", "kill", 1))
        await job.die_with_control_plane()

    story(body)


def test_job_that_is_let_go_of_leaves_no_task_behind(two_replicas, cluster):
    job = two_replicas(cluster, max_duration=1000.0)

    async def body():
        await job.start()
        await job.watched(1)
        await job.die_with_control_plane()
        await reached(lambda: len(asyncio.all_tasks()) == 1)

    story(body)
    assert not cluster.nothing_held, "it trains on"


def test_killed_rank_gets_a_new_process_and_the_others_keep_theirs(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1, 2, 3)
        first = list(job.ranks)
        job.ranks[1].die()
        await job.watched(2)
        assert job.ranks == first, "agents outlive their trainers"
        assert all(agent.orders[-1].resume.step == 3 for agent in first)
        await job.commit(4)
        await job.finish()

    story(body)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    ((_, *first), (cause, *second)) = job.generations
    assert (first, second) == (["start", 0], ["snapshot", 3])
    assert cause.startswith("rank 1 was killed by SIGKILL")
    assert job.recoveries == [(2, "killed", "memory and snapshot", 3)]
    assert (job.row.restarts, job.row.step) == (1, 10)
    assert cluster.nothing_held


def test_two_ranks_that_die_together_are_one_recovery(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        job.ranks[3].die()
        job.ranks[1].die()
        await job.watched(2)
        await job.commit(2)
        await job.finish()

    story(body)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert job.row.restarts == 1


def test_death_while_the_generation_starts_is_another_recovery(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        job.ranks[0].die()
        await job.watched(2)
        job.ranks[0].die()
        await job.watched(3)
        await job.commit(2)
        await job.finish()

    story(body)
    second = ["generation_started", "ranks_replaced", "rank_lost", "held_back", *AGAIN, "SUCCEEDED"]
    assert job.log == [*UP, "RECOVERING", "rank_lost", *second]
    assert job.row.restarts == 2


def test_rank_that_lost_a_peer_is_not_the_culprit(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        job.ranks[0].rest_by_itself(1)
        job.ranks[2].die()
        await job.watched(2)
        await job.commit(2)
        await job.finish()

    story(body)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert "rank 2 was killed" in job.message("rank_lost")
    (lost,) = [event.data for event in job.events if event.type == "rank_lost"]
    assert lost["node"] == job.ranks[2].node, "so that a node where ranks keep failing can be left out"


def test_lost_agent_is_replaced_in_its_own_place(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        before = list(job.ranks)
        job.ranks[2].lose()
        await job.watched(2)
        assert [old is new for old, new in zip(before, job.ranks, strict=True)] == [True, True, False, True]
        assert job.ranks[2].description.group == before[2].description.group
        await job.commit(2)
        await job.finish()

    story(body)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert job.recoveries == [(2, "agent_lost", "memory and snapshot", 1)]
    assert cluster.nothing_held


def test_replica_on_a_lost_node_goes_on_elsewhere_with_its_peers_state(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2, three=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "data": 2, "zero": 0})

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        assert [agent.node for agent in job.ranks] == ["one", "one", "two", "two"]
        cluster.lose_node("two")
        job.supervisor.node_lost("two", "it does not answer")
        await job.watched(2)
        assert [agent.node for agent in job.ranks] == ["one", "one", "three", "three"]
        await job.commit(2)
        await job.finish()

    story(body)
    assert sorted(job.log[4:7]) == ["RECOVERING", "node_lost", "rank_lost"]
    assert job.log[7:] == [*AGAIN, "SUCCEEDED"]
    assert job.recoveries == [(2, "agent_lost", "memory and peer", 1)]
    assert job.message("node_lost") == "node two is lost (it does not answer), and with it 2 of 4 ranks"
    assert cluster.nothing_held


def test_elastic_job_goes_on_without_the_replica_that_has_no_place_any_more(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "data": 2, "zero": 0}, elastic={"min_data": 1, "max_data": 2})

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        cluster.lose_node("one")
        job.supervisor.node_lost("one", "gone")
        await job.watched(2)
        assert [(agent.node, agent.rank) for agent in job.ranks] == [("two", 0), ("two", 1)]
        await job.commit(2)
        await job.finish()

    story(body)
    assert job.log[7:] == ["shrunk", "generation_started", *AGAIN[1:], "SUCCEEDED"]
    assert job.generations[1][1:] == ("memory", 1), "the state of another layout, in shared memory"
    assert job.row.replicas == 1
    assert cluster.nothing_held


def test_job_without_any_place_waits_in_the_queue_and_goes_on_from_what_it_left(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "data": 2, "zero": 0})

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        cluster.lose_node("two")
        job.supervisor.node_lost("two", "gone")
        await job.task
        assert (job.row.state, job.row.reason) == ("QUEUED", "insufficient_slots")
        assert not cluster.agents.living and not cluster.groups.held
        assert job.rank_states == ["exited"] * 4
        cluster.nodes.slots["three"], cluster.nodes.used["three"] = 2, 0
        await job.start()
        await job.watched(2)
        await job.commit(2)
        await job.finish()

    story(body)
    assert sorted(job.log[4:7]) == ["RECOVERING", "node_lost", "rank_lost"]
    assert job.log[7:] == ["QUEUED", *UP, "SUCCEEDED"]
    assert job.generations[1] == ("placed again", "snapshot", 1)
    assert cluster.nothing_held


def test_launch_that_fails_is_tried_again_with_other_agents(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        cluster.agents.on_start = refusing("snapshot_steps", job.world_size)
        await job.start()
        await job.watched(1)
        await job.commit(1)
        await job.finish()

    story(body)
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


def test_launch_that_always_fails_is_given_up(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 2})

    async def body():
        cluster.agents.on_start = lambda agent: agent.refuse("snapshot_steps", "broken")
        await job.start()
        await job.task

    story(body)
    assert job.log == ["STARTING", "RECOVERING", "rank_lost", "rank_lost", "held_back", "rank_lost", "FAILED"]
    assert (job.row.reason, job.row.restarts) == ("restarts_exhausted", 0)
    assert job.row.message.startswith("could not be launched 3 times in a row; last: rank 0")
    assert cluster.nothing_held


def test_launch_that_fails_counts_from_the_last_one_that_did_not(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 2})

    async def body():
        cluster.agents.on_start = refusing("snapshot_steps", 2 * job.world_size)
        await job.start()
        await job.watched(1)
        await job.commit(1)
        job.ranks[0].refuse("snapshot_steps", "broken")
        job.ranks[2].die()
        await job.watched(2)
        await job.finish()

    story(body)
    assert job.log.count("rank_lost") == 4
    assert job.row.state == "SUCCEEDED"


def test_agent_that_does_not_take_its_order_is_a_death_of_the_new_generation(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        cluster.agents.on_start = refusing("launch", job.world_size)
        await job.start()
        await job.watched(2)
        await job.commit(1)
        await job.finish()

    story(body)
    assert job.log == [*LAUNCHED, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert job.message("rank_lost") == "rank 1 could not be launched (broken)"


def test_restarts_are_exhausted(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 1})

    async def body():
        await job.start()
        for generation in (1, 2):
            await job.watched(generation)
            await job.commit(generation)
            job.ranks[0].die()
        await job.task

    story(body)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "RECOVERING", "rank_lost", "FAILED", "memory_kept"]
    assert (job.row.reason, job.row.restarts) == ("restarts_exhausted", 1)
    assert not cluster.agents.living and not cluster.groups.held, "only snapshots are kept"
    assert abs(job.row.memory_kept_until - time.time() - DEFAULT_MEMORY_SECONDS) < 60


def test_failed_job_is_tried_again_from_where_it_failed_with_a_new_budget(two_replicas, cluster):
    job = two_replicas(cluster, recovery={"max_restarts": 1})

    async def fail(generation):
        await job.watched(generation)
        await job.commit(generation)
        job.ranks[0].die()

    async def body():
        await job.start()
        await fail(1)
        await fail(2)
        await job.task
        assert job.row.state == "FAILED"
        job.store.write(lambda s: failed_jobs.request_retry(s, job.id))
        assert (job.row.state, job.row.memory_kept_until, job.row.finished_at) == ("QUEUED", None, None)
        await job.start()
        await fail(3)  # which the first budget would not have allowed
        await job.watched(4)
        await job.commit(5)
        await job.finish()

    story(body)
    assert job.row.state == "SUCCEEDED"
    assert [each[1:] for each in job.generations] == [("start", 0), ("snapshot", 1), ("snapshot", 2), ("snapshot", 3)]
    assert job.generations[2][0] == "tried again by the user"
    assert job.row.restarts == 2, "a try that the user asks for is no restart"
    assert cluster.nothing_held


def test_job_that_fails_before_its_first_step_leaves_nothing(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        job.ranks[0].fail("bad_data", 1, "one clear sentence")
        await job.task

    story(body)
    assert (job.row.state, job.row.memory_kept_until) == ("FAILED", None)
    assert cluster.nothing_held


def test_job_fails_without_snapshots_where_none_are_to_be_kept(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        job.supervisor._job.memory_seconds = 0.0
        await job.watched(1)
        await job.commit(1)
        job.ranks[0].fail("bad_data", 2, "one clear sentence")
        await job.task

    story(body)
    assert (job.log[-1], job.row.memory_kept_until) == ("FAILED", None)
    assert cluster.nothing_held


def test_exception_that_comes_again_at_the_same_step_is_the_users(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        for generation in (1, 2):
            await job.watched(generation)
            if generation == 1:
                await job.commit(1)
            job.ranks[2].fail("exception", 2, "no such column")
        await job.task

    story(body)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN[:2], "rank_lost", "FAILED", "memory_kept"]
    assert (job.row.reason, job.row.restarts) == ("user_error", 1)
    assert "no such column" in job.row.message


@pytest.mark.parametrize("kind", ["no_shared_memory", "bad_data", "not_finite", "spike"])
def test_what_no_restart_can_cure_is_not_restarted(two_replicas, cluster, kind):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        job.ranks[0].fail(kind, 1, "one clear sentence")
        await job.task

    story(body)
    assert job.log == [*LAUNCHED, "RECOVERING", "rank_lost", "FAILED"]
    assert (job.row.reason, job.row.message) == (kind, "one clear sentence")


def test_job_cancelled_while_it_was_placed_is_ended_without_a_launch(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        cluster.groups.refuse = lambda: job.store.write(lambda s: jobs.request_cancel(s, job.id))
        await job.start()
        await job.task

    story(body)
    assert job.log == ["STARTING", "CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


def test_job_cancelled_while_it_is_launched(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await cluster.agents.until(lambda: bool(cluster.agents.living))
        job.cancel()
        await job.task

    story(body)
    assert job.log[0] == "STARTING" and job.log[-1] == "CANCELLED"
    assert "CANCELLING" in job.log and "rank_lost" not in job.log
    assert cluster.nothing_held


def test_job_cancelled_before_its_launch_gets_no_generation(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        cluster.agents.on_start = lambda agent: job.cancel() if agent.rank == 3 else None
        await job.start()
        await job.task

    story(body)
    assert job.log == ["STARTING", "CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


def test_running_job_is_cancelled(two_replicas, cluster):
    job = two_replicas(cluster)

    async def body():
        await job.start()
        await job.watched(1)
        await job.commit(1)
        agents = list(job.ranks)
        job.cancel()
        await job.task
        assert all(agent.stops > agent.closes for agent in agents), "trainers end before their places are given back"

    story(body)
    assert job.log == [*UP, "CANCELLING", "CANCELLED"]
    assert cluster.nothing_held


def test_cancel_ends_the_wait_before_the_next_try(two_replicas, cluster, monkeypatch):
    job = two_replicas(cluster)
    monkeypatch.setattr(budgets, "FIRST_WAIT_SECONDS", 1000.0)
    monkeypatch.setattr(budgets, "LONGEST_WAIT_SECONDS", 1000.0)

    async def held_back():
        await reached(lambda: "held_back" in job.log)

    async def body():
        await job.start()
        await job.watched(1)
        job.ranks[0].die()
        await job.watched(2)
        job.ranks[0].die()
        await held_back()
        job.cancel()
        await job.task

    story(body)
    assert job.log[-3:] == ["held_back", "CANCELLING", "CANCELLED"]
    assert cluster.nothing_held
