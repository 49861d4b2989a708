"""Rendezvous and mutual authentication of the ranks of one generation.

Each rank listens on a port of its own, publishes its address in the rendezvous store, and connects to the ranks below
it. Both ends of a connection prove that they know the generation's secret, with numbers used once (nonces):

    caller -> called    generation, its rank, a nonce
    called -> caller    a nonce, proof
    caller -> called    proof

One loop handles all connections at once, so that everything takes one round trip. Anyone may write to the store and
reach the port: without proof nothing is trusted, and a rank cannot be made to wait. Later traffic on a connection is
neither encrypted nor authenticated: an attacker who can change packets in transit is not kept out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from manta.workers.comm.secret import PROOF_BYTES, Secret
from manta.workers.errors import PeerLost
from manta.workers.liveness.progress import CONNECTING_CHANNEL, Progress
from manta.workers.system.sockets import PortRange, host_and_port, listen, split_address

NONCE_BYTES = 32
MAX_UNAUTHENTICATED = 64
"""Most unidentified callers at a time, in addition to those that are expected."""
PATIENCE_SECONDS = 20.0
"""Seconds that a caller may take to identify itself."""
REACH_SECONDS = 20.0
"""Seconds after which a port counts as closed: for busy processes kernels accept connections."""
DISBELIEF_SECONDS = 10.0
"""How long an entry of another process may stand in place of a rank's address before the reader gives up."""
_HELLO = struct.Struct(f"<QQ{NONCE_BYTES}s")  # generation, rank, nonce
_BACKLOG = 4096
# How often a rank that waits for connections checks whether its generation is over: nothing else can wake it there.
_POLL = timedelta(seconds=0.1)
_REPUBLISH_SECONDS = 1.0


class _HungUp(Exception):
    """The other end has closed its connection, or violates the protocol."""


class _Conversation:
    """A connection on which two ranks, or a rank and a stranger, authenticate each other. Never blocks."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._received = b""
        connection.setblocking(False)

    def _receive(self, size: int) -> bytes | None:
        """The next `size` bytes; None until all have arrived. Raises _HungUp."""
        while len(self._received) < size:
            try:
                more = self.connection.recv(size - len(self._received))
            except BlockingIOError:
                return None
            except OSError as error:
                raise _HungUp(error.strerror or str(error)) from error
            if not more:
                raise _HungUp("it closed the connection")
            self._received += more
        received, self._received = self._received, b""
        return received

    def _send(self, message: bytes) -> None:
        """Send a few bytes, which the kernel accepts at once. Raises _HungUp, BlockingIOError without a connection."""
        try:
            count = self.connection.send(message)
        except BlockingIOError:
            raise
        except OSError as error:
            raise _HungUp(error.strerror or str(error)) from error
        if count < len(message):
            raise _HungUp("it does not listen")


class _Call(_Conversation):
    """A connection to rank `peer`, which is at `address`."""

    def __init__(self, rank: int, peer: int, address: str, secret: Secret, here: str):
        """`here`: the caller's own address, for messages."""
        there = split_address(address)
        super().__init__(socket.socket(socket.AF_INET6 if ":" in there[0] else socket.AF_INET, socket.SOCK_STREAM))
        self._rank, self.peer, self._address, self._secret, self._here = rank, peer, address, secret, here
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.greeted = False
        self.since = time.monotonic()
        self._began = self.connection.connect_ex(there)

    def greet(self) -> None:
        """Send the greeting, unless the connection is not established yet. Raises PeerLost."""
        number = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or self._began
        if number not in (0, errno.EINPROGRESS):
            raise self.unreached(os.strerror(number))
        with contextlib.suppress(BlockingIOError):
            self._or_lost(lambda: self._send(_HELLO.pack(self._secret.generation, self._rank, self._nonce)))
            self.greeted = True

    def unreached(self, why: str) -> PeerLost:
        """The error if the connection is not accepted."""
        return PeerLost(f"rank {self.peer} cannot be reached at {self._address} from {self._here}: {why}")

    def proceed(self) -> bool:
        """Whether both ends are authenticated. Raises PeerLost."""
        return self._or_lost(self._continue)

    def _continue(self) -> bool:
        answer = self._receive(NONCE_BYTES + PROOF_BYTES)
        if answer is None:
            return False
        nonces = (self._nonce.hex(), answer[:NONCE_BYTES].hex())
        if not self._secret.proves(answer[NONCE_BYTES:], "called", self.peer, self._rank, *nonces):
            raise PeerLost(f"what answers at {self._address} is not rank {self.peer}: it does not know the secret")
        self._send(self._secret.proof("caller", self.peer, self._rank, *nonces))
        return True

    def _or_lost(self, exchange: Callable[[], bool | None]) -> bool:
        try:
            return bool(exchange())
        except _HungUp as error:
            raise PeerLost(f"lost the connection to rank {self.peer}: {error}") from error


