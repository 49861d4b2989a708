"""Every node is looked after on its own, again and again: what one does not do holds up no other."""

import asyncio
import contextlib
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster import node_maintenance
from manta.service.cluster.agent_client import AgentFailed, AgentTimeout
from manta.service.cluster.node_maintenance import NodeMaintenance
from tests.service.support.fake_cluster import FakeCluster

SECONDS = 60.0


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(node_maintenance, "POLL_SECONDS", 0.0)
    return FakeCluster(tmp_path, a=2, b=2)


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def caring(cluster, over=lambda jobs: set(jobs), answered=lambda: None):
    """All nodes are looked after while the block is executed. `over`: which jobs are, by the database."""

    async def asked(jobs):
        return over(jobs)

    care = NodeMaintenance(cluster, asked, answered)
    task = asyncio.create_task(care.run())
    try:
        async with asyncio.timeout(SECONDS):
            yield care
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_nodes_that_have_not_answered_in_time_are_closed(cluster, monkeypatch):
    monkeypatch.setattr(node_maintenance, "FIRST_SECONDS", 0.05)
    held = asyncio.Event()
    cluster.daemons.hang["b"] = lambda _: held.wait()
    async with caring(cluster) as care:
        await until(lambda: "a" in cluster.peak_flops)
        await care.first_answers()
        assert cluster.nodes.closed == {"b"}
        held.set()
        await until(lambda: not cluster.nodes.closed and "b" in cluster.peak_flops)


async def test_database_that_cannot_be_read_for_a_while_ends_no_care(cluster):
    asked = []

    def over(jobs):
        asked.append(jobs)
        if len(asked) <= 2:
            raise OSError("disk I/O error")
        return set(jobs)

    daemon = cluster.daemons._daemon("b")
    daemon.left = ["over"]
    async with caring(cluster, over):
        await until(lambda: not daemon.left)
    assert daemon.ended_jobs == ["over"]


async def test_node_sweep_ends_only_jobs_that_are_surely_over(cluster):
    daemon = cluster.daemons._daemon("a")
    daemon.left = ["over", "unknown"]
    async with caring(cluster, lambda jobs: {"over"} & set(jobs)):
        await until(lambda: "over" not in daemon.left)
    assert daemon.left == ["unknown"]


async def test_node_that_was_lost_and_is_back_is_swept_again(cluster):
    daemon = cluster.daemons._daemon("b")
    async with caring(cluster) as care:
        await until(lambda: len(cluster.peak_flops) == 2)
        cluster.nodes.lost.add("b")
        await until(lambda: "b" not in care._tasks)
        daemon.left = ["ended meanwhile"]
        cluster.nodes.lost.discard("b")
        await until(lambda: not daemon.left)


async def test_node_with_a_daemon_of_an_older_release_stays_open_without_a_sweep(cluster):
    daemon = cluster.daemons._daemon("a")
    daemon.jobs = AsyncMock(side_effect=AgentFailed("no attribute jobs"))
    async with caring(cluster):
        await until(lambda: "a" in cluster.peak_flops)
    assert cluster.nodes.closed == set()


async def test_node_lost_before_its_first_answer_does_not_delay_the_start(cluster, monkeypatch):
    monkeypatch.setattr(node_maintenance, "FIRST_SECONDS", 10 * SECONDS)
    cluster.daemons.hang["b"] = lambda _: asyncio.Event().wait()
    async with caring(cluster) as care:
        await until(lambda: "a" in cluster.peak_flops and "b" in care._tasks)
        cluster.nodes.lost.add("b")
        await care.first_answers()
        assert cluster.nodes.unresponsive == set(), "all that are there have answered"


async def test_scheduler_is_notified_when_a_silent_node_answers_again(cluster):
    calls = []
    cluster.daemons.silent.add("b")
    async with caring(cluster, answered=lambda: calls.append("again")):
        await until(lambda: cluster.nodes.unresponsive == {"b"} and "a" in cluster.peak_flops)
        assert calls == [], "the other one has answered all along"
        cluster.daemons.silent.discard("b")
        await until(lambda: "b" in cluster.peak_flops)
        assert calls == ["again"]


