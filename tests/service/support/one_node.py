"""A node that is watched: its Ray and its daemon are sockets of this process."""

import asyncio
import contextlib
import socket

from manta.service.cluster.node_daemons import HeartbeatSource
from manta.service.cluster.node_watch import NodeWatch
from manta.service.cluster.nodes import Nodes, RayNode
from manta.workers.node.heartbeat import HeartbeatServer

SECONDS = 60.0


def bound(address):
    """A socket that keeps a port from others and takes no connection."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(address)
    return made


class OneNode:
    """A cluster of one node, whose Ray is a listening socket and whose daemon sends heartbeats. Its own parts, too."""

    def __init__(self):
        self.nodes = self.daemons = self
        self.lost, self.draining, self.at_rest, self.failed = set(), set(), set(), []
        self.unresponsive, self.unswept = set(), set()
        self.leave_by, self.drain_reasons, self.problems, self.gpus = {}, {}, {}, {}
        self.raylet = socket.create_server(("127.0.0.1", 0))
        self.heartbeat = HeartbeatServer("127.0.0.1", "n1")
        self.asked = 0
        self.daemon_answers = True
        self.looked_for_daemon = 0
        self.alive = True
        """As Ray sees it."""
        self.errors = []
        """What the next looks at Ray's nodes raise."""

    drain, cancel_drain, keep_only = Nodes.drain, Nodes.cancel_drain, Nodes.keep_only

    async def known(self, node=None):
        """The nodes; of `node`, its daemon."""
        if node is not None:
            self.looked_for_daemon += 1
            return self if self.daemon_answers else None
        if self.errors:
            raise self.errors.pop()
        return [RayNode("n1", self.raylet_address, alive=self.alive), RayNode("dead", ("127.0.0.1", 1), alive=False)]

    async def heartbeat_source(self, node):
        self.asked += 1
        return HeartbeatSource(*self.heartbeat.address, self.heartbeat.secret)

    async def fail_calls_to(self, node):
        self.failed.append(node)

    def fall_silent(self):
        """Nothing takes a connection any more."""
        self.raylet.close()
        self.raylet = bound(self.raylet_address)
        self.heartbeat.close()

    async def report_of_loss(self, reports):
        """What the watch tells once a node that it has asked falls silent."""
        await until(lambda: self.asked)
        self.fall_silent()
        return await reports.get()

    def come_back(self):
        self.heartbeat = HeartbeatServer("127.0.0.1", "n1")
        self.raylet.listen()


@contextlib.contextmanager
def one_node():
    """One that listens until the end of the block."""
    made = OneNode()
    made.raylet_address = made.raylet.getsockname()
    try:
        yield made
    finally:
        with contextlib.suppress(OSError):
            made.heartbeat.close()
        made.raylet.close()


@contextlib.asynccontextmanager
async def watching(cluster):
    """What a watch of the node tells, as a queue, while the block is executed."""
    reports = asyncio.Queue()
    watch = NodeWatch(cluster, lambda *lost: reports.put_nowait(lost), lambda *drain: reports.put_nowait(drain))
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(SECONDS):
            yield reports
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)