class _Caller(_Conversation):
    """A process that has connected, and may be any process."""

    def __init__(self, rank: int, connection: socket.socket, secret: Secret):
        super().__init__(connection)
        self._rank, self._secret = rank, secret
        self._peer = -1
        self._nonces = ("", "")
        self.since = time.monotonic()

    def proceed(self, awaited: set[int]) -> int | None:
        """The rank of `awaited` that it is, once it has proved that; None until then. Raises _HungUp."""
        if self._peer < 0:
            hello = self._receive(_HELLO.size)
            if hello is None:
                return None
            generation, peer, nonce = _HELLO.unpack(hello)
            if generation != self._secret.generation or peer not in awaited:
                raise _HungUp("a process of another generation, or one that is not expected")
            self._answer(peer, nonce)
        proof = self._receive(PROOF_BYTES)
        if proof is None:
            return None
        proved = self._secret.proves(proof, "caller", self._rank, self._peer, *self._nonces)
        if not proved or self._peer not in awaited:
            raise _HungUp("it does not know the secret")
        return self._peer

    def _answer(self, peer: int, nonce: bytes) -> None:
        own = secrets.token_bytes(NONCE_BYTES)
        self._peer, self._nonces = peer, (nonce.hex(), own.hex())
        self._send(own + self._secret.proof("called", self._rank, peer, *self._nonces))