async def test_node_that_could_not_list_leftovers_is_swept_once_it_can(cluster):
    daemon, tried = cluster.daemons._daemon("b"), []
    daemon.left, answer = ["over"], daemon.jobs

    async def silent():
        tried.append("b")
        raise AgentTimeout("no answer")

    async with caring(cluster):
        daemon.jobs = silent
        await until(lambda: len(tried) >= 3)
        daemon.jobs = answer
        await until(lambda: not daemon.left)


async def test_node_that_missed_the_end_of_a_job_is_swept_again_once(cluster):
    daemon, asked = cluster.daemons._daemon("b"), []
    answer = daemon.jobs

    async def jobs():
        asked.append("b")
        return await answer()

    async with caring(cluster):
        await until(lambda: len(cluster.peak_flops) == 2)
        daemon.left, daemon.jobs = ["over"], jobs
        cluster.nodes.unswept.add("b")
        await until(lambda: not daemon.left and not cluster.nodes.unswept)
        for _ in range(100):
            await asyncio.sleep(0)
        assert asked == ["b"]


async def test_nodes_are_looked_for_again_where_ray_does_not_tell_them(cluster, monkeypatch):
    living, errors = cluster.nodes.living, [RuntimeError("Ray is restarting")]

    async def unsure():
        if errors:
            raise errors.pop()
        return await living()

    monkeypatch.setattr(cluster.nodes, "living", unsure)
    async with caring(cluster):
        await until(lambda: len(cluster.peak_flops) == 2)
    assert not errors


async def test_node_that_joins_later_is_cared_for(cluster):
    async with caring(cluster):
        await until(lambda: len(cluster.peak_flops) == 2)
        cluster.nodes.slots["c"] = cluster.nodes.used["c"] = 2
        await until(lambda: "c" in cluster.peak_flops)


async def test_node_care_lets_the_start_continue_when_every_node_has_answered(cluster, monkeypatch):
    monkeypatch.setattr(node_maintenance, "FIRST_SECONDS", 10 * SECONDS)
    async with caring(cluster) as care:
        await care.first_answers()
        assert (set(care._tasks), cluster.nodes.unresponsive) == ({"a", "b"}, set())


async def test_node_that_was_swept_and_measured_is_not_asked_again(cluster):
    """A look costs a call to its daemon, and there are many nodes."""
    of, asked = cluster.daemons.of, []

    async def count(node):
        asked.append(node)
        return await of(node)

    cluster.daemons.of = count
    async with caring(cluster):
        await until(lambda: len(cluster.peak_flops) == 2)
        for _ in range(50):
            await asyncio.sleep(0)
    assert sorted(asked) == ["a", "b"]


async def test_node_care_logs_each_silence_of_a_node_once(cluster, caplog):
    cluster.daemons.silent.add("b")
    async with caring(cluster):
        for times in (1, 2):
            cluster.daemons.silent.add("b")
            cluster.nodes.unswept.add("b")
            await until(lambda: "b" in cluster.nodes.unresponsive)
            for _ in range(50):
                await asyncio.sleep(0)
            assert caplog.text.count("node b is excluded from placement until a daemon") == times
            cluster.daemons.silent.discard("b")
            await until(lambda: not cluster.nodes.unresponsive and not cluster.nodes.unswept)
            assert caplog.text.count("the daemon of node b responds again") == times
        assert "node a" not in caplog.text


async def test_node_sweep_is_not_repeated_after_a_disk_error(cluster):
    daemon, tried = cluster.daemons._daemon("a"), []

    async def broken(job, keep_snapshots=False):
        tried.append((job, keep_snapshots))
        raise AgentFailed("disk I/O error")

    daemon.left, daemon.end_job = ["over"], broken
    async with caring(cluster):
        await until(lambda: len(cluster.peak_flops) == 2)
        for _ in range(50):
            await asyncio.sleep(0)
    assert tried == [("over", False)] and cluster.nodes.unswept == set()
