"""A supervisor takes its job to an end whatever dies: what is written, in which order, and what is left."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from manta.service.job import supervisor
from manta.service.job.inbox import NodeLost
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.supervised_job import AGAIN, UP
from tests.service.support.waiting import reached

pytestmark = pytest.mark.usefixtures("short_waits")


async def test_undisturbed_job_is_launched_once_and_leaves_nothing_behind(job, cluster):
    await job.train()
    assert job.rank_states == ["running"] * 4
    assert [agent.orders[0].rank for agent in job.ranks] == [0, 1, 2, 3]
    assert {agent.orders[0].store_port for agent in job.ranks} == {4000}
    await job.commit(1, 2)
    assert job.row.state == "RUNNING"
    await job.finish()
    assert len(asyncio.all_tasks()) == 1, "only this one: nobody looks for room for a job that is over"
    assert job.log == [*UP, "SUCCEEDED"]
    assert job.generations == [("submitted", "start", 0)]
    assert (job.row.restarts, job.row.step, job.rank_states) == (0, 10, ["exited"] * 4)
    assert cluster.nothing_held


async def test_job_succeeds_although_its_checkpoints_cannot_be_listed(job, cluster, monkeypatch):
    await job.train(1)
    monkeypatch.setattr(supervisor, "known_checkpoints", AsyncMock(side_effect=OSError("the folder is away")))
    await job.finish()
    assert job.row.state == "SUCCEEDED" and cluster.nothing_held


async def test_supervisor_that_releases_a_running_job_leaves_no_task(two_replicas, cluster):
    job = two_replicas(cluster, max_duration=1000.0)
    await job.train()
    await job.die_with_control_plane()
    await reached(lambda: len(asyncio.all_tasks()) == 1)
    assert not cluster.nothing_held, "it trains on"


async def test_killed_rank_gets_a_new_process_and_the_others_keep_theirs(job, cluster):
    await job.train(1, 2, 3)
    first = list(job.ranks)
    job.ranks[1].die()
    await job.watched(2)
    assert job.ranks == first, "agents outlive their trainers"
    assert all(agent.orders[-1].resume.step == 3 for agent in first)
    await job.finish(4)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    ((_, *first), (cause, *second)) = job.generations
    assert (first, second) == (["start", 0], ["snapshot", 3])
    assert cause.startswith("rank 1 was killed (SIGKILL")
    assert job.recoveries == [(2, "killed", "memory and snapshot", 3)]
    assert (job.row.restarts, job.row.step) == (1, 10)
    assert cluster.nothing_held


@pytest.mark.parametrize("together", [True, False])
async def test_ranks_that_die_together_are_one_recovery_and_one_after_the_other_two(job, together):
    await job.train(1)
    job.ranks[0].die()
    if not together:
        await job.watched(2)
    job.ranks[0 if not together else 3].die()
    await job.finish(2, generation=2 if together else 3)
    second = [] if together else ["generation_started", "ranks_replaced", "rank_lost", "held_back"]
    assert job.log == [*UP, "RECOVERING", "rank_lost", *second, *AGAIN, "SUCCEEDED"]
    assert job.row.restarts == 2 - together


async def test_rank_that_lost_a_peer_is_not_the_culprit(job):
    await job.train(1)
    job.ranks[0].rest_by_itself(1)
    job.ranks[2].die()
    await job.finish(2, generation=2)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert "rank 2 was killed" in job.message("rank_lost")
    (lost,) = [event.data for event in job.events if event.type == "rank_lost"]
    assert lost["node"] == job.ranks[2].node, "so that a node where ranks keep failing can be left out"


async def test_lost_agent_is_replaced_in_its_own_place(two_replicas, cluster, monkeypatch):
    job, counted, replace_lost = two_replicas(cluster), [], supervisor.replace_lost

    async def note_and_replace(context, lost, generation, failures):
        counted.extend(failure.kind for failure in failures)
        return await replace_lost(context, lost, generation, failures)

    monkeypatch.setattr(supervisor, "replace_lost", note_and_replace)
    await job.train(1)
    before = list(job.ranks)
    job.ranks[2].lose()
    await job.watched(2)
    assert [old is new for old, new in zip(before, job.ranks, strict=True)] == [True, True, False, True]
    assert job.ranks[2].description.group == before[2].description.group
    await job.finish(2)
    assert job.log == [*UP, "RECOVERING", "rank_lost", *AGAIN, "SUCCEEDED"]
    assert job.recoveries == [(2, "agent_lost", "memory and snapshot", 1)]
    assert counted == ["agent_lost"], "its node is judged by this failure too"
    assert cluster.nothing_held


async def test_replica_on_a_lost_node_continues_elsewhere_with_its_peers_state(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2, three=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "data": 2, "zero": 0})
    await job.train(1)
    assert [agent.node for agent in job.ranks] == ["one", "one", "two", "two"]
    cluster.lose_node("two")
    job.supervisor.tell(NodeLost("two", "it does not answer"))
    await job.watched(2)
    assert [agent.node for agent in job.ranks] == ["one", "one", "three", "three"]
    await job.finish(2)
    assert sorted(job.log[4:7]) == ["RECOVERING", "node_lost", "rank_lost"]
    assert job.log[7:] == [*AGAIN, "SUCCEEDED"]
    assert job.recoveries == [(2, "agent_lost", "memory and peer", 1)]
    assert job.message("node_lost") == "node two was lost (it does not answer), and with it 2 of 4 ranks"
    assert cluster.nothing_held


async def test_elastic_job_continues_without_a_replica_that_lost_its_places(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "data": 2, "zero": 0}, elastic={"min_data": 1, "max_data": 2})
    await job.train(1)
    cluster.lose_node("one")
    job.supervisor.tell(NodeLost("one", "gone"))
    await job.watched(2)
    assert [(agent.node, agent.rank) for agent in job.ranks] == [("two", 0), ("two", 1)]
    await job.finish(2)
    assert job.log[7:] == ["shrunk", "generation_started", *AGAIN[1:], "SUCCEEDED"]
    assert job.generations[1][1:] == ("memory", 1), "the state of another layout, in shared memory"
    assert job.row.replicas == 1
    assert cluster.nothing_held


async def test_job_with_spread_experts_continues_with_expert_groups_that_are_whole(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2, three=2, four=2)
    moe = {"experts": 2, "per_token": 2, "ffn_hidden_size": 16}
    job = two_replicas(
        cluster,
        model={"family": "llama", "layers": 2, "hidden_size": 32, "heads": 2, "sequence_length": 8, "moe": moe},
        parallel={"tensor": 2, "data": 4, "expert": 2},
        elastic={"min_data": 2},
    )
    await job.train(1)
    cluster.lose_node("one")
    job.supervisor.tell(NodeLost("one", "gone"))
    await job.watched(2)
    assert [agent.node for agent in job.ranks] == ["three", "three", "four", "four"]
    assert len(cluster.groups.held) == 2, "the places of the other replica of the broken group are given back"
    await job.finish(2)
    assert job.message("shrunk") == "continues with 2 replicas: no slots are free for more"
    assert (job.row.replicas, job.row.expert) == (2, 2)
    assert cluster.nothing_held


async def test_job_without_places_waits_in_the_queue_and_resumes(two_replicas, tmp_path):
    cluster = FakeCluster(tmp_path, one=2, two=2)
    job = two_replicas(cluster, parallel={"tensor": 2, "data": 2, "zero": 0})
    await job.train(1)
    cluster.lose_node("two")
    job.supervisor.tell(NodeLost("two", "gone"))
    await job.task
    assert (job.row.state, job.row.reason) == ("QUEUED", "insufficient_slots")
    assert not cluster.agents.living and not cluster.groups.held
    assert job.rank_states == ["exited"] * 4
    cluster.nodes.slots["three"], cluster.nodes.used["three"] = 2, 0
    await job.train(2)
    await job.finish()
    assert sorted(job.log[4:7]) == ["RECOVERING", "node_lost", "rank_lost"]
    assert job.log[7:] == ["QUEUED", *UP, "SUCCEEDED"]
    assert job.generations[1] == ("placed again", "snapshot", 1)
    assert cluster.nothing_held
