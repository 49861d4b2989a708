"""Who carries out a job: its agents and places, and what is remembered of them under numbers that change."""

import asyncio

import pytest

from service.cluster.sizes import resized
from service.job.context import JobContext
from tests.service.support.fake_cluster import FakeCluster


@pytest.fixture
def gang(store, submit, tmp_path):
    """Three replicas of two ranks, each replica on a node of its own. Of rank n report 10 + n was the last that was
    handled, and its process, which is at rest, holds step n."""
    spec = {"parallel": {"tensor": 2, "data": 3}, "train": {"steps": 10, "global_batch_size": 12}}
    job = JobContext.of(store, FakeCluster(tmp_path, one=2, two=2, three=2, four=2, five=2), submit(**spec))
    made = job.gang
    asyncio.run(made.place(1, job.submitted, ()))
    made.note_nodes({rank: agent.node for rank, agent in made.by_rank.items()})
    made.after = {rank: 10 + rank for rank in range(6)}
    made.held_steps = {rank: rank for rank in range(6)}
    return made


def standby(gang, replica, replicas=3):
    """Agents for one replica of the gang's layout with so many."""
    return asyncio.run(gang.start_standby(2, resized(gang.spec, replicas).layout, [replica], ()))


def test_who_stays_keeps_place_and_name_and_what_was_heard_of_it_under_its_new_number(gang):
    """An agent goes on counting its reports: asked for those after another rank's last it would leave some out."""
    agents, names, groups = gang.agents, gang.names, gang.groups
    leaving = gang.shrink([0, 2])
    assert gang.agents == [*agents[:2], *agents[4:]]
    assert (gang.names, gang.groups) == ([*names[:2], *names[4:]], [groups[0], groups[2]])
    assert gang.after == {0: 10, 1: 11, 2: 14, 3: 15}
    assert gang.nodes == {0: "one", 1: "one", 2: "three", 3: "three"}
    assert (leaving.agents, leaving.groups) == (agents[2:4], [groups[1]])


def test_of_agents_that_take_the_place_of_others_nothing_is_known_yet(gang):
    """Not what those before them had reported, nor where they were, nor what their processes held."""
    before, fresh = list(gang.agents), standby(gang, 1)
    leaving = gang.swap([1], fresh)
    assert gang.agents == [*before[:2], *fresh.agents, *before[4:]]
    assert leaving.agents == before[2:4]
    assert set(gang.after) == set(gang.nodes) == set(gang.held_steps) == {0, 1, 4, 5}


@pytest.mark.parametrize("replicas", [2, 4])
def test_no_process_holds_a_state_of_another_layout(gang, replicas):
    if replicas == 4:
        gang.grow(resized(gang.spec, 4), standby(gang, 3, replicas=4))
    else:
        gang.shrink([0, 1])
    assert (gang.layout.data, gang.held_steps) == (replicas, {})


def test_snapshots_are_looked_for_on_all_nodes_that_the_job_was_ever_on_and_no_others(gang):
    """A state that no other node has may lie where the job was two generations ago."""
    gang.note_nodes(dict.fromkeys(range(6), "four"))
    holders = asyncio.run(gang.release())
    assert sorted(agent.node for agent in holders.agents) == ["four", "one", "three", "two"]