class Meeting:
    """One rank's part in the meeting of a generation."""

    def __init__(
        self,
        rank: int,
        peers: set[int],
        store: dist.Store,
        secret: Secret,
        host: str,
        is_over: Callable[[], bool],
        progress: Progress,
        ports: PortRange | None = None,
    ):
        """`store`: prefixed by generation and purpose; `host`: this rank's address, to listen on one of `ports`."""
        self._rank, self._store, self._secret, self._host, self._ports = rank, store, secret, host, ports
        self._is_over, self._progress = is_over, progress
        self._below = sorted(peer for peer in peers if peer < rank)
        self._awaited = {peer for peer in peers if peer > rank}
        self._address, self._republish_at = "", 0.0
        self._calls: set[_Call] = set()
        self._callers: dict[_Caller, None] = {}  # the oldest first
        self._met: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def connections(self) -> dict[int, socket.socket]:
        """A non-blocking connection to each peer. Raises PeerLost if a peer is lost meanwhile, if its address in the
        store is never valid, and once the generation is over."""
        try:
            with self._selector, listen(self._host, self._ports, _BACKLOG) as listener:
                self._address = host_and_port(self._host, listener.getsockname()[1])
                self._publish_address()
                # All addresses are read before the first connection: ranks that connect here must not be kept waiting.
                for peer, address in [(peer, self._address_of(peer)) for peer in self._below]:
                    self._call(peer, address)
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ)
                self._handle_connections(listener)
        except BaseException:
            for connection in self._met.values():
                connection.close()
            raise
        finally:
            for conversation in (*self._calls, *self._callers):
                conversation.connection.close()
        return self._met

    def _publish_address(self) -> None:
        """Publish in the store where this rank listens: repeatedly, since others may write there too."""
        proof = self._secret.proof("address", self._rank, self._address).decode()
        self._store.set(f"address/{self._rank}", f"{self._address} {proof}")
        self._republish_at = time.monotonic() + _REPUBLISH_SECONDS

    def _republish_address(self) -> None:
        if time.monotonic() >= self._republish_at:
            with contextlib.suppress(RuntimeError):  # if the store is gone, those that still need it will notice
                self._publish_address()

    def _address_of(self, peer: int) -> str:
        """The address that `peer` has published; waits while others have written something there. Raises PeerLost."""
        key, disbelieved = f"address/{peer}", 0.0
        while True:
            self._raise_if_over()
            self._republish_address()
            self._progress.waits_for(peer, CONNECTING_CHANNEL, sending=False)
            try:
                self._store.wait([key], _POLL)
                address, _, proof = self._store.get(key).partition(b" ")
            except dist.DistStoreError:  # not there yet
                continue
            text = address.decode(errors="replace")
            if self._secret.proves(proof, "address", peer, text):
                return text
            if disbelieved > DISBELIEF_SECONDS:
                raise PeerLost(f"the address of rank {peer} in the rendezvous store was not written by it")
            time.sleep(_POLL.total_seconds())
            disbelieved += _POLL.total_seconds()

    def _raise_if_over(self) -> None:
        if self._is_over():
            raise PeerLost("this generation is over")

    def _handle_connections(self, listener: socket.socket) -> None:
        while self._awaited or self._calls:
            self._raise_if_over()
            self._republish_address()
            self._progress.waits_for(self._missing(), CONNECTING_CHANNEL, sending=False)
            for key, _ in self._selector.select(_POLL.total_seconds()):
                if key.fileobj is listener:
                    self._accept(listener)
                elif isinstance(key.data, _Call):
                    self._proceed_with_call(key.data)
                elif key.data in self._callers:  # otherwise it was just closed to make room
                    self._proceed_with_caller(key.data)
            self._reject_slow()
            self._drop_unreached()

    def _drop_unreached(self) -> None:
        before = time.monotonic() - REACH_SECONDS
        for call in self._calls:
            if not call.greeted and call.since < before:
                raise call.unreached(f"no answer in {REACH_SECONDS:g} s; is that port open between the two?")

    def _missing(self) -> int:
        return min((*self._awaited, *(call.peer for call in self._calls)))

    def _call(self, peer: int, address: str) -> None:
        call = _Call(self._rank, peer, address, self._secret, self._host)
        self._calls.add(call)
        call.greet()  # on the same machine the connection is established at once
        self._selector.register(call.connection, selectors.EVENT_READ if call.greeted else selectors.EVENT_WRITE, call)

    def _proceed_with_call(self, call: _Call) -> None:
        if not call.greeted:
            call.greet()
            if call.greeted:
                self._selector.modify(call.connection, selectors.EVENT_READ, call)
        elif call.proceed():
            self._selector.unregister(call.connection)
            self._calls.discard(call)
            self._met[call.peer] = call.connection

    def _accept(self, listener: socket.socket) -> None:
        try:
            caller = _Caller(self._rank, listener.accept()[0], self._secret)
        except OSError:  # it has closed the connection already
            return
        self._callers[caller] = None
        self._selector.register(caller.connection, selectors.EVENT_READ, caller)
        if len(self._callers) > len(self._awaited) + MAX_UNAUTHENTICATED:
            self._reject(next(iter(self._callers)))
        self._proceed_with_caller(caller)  # its greeting may have arrived already

    def _proceed_with_caller(self, caller: _Caller) -> None:
        try:
            peer = caller.proceed(self._awaited)
        except _HungUp:
            self._reject(caller)
            return
        if peer is not None:
            self._selector.unregister(caller.connection)
            del self._callers[caller]
            self._awaited.discard(peer)
            self._met[peer] = caller.connection

    def _reject_slow(self) -> None:
        before = time.monotonic() - PATIENCE_SECONDS
        while self._callers and (caller := next(iter(self._callers))).since < before:
            self._reject(caller)

    def _reject(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller]
        caller.connection.close()
