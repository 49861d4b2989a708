"""Messages between the ranks of one generation on CPU: one TCP connection per pair, no helper threads.

A send passes what fits to the kernel and returns; the rest is sent while this rank waits for anything, so two ranks
that send to each other never block each other. A peer's death closes its connections, and the next operation on them
immediately raises PeerLost. Why not gloo: docs/decisions/0001-own-links-on-cpu.md.

Every message carries a header (channel, bytes). Both ends must agree on it: a mismatch is a bug, and is always
reported. Connections are established in `meeting.py`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from manta.workers.comm.meeting import Meeting
from manta.workers.comm.secret import Secret
from manta.workers.errors import MantaError, PeerLost
from manta.workers.liveness.progress import Progress
from manta.workers.system.resources import reserve_files
from manta.workers.system.sockets import PortRange

_HEADER = struct.Struct("<QQ")  # channel, payload bytes
_BUFFER_BYTES = 4 * 1024 * 1024  # requested from the kernel, which may grant less


class Operation:
    """A send or a receive under way."""

    def __init__(
        self,
        links: Links,
        link: _Link,
        channel: int,
        header: bytes | bytearray,
        payload: memoryview,
        expected: bytes | None,
    ):
        self._links, self.link, self.channel = links, link, channel
        self.buffers = [memoryview(header), payload]
        self.header, self.expected = header, expected
        self.done = False

    def wait(self) -> None:
        """Return once the tensor is received, or, for a send, may be changed again. Raises PeerLost."""
        self._links.wait(self)

    def advance(self, count: int) -> None:
        """The next `count` bytes are transferred. Raises MantaError for a complete header that does not match."""
        while self.buffers and count >= len(self.buffers[0]):
            count -= len(self.buffers.pop(0))
            if self.expected is not None and bytes(self.header) != self.expected:
                got, wanted = _HEADER.unpack(self.header), _HEADER.unpack(self.expected)
                raise MantaError(f"rank {self.link.peer} sent (channel, bytes) {got} where {wanted} was due: a bug")
        if self.buffers:
            self.buffers[0] = self.buffers[0][count:]
        else:
            self.done = True


class _Link:
    """The connection to one peer."""

    def __init__(self, peer: int, connection: socket.socket):
        self.peer, self.connection = peer, connection
        self.sends: deque[Operation] = deque()
        self.receives: deque[Operation] = deque()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        connection.setblocking(False)

    def push(self) -> None:
        """Send as much as the kernel accepts. Raises PeerLost."""
        while self.sends:
            try:
                count = self.connection.sendmsg(self.sends[0].buffers)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerLost(f"lost the connection to rank {self.peer}: {error.strerror or error}") from error
            self.sends[0].advance(count)
            if self.sends[0].done:
                self.sends.popleft()

    def pull(self) -> None:
        """Receive what has arrived for posted receives. Raises PeerLost."""
        while self.receives:
            try:
                count = self.connection.recvmsg_into(self.receives[0].buffers)[0]
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerLost(f"lost the connection to rank {self.peer}: {error.strerror or error}") from error
            if count == 0:
                raise PeerLost(f"lost the connection to rank {self.peer}: it was closed")
            self.receives[0].advance(count)
            if self.receives[0].done:
                self.receives.popleft()


class Links:
    """All connections of one rank in one generation."""

    def __init__(
        self,
        rank: int,
        peers: Iterable[int],
        store: dist.Store,
        secret: Secret,
        host: str,
        is_over: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
        ports: PortRange | None = None,
    ):
        """Connect to `peers` through `store` (already prefixed by generation). `secret`: shared with them; `host`: this
        rank's address, where it listens on one of `ports`; `progress` records which peer is waited for, and how long.
        Raises PeerLost if a peer is lost meanwhile, and once `is_over()`; OpenFilesError."""
        self.rank = rank
        self._progress = progress or Progress()
        peers = set(peers) - {rank}
        reserve_files(len(peers))
        meeting = Meeting(rank, peers, store, secret, host, is_over, self._progress, ports)
        self._links = {peer: _Link(peer, connection) for peer, connection in meeting.connections().items()}
        self._progress.moved()

    def send(self, peer: int, channel: int, tensor: torch.Tensor) -> Operation:
        """Start sending the contiguous CPU `tensor`, which must not change until the operation is done."""
        link, payload = self._links[peer], _bytes_of(tensor)
        operation = Operation(self, link, channel, _HEADER.pack(channel, len(payload)), payload, None)
        link.sends.append(operation)
        if len(link.sends) == 1:
            link.push()
        return operation

    def receive(self, peer: int, channel: int, tensor: torch.Tensor) -> Operation:
        """Start receiving into the contiguous CPU `tensor`."""
        link, payload = self._links[peer], _bytes_of(tensor)
        expected = _HEADER.pack(channel, len(payload))
        operation = Operation(self, link, channel, bytearray(_HEADER.size), payload, expected)
        link.receives.append(operation)
        return operation

    def wait(self, operation: Operation) -> None:
        """Transfer everything possible until `operation` is done. Raises PeerLost."""
        if not operation.done:
            operation.link.push()
            operation.link.pull()
        while not operation.done:
            poll = select.poll()
            waiting: dict[int, _Link] = {}
            for link in self._links.values():
                events = (select.POLLOUT if link.sends else 0) | (select.POLLIN if link.receives else 0)
                if events:
                    descriptor = link.connection.fileno()
                    if descriptor < 0:
                        raise PeerLost("this generation's connections were closed")
                    waiting[descriptor] = link
                    poll.register(descriptor, events)
            self._progress.waits_for(operation.link.peer, operation.channel, operation.expected is None)
            began = time.perf_counter()
            ready = poll.poll()
            self._progress.moved(waited=time.perf_counter() - began)
            for descriptor, _ in ready:
                waiting[descriptor].push()
                waiting[descriptor].pull()

    def interrupt(self) -> None:
        """Called by another thread: threads that wait here, now or later, get PeerLost. The peers notice at once."""
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # the peer was faster
                link.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; the peers notice at once."""
        for link in self._links.values():
            link.connection.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
