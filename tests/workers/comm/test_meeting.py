"""The ranks of a generation find each other and nobody else, whoever reaches their ports or writes where they meet."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_threads import HOST, SECRET, NotingProgress, run_threads, secret

from manta.workers.comm import meeting
from manta.workers.comm.links import Links
from manta.workers.comm.meeting import MAX_UNAUTHENTICATED, NONCE_BYTES, Meeting
from manta.workers.comm.secret import PROOF_BYTES, Secret
from manta.workers.errors import PeerLost
from manta.workers.liveness.progress import CONNECTING_CHANNEL, Progress
from manta.workers.system.sockets import PortRange

GENERATION = 9


def rank_links(rank: int, store: dist.Store, host: str = HOST, **options) -> Links:
    """One of two ranks of generation 9."""
    return Links(rank, range(2), store, secret(GENERATION), host, **options)


def they_train(first: Links, second: Links) -> bool:
    """Whether what one of them sends comes to the other, both ways."""
    received = [torch.zeros(1), torch.zeros(1)]
    for sender, receiver, into in ((first, second, received[1]), (second, first, received[0])):
        sender.send(receiver.rank, 0, torch.ones(1)).wait()
        receiver.receive(sender.rank, 0, into).wait()
    for each in (first, second):
        each.close()
    return received == [1, 1]


def train_after(visit: Callable[[dist.Store], object]) -> bool:
    """Whether two ranks train after rank 0 had a visitor, for whom rank 1 waits before it comes."""
    store = dist.HashStore()

    def body(rank: int) -> Links:
        if rank == 1:
            visit(store)
        return rank_links(rank, store)

    return they_train(*run_threads(2, body))


def knock(store: dist.Store, words: bytes) -> socket.socket:
    """Somebody who has read where rank 0 is, connects to it and says something."""
    address = store.get("address/0").decode().split()[0]
    host, port = address.rsplit(":", 1)
    stranger = socket.create_connection((host, int(port)))
    stranger.settimeout(20)
    stranger.sendall(words)
    return stranger


def is_turned_away(stranger: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return stranger.recv(1) == b""
    return True


class OneLook:
    """A selector that finds these keys ready, and then nothing."""

    def __init__(self, selector: selectors.BaseSelector, keys: list[selectors.SelectorKey]):
        self.register, self.unregister, self.looks = selector.register, selector.unregister, [keys]

    def select(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        return [(key, selectors.EVENT_READ) for key in self.looks.pop()]


def hello(generation: int, rank: int) -> bytes:
    """How a rank begins."""
    return struct.pack("<QQ", generation, rank) + os.urandom(NONCE_BYTES)


@pytest.mark.parametrize(
    "words",
    [b"", b"GET", b"GET / HTTP/1.1\r\nHost: rank\r\nAccept: text/html\r\n\r\n", hello(8, 1), hello(GENERATION, 5)],
    ids=["silent", "short", "another protocol", "an older generation", "an unknown rank"],
)
def test_strangers_at_a_meeting_learn_nothing_and_delay_nobody(words):
    strangers = []
    assert train_after(lambda store: strangers.append(knock(store, words)))
    assert is_turned_away(strangers[0])


def reset(store: dist.Store) -> None:
    """Hang up with a reset, since nothing may linger."""
    stranger = knock(store, hello(GENERATION, 1)[:5])
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


def guess(store: dist.Store) -> None:
    """Answer the peer's proof with a guess."""
    stranger = knock(store, hello(GENERATION, 1))
    assert len(stranger.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES + PROOF_BYTES
    stranger.sendall(b"0" * PROOF_BYTES)
    assert is_turned_away(stranger)


@pytest.mark.parametrize("visit", [reset, guess, lambda store: knock(store, hello(GENERATION, 1))])
def test_caller_that_hangs_up_guesses_or_leaves_it_at_a_greeting_is_not_taken_for_a_peer(visit):
    visitors = []
    assert train_after(lambda store: visitors.append(visit(store)))


def test_replayed_handshake_of_a_rank_is_refused():
    """Somebody has listened to rank 1, whose network breaks before it gets through."""
    heard = []

    def replay(store: dist.Store) -> None:
        first = knock(store, words := hello(GENERATION, 1))
        answer = first.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        said = secret(GENERATION).proof("caller", 0, 1, words[16:].hex(), answer[:NONCE_BYTES].hex())
        first.close()
        again = knock(store, words)
        again.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        again.sendall(said)
        heard.append(is_turned_away(again))

    assert train_after(replay)
    assert heard == [True]


def test_many_silent_strangers_do_not_keep_ranks_from_meeting():
    strangers = []

    def crowd(store: dist.Store) -> None:
        strangers.extend(knock(store, b"") for _ in range(MAX_UNAUTHENTICATED + 10))
        assert all(is_turned_away(stranger) for stranger in strangers[:9]), "the longest there make room"

    assert train_after(crowd)
    for stranger in strangers:
        stranger.close()


def test_evicted_caller_of_a_meeting_is_asked_nothing_more():
    """Both are seen in one look: who has been there longest, and who takes its place."""
    room = Meeting(0, {1}, dist.HashStore(), secret(GENERATION), HOST, lambda: False, Progress())
    with socket.create_server((HOST, 0)) as listener, contextlib.ExitStack() as callers:
        room._selector.register(listener, selectors.EVENT_READ)
        for _ in range(MAX_UNAUTHENTICATED + 1):
            callers.enter_context(socket.create_connection(listener.getsockname()))
            room._accept(listener)
        oldest = next(iter(room._callers))
        callers.enter_context(socket.create_connection(listener.getsockname()))
        keys = [room._selector.get_key(each) for each in (listener, oldest.connection)]
        room._selector = OneLook(room._selector, keys)
        room._is_over = lambda: not room._selector.looks
        with pytest.raises(PeerLost, match="is over"):
            room._handle_connections(listener)
        assert oldest not in room._callers
        for caller in room._callers:
            caller.connection.close()


def test_silent_stranger_is_turned_away_after_a_while(monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.1)

    def wait(store: dist.Store) -> None:
        assert is_turned_away(knock(store, b""))
        monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 20.0)  # for the peer, which may be slow

    assert train_after(wait)


