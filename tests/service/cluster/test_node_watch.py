"""A node is lost when nothing of it takes a connection any more, and drained while its daemon says so."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster import node_watch
from manta.service.cluster.node_daemons import HeartbeatSource
from manta.service.cluster.node_watch import NodeWatch, listens
from manta.workers.node.heartbeat import HeartbeatServer
from manta.workers.protocol.messages import GpuReading
from manta.workers.system.sockets import PortRange
from tests.service.support.one_node import SECONDS, bound, one_node, until, watching


@pytest.fixture
def cluster():
    with one_node() as made:
        yield made


@pytest.fixture
def frequent_looks(monkeypatch):
    """What is looked at again is so after ten milliseconds."""
    monkeypatch.setattr(node_watch, "POLL_SECONDS", 0.01)


async def test_node_watch_declares_an_unreachable_node_lost_and_fails_its_calls(cluster):
    async with watching(cluster) as reports:
        lost = await cluster.report_of_loss(reports)
        await until(lambda: cluster.failed)
        assert lost == ("n1", "neither its daemon nor its Ray can be reached")
    assert (cluster.lost, cluster.failed) == ({"n1"}, ["n1"])


async def test_node_watch_keeps_gpu_readings_of_a_node_until_it_is_lost(cluster, frequent_looks):
    readings = (GpuReading(0, temperature_celsius=60.0),)
    async with watching(cluster) as reports:
        cluster.heartbeat.note_gpus(readings)
        await until(lambda: cluster.gpus)
        known = cluster.gpus["n1"].readings
        cluster.fall_silent()
        await reports.get()
        assert known == readings
    assert cluster.gpus == {}


async def test_node_watch_clears_a_node_that_returns_and_can_lose_it_again(cluster, frequent_looks):
    async with watching(cluster) as news:
        first = await cluster.report_of_loss(news)
        cluster.come_back()
        await until(lambda: not cluster.lost)
        first, second = first, await cluster.report_of_loss(news)
    assert first == second == ("n1", "neither its daemon nor its Ray can be reached")
    assert cluster.lost == {"n1"}


async def test_node_watch_does_not_mistake_another_node_at_the_same_address(cluster, frequent_looks):
    async with watching(cluster) as news:
        await cluster.report_of_loss(news)
        cluster.daemon_answers = False
        cluster.come_back()
        await until(lambda: cluster.looked_for_daemon > 3)
        assert cluster.lost == {"n1"}
        cluster.alive = False
        await until(lambda: not cluster.lost)
        assert news.empty(), "it is lost once"


async def test_node_watch_takes_back_a_node_whose_daemon_ended_unless_ray_gave_it_up(
    cluster, frequent_looks, monkeypatch
):
    monkeypatch.setattr(node_watch, "GIVE_UP_SECONDS", 0.05)
    async with watching(cluster) as news:
        await cluster.report_of_loss(news)
        cluster.daemon_answers, asked = False, cluster.asked
        cluster.come_back()
        await until(lambda: not cluster.lost)
        await until(lambda: cluster.asked > asked)  # its daemon is started


async def test_node_watch_keeps_a_node_lost_that_was_away_longer_than_ray_waits(cluster, frequent_looks, monkeypatch):
    """Each look at its Ray takes nearly as long."""
    looks = []

    def looked_at(address):
        looks.append(address)
        return listens(address)

    clock = SimpleNamespace(monotonic=lambda: len(looks) * 0.9 * node_watch.GIVE_UP_SECONDS)
    monkeypatch.setattr(node_watch, "listens", looked_at)
    monkeypatch.setattr(node_watch, "time", clock)
    async with watching(cluster) as news:
        await cluster.report_of_loss(news)
        before = len(looks)
        await until(lambda: len(looks) > before + 5)
        assert news.empty() and cluster.lost == {"n1"}


@pytest.mark.parametrize("silent", [False, True], ids=["answers", "lost_before"])
async def test_node_watch_reports_a_node_that_ray_gives_up_once(cluster, frequent_looks, silent):
    """Its id never comes again: nobody is to ask for ever whether a node that is gone may be used."""
    why = "neither its daemon nor its Ray can be reached" if silent else "Ray reports it as dead"
    async with watching(cluster) as news:
        await until(lambda: cluster.asked)
        for some in (cluster.draining, cluster.unresponsive, cluster.unswept, cluster.at_rest):
            some.add("n1")
        cluster.problems["n1"] = "its daemon runs another Manta"
        if silent:
            cluster.fall_silent()
            await until(lambda: cluster.lost)
        cluster.alive = False
        await until(lambda: not cluster.draining)
        assert [news.get_nowait() for _ in range(news.qsize())] == [("n1", why)]
    assert not (cluster.lost | cluster.draining | cluster.unresponsive | cluster.unswept | cluster.at_rest)
    assert (cluster.problems, cluster.failed) == ({}, ["n1"])


async def test_node_watch_asks_a_daemon_again_after_an_error(cluster, frequent_looks, monkeypatch):
    answers, failures = cluster.heartbeat_source, [RuntimeError("a defect")]

    async def fails_once(node):
        if failures:
            raise failures.pop()
        return await answers(node)

    monkeypatch.setattr(cluster, "heartbeat_source", fails_once)
    async with watching(cluster) as reports:
        await until(lambda: cluster.asked)
        assert reports.empty()


async def test_node_care_retries_listing_nodes_after_an_error_of_ray(cluster, frequent_looks):
    cluster.errors = [RuntimeError("Ray is restarting")]
    async with watching(cluster):
        await until(lambda: cluster.asked)
    assert not cluster.errors


async def test_node_watch_does_not_count_a_daemon_restart_as_a_loss(cluster):
    async with watching(cluster) as reports:
        await until(lambda: cluster.asked)
        cluster.heartbeat.close()
        cluster.heartbeat = HeartbeatServer("127.0.0.1", "n1")
        await until(lambda: cluster.asked >= 2)
        cluster.heartbeat.drain(60)  # heard: the new one is listened to
        node, seconds, _ = await reports.get()
        assert (node, 0 < seconds <= 60) == ("n1", True)
    assert cluster.lost == set()


async def test_node_watch_continues_after_an_error_while_reporting_a_loss(cluster, frequent_looks):
    cluster.fail_calls_to = AsyncMock(side_effect=RuntimeError("Ray is restarting"))
    async with watching(cluster) as news:
        await cluster.report_of_loss(news)
        cluster.come_back()
        await until(lambda: not cluster.lost)


def test_process_too_busy_to_accept_still_takes_connections():
    with socket.create_server(("127.0.0.1", 0)) as nobody_accepts:
        assert listens(nobody_accepts.getsockname())
        address = nobody_accepts.getsockname()
    assert not listens(address)


async def test_node_watch_probes_leave_the_event_loops_threads_free(cluster, monkeypatch):
    """Such as those who read the database, to recover the jobs that were there."""
    looked, over = threading.Event(), threading.Event()

    def hangs(address):
        looked.set()
        return over.wait(SECONDS)

    monkeypatch.setattr(node_watch, "listens", hangs)
    async with watching(cluster):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await until(lambda: cluster.asked)
        cluster.fall_silent()
        await until(looked.is_set)
        try:
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "read"), SECONDS / 3) == "read"
        finally:
            over.set()


async def test_node_watch_does_not_take_a_stranger_at_the_old_port_for_the_node(cluster):
    async with watching(cluster) as reports:
        await until(lambda: cluster.asked)
        cluster.heartbeat.close()
        cluster.heartbeat = HeartbeatServer("127.0.0.1", "somebody else")
        await until(lambda: cluster.asked >= 3)  # it hangs up and asks again
        assert reports.empty()


class Connection:
    """Stands for `asyncio.open_connection` to a daemon: what was written to it, and whether that was closed."""

    def __init__(self, monkeypatch):
        self.reader, self.asked, self.written, self.closed = asyncio.StreamReader(), asyncio.Event(), [], []
        monkeypatch.setattr(asyncio, "open_connection", self.open)

    async def open(self, *address):
        self.address = address
        return self.reader, self

    def write(self, data):
        self.written.append(data)
        self.asked.set()

    async def drain(self):
        """All is sent."""

    def close(self):
        self.closed.append(True)

    async def listening(self, cluster):
        """A watch that listens to the daemon and has sent its secret."""
        source = HeartbeatSource("192.0.2.1", 7, "secret")
        task = asyncio.create_task(NodeWatch(cluster, lambda *lost: None)._listen("n1", source))
        await self.asked.wait()
        return task


@pytest.mark.parametrize("turns", range(5))
async def test_watch_that_is_ended_while_a_heartbeat_arrives_ends(cluster, monkeypatch, turns):
    """However far the heartbeat has come within the event loop."""
    connection = Connection(monkeypatch)
    listening = await connection.listening(cluster)
    await asyncio.sleep(0)
    connection.reader.feed_data(b'{"node": "n1"}\n')
    for _ in range(turns):
        await asyncio.sleep(0)
    listening.cancel()
    done, _ = await asyncio.wait({listening}, timeout=SECONDS)
    assert bool(done) and listening.cancelled()


@pytest.mark.parametrize(
    "answer", [b"", b"no heartbeat\n", b'{"node": "another"}\n'], ids=["end", "no_json", "stranger"]
)
async def test_node_watch_closes_a_connection_to_a_daemon_whose_answer_is_invalid(cluster, monkeypatch, answer):
    """Each look makes a connection of its own: those that are left would add up. A request has the daemon's secret."""
    connection = Connection(monkeypatch)
    listening = await connection.listening(cluster)
    connection.reader.feed_data(answer)
    if not answer:
        connection.reader.feed_eof()
    await listening
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
    assert (connection.address, connection.written, connection.closed) == (("192.0.2.1", 7), [b"secret\n"], [True])


