"""Who carries out a job: its agents and places, and what is remembered of them under numbers that change."""

import asyncio

import pytest

from manta.service.cluster.placement import agent_name
from manta.service.cluster.sizes import resized, with_freed_units
from manta.service.job.context import JobContext
from manta.service.job.gang import NO_PLACEMENT_GROUP
from manta.workers.protocol.messages import AgentDescription
from tests.service.support.fake_cluster import FakeCluster


@pytest.fixture
def gang(store, submit, tmp_path):
    """Three replicas of two ranks, each replica on a node of its own. Of rank n report 10 + n was the last that was
    handled, and its process, which is at rest, holds step n."""
    spec = {"parallel": {"tensor": 2, "data": 3}, "train": {"steps": 10, "global_batch_size": 12}}
    job = JobContext.of(store, FakeCluster(tmp_path, one=2, two=2, three=2, four=2, five=2), submit(**spec))
    made = job.gang
    asyncio.run(made.place(1, job.submitted, ()))
    made.record_nodes({rank: agent.node for rank, agent in made.by_rank.items()})
    made.after = {rank: 10 + rank for rank in range(6)}
    made.resting_steps = {rank: rank for rank in range(6)}
    return made


def standby(gang, replica, replicas=3):
    """Agents for one replica of the gang's layout with so many."""
    return asyncio.run(gang.start_standby(2, resized(gang.spec, replicas).layout, [replica], ()))


def living(gang, agents):
    """Those of these agents that nobody has ended."""
    return [agent for agent in agents if agent in gang._cluster.agents.living.values()]


def test_gang_that_shrinks_keeps_agents_places_and_report_counts_under_new_ranks(gang):
    """An agent goes on counting its reports: asked for those after another rank's last it would leave some out."""
    agents, names, groups = gang.agents, gang.names, gang.groups
    leaving = gang.shrink([0, 2])
    assert gang.agents == [*agents[:2], *agents[4:]]
    assert (gang.names, gang.groups) == ([*names[:2], *names[4:]], [groups[0], groups[2]])
    assert gang.after == {0: 10, 1: 11, 2: 14, 3: 15}
    assert gang.nodes == {0: "one", 1: "one", 2: "three", 3: "three"}
    assert (leaving.agents, leaving.groups) == (agents[2:4], [groups[1]])


def test_swapped_agents_start_without_reports_nodes_or_held_steps(gang):
    """Not what those before them had reported, nor where they were, nor what their processes held."""
    before, fresh = list(gang.agents), standby(gang, 1)
    leaving = gang.swap([1], fresh)
    assert gang.agents == [*before[:2], *fresh.agents, *before[4:]]
    assert leaving.agents == before[2:4]
    assert set(gang.after) == set(gang.nodes) == set(gang.resting_steps) == {0, 1, 4, 5}


@pytest.mark.parametrize("replicas", [2, 4])
def test_resized_gang_forgets_held_steps_of_the_former_layout(gang, replicas):
    if replicas == 4:
        gang.grow(resized(gang.spec, 4), standby(gang, 3, replicas=4))
    else:
        gang.shrink([0, 1])
    assert (gang.layout.data, gang.resting_steps) == (replicas, {})


def test_snapshots_of_a_job_are_served_from_every_node_it_ever_ran_on(gang):
    """A state that no other node has may lie where the job was two generations ago."""
    gang.record_nodes(dict.fromkeys(range(6), "four"))
    holders = asyncio.run(gang.release())
    assert sorted(agent.node for agent in holders.agents) == ["four", "one", "three", "two"]


def test_gang_lists_ranks_and_replicas_in_ascending_order(gang):
    gang.record_nodes({5: "one", 4: "two", 0: "one", 9: "one"})
    assert gang.on(["one"]) == [0, 5], "of ranks that there are no more nothing is said"
    assert (gang.on(["one", "two"]), gang.on(["six"])) == ([0, 4, 5], [])
    assert gang.replicas_of([5, 4, 0]) == [0, 2]
    assert gang.ranks_in([2, 0]) == [0, 1, 4, 5]


