"""A node whose daemon says that it ends is left, until it says that it stays."""

import pytest

from manta.service.cluster.node_watch import NodeWatch
from tests.service.support.one_node import one_node, until, watched


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


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_node_watch_reports_a_drain_with_any_time_left(cluster, seconds):
    cluster.heartbeat.drain(seconds, "it is sold")

    async def story(reports):
        return await reports.get()

    node, left, reason = watched(cluster, story)
    assert (node, reason) == ("n1", "it is sold")
    assert 0 <= left <= seconds


def test_node_watch_reports_a_drain_without_a_deadline(cluster):
    cluster.heartbeat.drain(None, "it is cordoned")

    async def story(reports):
        return await reports.get()

    assert watched(cluster, story) == ("n1", None, "it is cordoned")


def test_node_watch_reopens_a_node_whose_drain_is_withdrawn(cluster):
    cluster.heartbeat.drain(60.0, "it is sold", "a cloud")

    async def story(reports):
        cluster.drain(*(await reports.get())[:2])
        assert (cluster.draining, set(cluster.leave_by)) == ({"n1"}, {"n1"})
        cluster.heartbeat.withdraw("a cloud")
        await until(lambda: not cluster.draining)
        assert not cluster.leave_by

    watched(cluster, story)


def test_node_watch_keeps_a_node_drained_whose_daemon_has_forgotten_it(cluster, heard):
    """A daemon that was restarted does not know what was said to the one before it."""

    async def story(reports):
        cluster.draining.add("n1")
        await until(lambda: len(heard) >= 2)

    watched(cluster, story)
    assert cluster.draining == {"n1"}


def test_node_watch_reports_no_drain_of_an_undisturbed_node(cluster, heard):
    async def story(reports):
        await until(lambda: len(heard) >= 2)
        return reports.empty()

    assert watched(cluster, story)
