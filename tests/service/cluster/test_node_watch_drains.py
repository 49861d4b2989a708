"""A node whose daemon says that it ends is left, until it says that it stays."""

import pytest

from manta.service.cluster.node_watch import NodeWatch
from tests.service.support.one_node import one_node, until, watching


@pytest.fixture
def cluster():
    with one_node() as made:
        yield made


@pytest.fixture
def heard(monkeypatch):
    """All heartbeats that the watch has received."""
    noted, hear = [], NodeWatch._receive

    def note(self, heartbeat):
        noted.append(heartbeat)
        hear(self, heartbeat)

    monkeypatch.setattr(NodeWatch, "_receive", note)
    return noted


@pytest.mark.parametrize(("seconds", "reason"), [(60.0, "it is sold"), (0.0, "it is sold"), (None, "it is cordoned")])
async def test_node_watch_reports_a_drain_with_any_time_left(cluster, seconds, reason):
    cluster.heartbeat.drain(seconds, reason)
    async with watching(cluster) as reports:
        node, left, why = await reports.get()
    assert (node, why) == ("n1", reason)
    assert left is None if seconds is None else 0 <= left <= seconds


async def test_node_watch_reopens_a_node_whose_drain_is_withdrawn(cluster):
    cluster.heartbeat.drain(60.0, "it is sold", "a cloud")
    async with watching(cluster) as reports:
        cluster.drain(*(await reports.get())[:2])
        assert (cluster.draining, set(cluster.leave_by)) == ({"n1"}, {"n1"})
        cluster.heartbeat.withdraw("a cloud")
        await until(lambda: not cluster.draining)
        assert not cluster.leave_by


async def test_node_watch_keeps_a_node_drained_whose_daemon_has_forgotten_it(cluster, heard):
    """A daemon that was restarted does not know what was said to the one before it."""
    async with watching(cluster):
        cluster.draining.add("n1")
        await until(lambda: len(heard) >= 2)
    assert cluster.draining == {"n1"}


async def test_node_watch_reports_no_drain_of_an_undisturbed_node(cluster, heard):
    async with watching(cluster) as reports:
        await until(lambda: len(heard) >= 2)
        assert reports.empty()