@pytest.fixture
def stranger() -> socket.socket:
    """Listens, and hangs up on nobody."""
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(20)
        yield listener


def at(listener: socket.socket) -> str:
    return f"{HOST}:{listener.getsockname()[1]}"


def said_by(which: Secret, rank: int, address: str) -> str:
    """What a rank says in the store."""
    return f"{address} {which.proof('address', rank, address).decode()}"


FORGED = {
    "without a proof": lambda address: address,
    "with a proof of nothing": lambda address: f"{address} {'0' * PROOF_BYTES}",
    "by another rank": lambda address: said_by(secret(GENERATION), 1, address),
    "of another generation": lambda address: said_by(secret(GENERATION - 1), 0, address),
    "for another purpose": lambda address: said_by(Secret(SECRET, GENERATION, "another"), 0, address),
    "no text": lambda address: b"\xff\xfe",
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_forged_peer_address_is_replaced_when_the_rank_publishes_its_own_again(monkeypatch, stranger, forge):
    """The rank goes on saying where it is."""
    monkeypatch.setattr(meeting, "_REPUBLISH_SECONDS", 0.2)

    def overwrite(store: dist.Store) -> None:
        store.wait(["address/0"])
        store.set("address/0", forge(at(stranger)))

    assert train_after(overwrite)
    stranger.setblocking(False)
    with pytest.raises(BlockingIOError):  # nobody has called there
        stranger.accept()


class VanishingStore:
    """A store whose process ends once rank 0 has said where it is."""

    def __init__(self, store: dist.Store):
        self._store, self._said = store, False

    def set(self, key: str, value: str) -> None:
        if self._said:
            raise RuntimeError("connection reset by peer")
        self._store.set(key, value)
        self._said = True


def test_vanished_rendezvous_store_does_not_disturb_connected_ranks(monkeypatch):
    """Its owner may have died; whoever still looks for an address finds that out."""
    monkeypatch.setattr(meeting, "_REPUBLISH_SECONDS", 0.0)
    store = dist.HashStore()
    assert they_train(*run_threads(2, lambda rank: rank_links(rank, store if rank else VanishingStore(store))))


def test_forged_address_in_the_rendezvous_store_is_reported(monkeypatch, stranger):
    monkeypatch.setattr(meeting, "DISBELIEF_SECONDS", 0.2)
    store = dist.HashStore()
    store.set("address/0", at(stranger))
    with pytest.raises(PeerLost, match="the address of rank 0 in the rendezvous store was not written by it"):
        rank_links(1, store)


def test_stranger_at_the_port_of_a_dead_rank_is_not_taken_for_it(stranger):
    """The port has become another process's."""
    store = dist.HashStore()
    store.set("address/0", said_by(secret(GENERATION), 0, at(stranger)))

    def body(rank: int) -> None:
        if rank == 1:
            rank_links(1, store)
        connection = stranger.accept()[0]
        connection.sendall(connection.recv(1024).ljust(NONCE_BYTES + PROOF_BYTES, b"0")[: NONCE_BYTES + PROOF_BYTES])

    _, lost = run_threads(2, body)
    assert isinstance(lost, PeerLost)
    assert f"what answers at {at(stranger)} is not rank 0" in str(lost)


def test_rank_meeting_a_peer_that_refuses_reports_both_addresses():
    store = dist.HashStore()
    with socket.create_server((HOST, 0)) as closed:
        address = at(closed)
    store.set("address/0", said_by(secret(GENERATION), 0, address))
    with pytest.raises(PeerLost, match=f"rank 0 cannot be reached at {address} from {HOST}: Connection refused"):
        rank_links(1, store)


@pytest.mark.parametrize("rank", [0, 1], ids=["that is to be called", "that looks for the other's address"])
def test_a_rank_whose_generation_ends_before_its_peer_comes_gives_up(rank):
    """The other rank never calls, nor says where it is: only `is_over` can free this one."""
    over, progress = threading.Event(), NotingProgress()

    def body(thread: int) -> None:
        if thread == 0:
            rank_links(rank, dist.HashStore(), is_over=over.is_set, progress=progress)
        else:
            progress.waits.wait()
            over.set()

    lost, _ = run_threads(2, body)
    assert isinstance(lost, PeerLost)
    assert "is over" in str(lost)
    assert set(progress.waited_for) == {(1 - rank, CONNECTING_CHANNEL, False)}


def test_rank_that_gives_up_a_meeting_disconnects_from_those_it_met():
    """The third rank never comes. The second one has all that it needs, and must not wait for the first for ever."""
    over, store = threading.Event(), dist.HashStore()

    def body(rank: int) -> None:
        if rank == 0:
            Links(0, range(3), store, secret(GENERATION), HOST, is_over=over.is_set)
        else:
            links = rank_links(1, store)
            receive = links.receive(0, 0, torch.zeros(1))
            over.set()
            receive.wait()

    gave_up, lost = run_threads(2, body)
    assert isinstance(gave_up, PeerLost) and "is over" in str(gave_up)
    assert isinstance(lost, PeerLost) and "lost the connection to rank 0" in str(lost)


def test_meeting_of_a_finished_generation_is_not_waited_for():
    with pytest.raises(PeerLost, match="is over"):
        rank_links(0, dist.HashStore(), is_over=lambda: True)


def test_rank_meeting_a_peer_that_does_not_answer_reports_both_addresses(monkeypatch):
    """As behind a firewall that says nothing: here a listener whose queue is full."""
    monkeypatch.setattr(meeting, "REACH_SECONDS", 0.2)
    store = dist.HashStore()
    with socket.create_server((HOST, 0), backlog=0) as full, contextlib.ExitStack() as callers:
        for _ in range(3):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        store.set("address/0", said_by(secret(GENERATION), 0, at(full)))
        with pytest.raises(PeerLost, match=rf"rank 0 cannot be reached at {at(full)} from {HOST}: no answer in 0\.2 s"):
            rank_links(1, store)


def test_ranks_meet_over_ipv6():
    store = dist.HashStore()
    assert they_train(*run_threads(2, lambda rank: rank_links(rank, store, "::1")))


def test_a_rank_listens_on_a_port_of_its_range():
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    store = dist.HashStore()
    over = threading.Event()
    ports = PortRange(port, port)

    def meet():
        with contextlib.suppress(PeerLost):
            Links(0, [1], store, secret(GENERATION), HOST, over.is_set, ports=ports)

    thread = threading.Thread(target=meet)
    thread.start()
    store.wait(["address/0"], timedelta(seconds=20))
    said = store.get("address/0").split()[0].decode()
    over.set()
    thread.join()
    assert said == f"{HOST}:{port}"
