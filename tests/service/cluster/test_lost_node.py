"""What a control plane ends on a node that it does not reach any more."""

import asyncio

import pytest

from manta.service.cluster.placement import Seat, placement_group_name
from manta.service.leases.decisions import LeaseLost
from manta.workers.config import ParallelConfig
from tests.service.support.fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path):
    """Two nodes, on each of which a job of ours and one of another control plane's have a rank."""
    made = FakeCluster(tmp_path, near=2, far=2)
    kill = made.agents.kill

    async def kill_ours(agents):
        if any(agent.job == "theirs" for agent in agents):
            raise LeaseLost("theirs")
        await kill(agents)

    async def start():
        for job in ("ours", "theirs"):
            await made.groups.acquire(job, 1, ParallelConfig(data=2), "manta_slot")
            for replica, node in enumerate(("near", "far")):
                group = placement_group_name(job, 1, replica)
                made.groups.held[group] = [(node, 1)]
                await made.agents.start(job, 1, {replica: Seat(group, 0)}, "manta_slot")

    asyncio.run(start())
    made.agents.kill = kill_ours
    return made


def left(cluster):
    return sorted((agent.job, agent.node) for agent in cluster.agents.living.values())


def test_lost_node_keeps_agents_and_daemon_that_other_control_planes_use(cluster):
    """It may be our own network that is away; with the node's daemon all trainers there would end."""
    asyncio.run(cluster.fail_calls_to("far"))
    assert left(cluster) == [("ours", "near"), ("theirs", "far"), ("theirs", "near")]
    assert cluster.daemons.silent == set()


def test_lost_node_daemon_calls_fail_at_once_if_no_other_service_uses_the_node(cluster):
    for name in [name for name, agent in cluster.agents.living.items() if agent.job == "theirs"]:
        del cluster.agents.living[name]
    asyncio.run(cluster.fail_calls_to("far"))
    assert left(cluster) == [("ours", "near")]
    assert cluster.daemons.silent == {"far"}


def test_lost_node_handling_asks_ray_only_for_agents_on_that_node(cluster, monkeypatch):
    """There may be thousands, and what Ray is asked one by one recoveries wait behind."""
    agents, find = [], cluster.agents.find
    monkeypatch.setattr(cluster.agents, "find", lambda names: find(agents.extend(names) or names))
    asyncio.run(cluster.fail_calls_to("far"))
    assert len(agents) == 2


def test_calls_to_agents_there_fail_before_ray_has_answered_anything(cluster, monkeypatch):
    """Recoveries wait for them, and Ray may take a while, or not know the agents."""
    done = []

    async def names_on(node):
        done.append("ray")
        return []

    monkeypatch.setattr(cluster.agents, "fail_calls_to", done.append)
    monkeypatch.setattr(cluster.agents, "names_on", names_on)
    asyncio.run(cluster.fail_calls_to("far"))
    assert done == ["far", "ray"]