def test_agents_that_are_lost_are_replaced_in_their_places(gang):
    before, groups, names = list(gang.agents), list(gang.groups), list(gang.names)
    assert asyncio.run(gang.replace(7, [1, 4]))
    assert [agent is old for agent, old in zip(gang.agents, before, strict=True)] == [
        True, False, True, True, False, True
    ]  # fmt: skip
    assert [name for name in gang.names if name not in names] == [
        agent_name(gang._job_id, 7, 1), agent_name(gang._job_id, 7, 4)
    ]  # fmt: skip
    assert [agent.rank for agent in gang.agents] == list(range(6)) and gang.groups == groups
    assert not living(gang, [before[1], before[4]]), "one that is only silent would keep the seat"
    assert set(gang.after) == set(gang.resting_steps) == {0, 2, 3, 5}


@pytest.mark.parametrize("gone", ["node", "place"])
def test_agent_is_not_replaced_if_its_placement_group_is_gone(gang, gone):
    before = list(gang.agents)
    if gone == "node":
        gang._cluster.nodes.lost.add("two")
    else:
        gang.groups[1] = NO_PLACEMENT_GROUP
    assert not asyncio.run(gang.replace(7, [0, 2]))
    assert gang.agents == before == living(gang, before)


def test_replicas_that_are_given_up_leave_room_and_their_snapshots(gang):
    gang._cluster.agents.memory["two"] = {(gang._job_id, gang.tag, 2): [3]}
    groups = list(gang.groups)
    gang.groups[2] = NO_PLACEMENT_GROUP
    asyncio.run(gang.give_up([1, 2]))
    assert living(gang, gang.agents) == gang.agents[:2]
    assert groups[0] in gang._cluster.groups.held and groups[1] not in gang._cluster.groups.held
    assert gang._cluster.agents.memory["two"] == {(gang._job_id, gang.tag, 2): [3]}


@pytest.mark.parametrize("how", ["release", "give_up"])
def test_gang_release_waits_until_ray_shows_the_freed_units(gang, how, monkeypatch):
    """Ray says later that they are free: whoever looked at once would find no room."""
    waited = []

    async def until_free(expected):
        waited.append((expected, len(gang._cluster.agents.living)))

    monkeypatch.setattr(gang._cluster.nodes, "until_free", until_free)
    expected = with_freed_units(asyncio.run(gang.capacity()), gang.nodes.values())
    asyncio.run(gang.release() if how == "release" else gang.give_up([0, 1, 2]))
    assert waited == [(expected, 0)]


def test_gang_serves_snapshots_of_dropped_replicas_from_living_nodes(gang, monkeypatch):
    """Nobody is started on the others."""
    asked, start = [], gang._cluster.agents.start_snapshot_holders

    async def noted(job, nodes):
        asked.append(nodes)
        return await start(job, nodes)

    monkeypatch.setattr(gang._cluster.agents, "start_snapshot_holders", noted)
    gang._cluster.nodes.lost.add("two")
    holders = asyncio.run(gang.snapshot_holders_of([1, 2]))
    assert [agent.node for agent in holders.agents] == ["three"]
    assert asyncio.run(gang.snapshot_holders_of([1])).agents == []
    assert asked == [{"three"}]


def test_gang_marks_a_replica_without_agents_as_placed_nowhere(gang):
    about = {rank: AgentDescription("host", "10.0.0.1", 1, f"n{rank}", group=f"g{rank // 2}") for rank in (0, 4, 5)}
    gang.record_placements(about)
    assert gang.groups == ["g0", NO_PLACEMENT_GROUP, "g2"]
    assert gang.nodes == {0: "n0", 4: "n4", 5: "n5"}


def test_gang_does_not_adopt_agents_of_another_number_or_name(gang):
    assert asyncio.run(gang.adopt(gang.names[:5], {})) is None
    assert asyncio.run(gang.adopt([f"{name}-other" for name in gang.names], {})) is None


def test_gang_adopts_its_agents_and_ends_strays(gang):
    names, held = list(gang.names), list(gang.agents)
    stray = standby(gang, 1)
    held[3].lose()
    gang._cluster.agents.living.pop(names[3])
    about = asyncio.run(gang.adopt(names, {0: 5}))
    assert sorted(about) == [0, 1, 2, 4, 5] and gang.after == {0: 5}
    assert gang.by_rank == {rank: held[rank] for rank in (0, 1, 2, 4, 5)} and gang.names == names
    assert living(gang, stray.agents) == []
    assert not set(stray.groups) & gang._cluster.groups.held.keys()
