"""A node is lost when nothing of it takes a connection any more; a busy or a restarted daemon is no loss."""

import asyncio
import contextlib
import socket

import pytest

from service.cluster.node_watch import NodeWatch, any_listens
from service.cluster.nodes import RayNode
from workers.node.heartbeat import HeartbeatServer

SECONDS = 30.0


class FakeCluster:
    """One node, whose Ray is a listening socket and whose daemon sends heartbeats. Its own parts, too."""

    def __init__(self):
        self.nodes = self.daemons = self
        self.lost, self.draining, self.failed = set(), set(), []
        self.raylet = socket.create_server(("127.0.0.1", 0))
        self.heartbeat = HeartbeatServer("127.0.0.1", "n1")
        self.asked = 0

    async def known(self):
        return [RayNode("n1", self.raylet_address), RayNode("dead", ("127.0.0.1", 1), alive=False)]

    async def heartbeat_address(self, node):
        self.asked += 1
        return self.heartbeat.address

    async def fail_calls_to(self, node):
        self.failed.append(node)


@pytest.fixture
def cluster():
    made = FakeCluster()
    made.raylet_address = made.raylet.getsockname()
    yield made
    with contextlib.suppress(OSError):
        made.heartbeat.close()
    made.raylet.close()


def watched(cluster, story):
    """What the watch tells while `story(told)` happens."""

    async def run():
        told = asyncio.Queue()
        watch = NodeWatch(cluster, lambda *lost: told.put_nowait(lost), lambda *drain: told.put_nowait(drain))
        task = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(SECONDS):
                return await story(told)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(run())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_node_of_which_nothing_answers_is_lost_and_calls_to_it_fail(cluster):
    async def story(told):
        await until(lambda: cluster.asked)
        cluster.raylet.close()
        cluster.heartbeat.close()
        node, why = await told.get()
        await until(lambda: cluster.failed)
        return node, why

    assert watched(cluster, story) == ("n1", "neither its daemon nor its Ray can be reached")
    assert (cluster.lost, cluster.failed) == ({"n1"}, ["n1"])


def test_daemon_that_was_restarted_is_no_loss(cluster):
    async def story(told):
        await until(lambda: cluster.asked)
        cluster.heartbeat.close()
        cluster.heartbeat = HeartbeatServer("127.0.0.1", "n1")
        await until(lambda: cluster.asked >= 2)
        cluster.heartbeat.drain(60)  # heard: the new one is listened to
        node, seconds = await told.get()
        return node, 0 < seconds <= 60

    assert watched(cluster, story) == ("n1", True)
    assert cluster.lost == set()


def test_process_too_busy_to_accept_still_takes_connections():
    with socket.create_server(("127.0.0.1", 0)) as nobody_accepts:
        assert any_listens([nobody_accepts.getsockname()])
        address = nobody_accepts.getsockname()
    assert not any_listens([address])


def test_stranger_at_the_old_port_is_not_taken_for_the_node(cluster):
    async def story(told):
        await until(lambda: cluster.asked)
        cluster.heartbeat.close()
        cluster.heartbeat = HeartbeatServer("127.0.0.1", "somebody else")
        await until(lambda: cluster.asked >= 3)  # it hangs up and asks again
        return told.empty()

    assert watched(cluster, story)
