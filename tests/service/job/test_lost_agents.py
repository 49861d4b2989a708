"""Who takes the place of agents that are lost, and where."""

import asyncio
import time

import pytest

from manta.service.cluster.placement_groups import NotPlaced
from manta.service.cluster.sizes import resized
from manta.service.job.changes import place_gang, replace_lost
from manta.service.job.context import JobContext
from manta.service.job.gang import NO_PLACEMENT_GROUP
from manta.service.recovery.decisions import AVOID_FAILURES, PastFailure
from manta.service.store import events
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.virtual_time import in_virtual_time

TWO_REPLICAS = {"parallel": {"tensor": 2, "data": 2}}


@pytest.fixture
def placed(store, submit, tmp_path):
    """Makes a job of tensor 2 x data 2 ranks, which are on nodes `one` and `two`; rank 2 has lost its agent."""

    def make(**sections):
        cluster = FakeCluster(tmp_path, one=2, two=2, three=2)
        job = JobContext.of(store, cluster, submit(**{**TWO_REPLICAS, **sections}))
        asyncio.run(job.gang.place(1, job.submitted, ()))
        job.gang.record_nodes({rank: agent.node for rank, agent in job.gang.by_rank.items()})
        job.gang.agents[2].lose()
        return job

    return make


def failures(node, how_many=AVOID_FAILURES, kind="killed"):
    return [PastFailure(kind, time.time(), node=node)] * how_many


def nodes_of(job):
    return [agent.node if agent is not None else None for agent in job.gang.agents]


def replace(job, history=(), lost=(2,)):
    return asyncio.run(replace_lost(job, list(lost), 2, list(history)))


@pytest.mark.parametrize("history", [[], failures("two", AVOID_FAILURES - 1), failures("two", kind="exception")])
def test_lost_rank_gets_a_new_agent_in_its_place(placed, history):
    job = placed()
    before = list(job.gang.agents)
    assert replace(job, history)
    assert nodes_of(job) == ["one", "one", "two", "two"]
    assert [old is new for old, new in zip(before, job.gang.agents, strict=True)] == [True, True, False, True]
    assert job.gang.departing == []


def test_replica_moves_off_a_node_that_keeps_failing_it(placed):
    job = placed()
    assert replace(job, failures("two"))
    assert nodes_of(job) == ["one", "one", "three", "three"]
    assert job.cluster.groups.acquired[-1][3] == {"two"}
    assert (len(job.cluster.groups.held), job.cluster.nodes.used["two"]) == (2, 0), "its places are given back"
    (departing,) = job.gang.departing
    assert [agent.node for agent in departing.agents] == ["two"], "its snapshots are fetched from there"


def test_replica_stays_on_a_failing_node_if_there_is_no_other(placed):
    job = placed()
    del job.cluster.nodes.slots["three"]
    assert replace(job, failures("two"))
    assert nodes_of(job) == ["one", "one", "two", "two"]


def test_replica_on_a_lost_node_is_placed_elsewhere(placed):
    job = placed()
    job.cluster.lose_node("two")
    assert replace(job, lost=(2, 3))
    assert nodes_of(job) == ["one", "one", "three", "three"]
    assert [departing.agents for departing in job.gang.departing] == [[]], "nobody is there who could be asked"


@pytest.mark.parametrize("gone", ["node", "place"])
def test_silent_agents_are_killed_and_not_asked_again(placed, gone, monkeypatch):
    """Each would be waited for once more. The others of the replica end their trainers first."""
    job = placed()
    silent, other = before = job.gang.agents[2:]
    silent.lost = False
    silent.silence()
    if gone == "place":
        job.gang.groups[1] = NO_PLACEMENT_GROUP
        del job.cluster.nodes.slots["two"]
    else:
        job.cluster.nodes.lost.add("two")

    async def body():
        assert await replace_lost(job, [2], 2, [])
        assert asyncio.get_running_loop().time() == 0

    in_virtual_time(monkeypatch, body)
    assert (silent.stops, other.stops) == (0, 1)
    assert not set(before) & set(job.cluster.agents.living.values())
    assert nodes_of(job) == ["one", "one", "three", "three"]


@pytest.mark.parametrize("elastic", [True, False])
def test_elastic_gang_shrinks_if_a_lost_replica_finds_no_room(placed, store, elastic):
    job = placed(**({"elastic": {"min_data": 1}} if elastic else {}))
    del job.cluster.nodes.slots["three"]
    job.cluster.lose_node("two")
    assert replace(job, lost=(2, 3)) is elastic
    types = store.query(lambda session: [event.type for event in events.page(session, job.id).items])
    assert ("shrunk" in types) is elastic
    if elastic:
        assert (job.gang.layout.data, nodes_of(job)) == (1, ["one", "one"])


def test_gang_without_agents_is_placed_anew_away_from_failing_nodes(placed):
    job = placed()
    assert not replace(job, lost=(0, 1, 2, 3))
    asyncio.run(job.gang.release())
    asyncio.run(place_gang(job, 2, failures("one")))
    assert nodes_of(job) == ["two", "two", "three", "three"]


@pytest.mark.parametrize("has_room", [True, False])
def test_shrunk_gang_is_placed_anew_at_its_wanted_size_or_waits_for_its_current_layout(placed, has_room):
    job = placed(elastic={"min_data": 1, "max_data": 2})
    asyncio.run(job.gang.release())
    job.gang.spec = resized(job.submitted, 1)
    if has_room:
        asyncio.run(place_gang(job, 2, []))
        assert job.gang.layout.data == 2
    else:
        job.cluster.nodes.used.update(dict.fromkeys(job.cluster.nodes.slots, 2))
        with pytest.raises(NotPlaced):
            asyncio.run(place_gang(job, 2, []))
        assert job.cluster.groups.acquired[-1][:3] == (job.id, 2, (0,))