def refusing(cluster):
    """Where the daemon listened until now; nobody else does until `cluster.heartbeat` is closed."""
    address = cluster.heartbeat.address
    cluster.heartbeat.close()
    keeps_the_port = bound(address)
    cluster.heartbeat = SimpleNamespace(address=address, secret="s", close=keeps_the_port.close)
    return address


async def test_node_watch_reports_a_problem_while_only_the_daemon_is_unreachable(cluster, monkeypatch):
    """As behind a firewall that lets only Ray through."""
    monkeypatch.setattr(node_watch, "BEAT_SECONDS", 0.01)
    host, port = refusing(cluster)
    async with watching(cluster) as reports:
        async with asyncio.timeout(SECONDS):
            await until(lambda: cluster.problems)
        sentence = cluster.problems["n1"]
        assert sentence.startswith(
            f"port {port} of node n1 ({host}) cannot be reached from the control plane (127.0.0.1)"
        )
        assert "MANTA_PORTS" in sentence and cluster.lost == set() and reports.empty()
        cluster.heartbeat.close()
        cluster.heartbeat = HeartbeatServer("127.0.0.1", "n1", PortRange(port, port))
        await until(lambda: not cluster.problems)


async def test_node_watch_ignores_a_short_absence_of_a_daemon(cluster, monkeypatch):
    monkeypatch.setattr(node_watch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(node_watch, "REFUSALS", 10_000)
    refusing(cluster)
    async with watching(cluster) as reports:
        asked = cluster.asked
        await until(lambda: cluster.asked > asked + 3)
        assert cluster.problems == {} and reports.empty()


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
