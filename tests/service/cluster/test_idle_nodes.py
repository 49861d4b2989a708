"""Which nodes an autoscaler may take away."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.agent_client import AgentFailed
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.cluster.node_maintenance import REST_SECONDS, IdleNodes
from manta.service.cluster.node_shapes import NodeShape
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.waiting import reached

LATER = REST_SECONDS + 1


@pytest.fixture
def cluster(tmp_path):
    made = FakeCluster(tmp_path, small=2, own=2)
    made.nodes.types = {"small": "small"}
    return made


@pytest.fixture
def check(cluster):
    """Looks at the nodes after so many seconds; answers those at rest then."""
    needed = set()

    async def needs(jobs):
        return needed & set(jobs)

    idle = IdleNodes(cluster, needs)

    def at(*moments):
        for moment in moments:
            asyncio.run(idle.check(moment))
        return cluster.nodes.at_rest

    at.needed = needed
    return at


def test_idle_autoscaled_node_is_let_go_after_a_while_without_ranks(check):
    assert check(0.0, REST_SECONDS - 1) == set()
    assert check(LATER) == {"small"}, "the other one is not the autoscaler's"


def test_idle_time_of_a_node_excludes_time_with_ranks(check, cluster):
    check(0.0)
    cluster.nodes.used["small"] = 1
    check(LATER)
    cluster.nodes.used["small"] = 0
    assert check(LATER + 1, LATER + REST_SECONDS) == set()
    assert check(2 * LATER + 1) == {"small"}


def test_idle_node_whose_daemon_was_used_lately_stays(check, cluster):
    check(0.0)
    cluster.daemons.used["small"] = 5.0
    assert check(LATER) == set()
    assert check(LATER + 5) == {"small"}


def test_idle_node_with_snapshots_that_a_job_needs_stays(check, cluster):
    cluster.daemons._daemon("small").left = ["failed"]
    check.needed.add("failed")
    assert check(0.0, LATER) == set()
    check.needed.clear()
    assert check(2 * LATER) == {"small"}


def test_idle_node_that_does_not_list_its_memory_stays(check, cluster):
    async def fail():
        raise AgentFailed("its folder cannot be listed")

    daemon = cluster.daemons._daemon("small")
    cluster.daemons.silent.add("small")
    assert check(0.0, LATER) == set()
    cluster.daemons.silent.clear()
    daemon.jobs, answers = fail, daemon.jobs
    assert check(2 * LATER) == set()
    daemon.jobs = answers
    assert check(3 * LATER) == {"small"}


def test_idle_nodes_are_not_checked_without_declared_node_shapes(cluster):
    cluster.nodes.autoscaled_nodes = None
    asyncio.run(IdleNodes(cluster, lambda jobs: None).run())


@pytest.mark.parametrize("error", [ClusterUnavailable(TimeoutError("Ray gave no answer in 60 s")), KeyError("node")])
async def test_failed_check_of_idle_nodes_is_one_line_in_the_log(cluster, caplog, monkeypatch, error):
    async def needs(jobs):
        return set()

    cluster.nodes.shapes = (NodeShape("small", 1, "manta_slot", 1),)
    idle = IdleNodes(cluster, needs)
    monkeypatch.setattr(idle, "check", AsyncMock(side_effect=error))
    running = asyncio.create_task(idle.run())
    await reached(lambda: caplog.records)
    running.cancel()
    (record,) = caplog.records
    assert record.getMessage() == f"idle nodes could not be checked: {error}"
    assert bool(record.exc_info) == isinstance(error, KeyError)
