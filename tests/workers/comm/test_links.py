"""Links deliver what was sent, never block each other, and notice a peer's end, a bug and a stranger."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest
import torch
import torch.distributed as dist
from rank_threads import HOST, connected, run_threads

from workers.comm.links import Links
from workers.errors import MantaError, PeerLost
from workers.liveness.progress import CONNECTING_CHANNEL, Progress

MILLION = 1_000_000


def pair(store: dist.Store | None = None) -> list[Links]:
    """Two ranks, linked."""
    store = store or dist.HashStore()
    return run_threads(2, lambda rank: Links(rank, range(2), store, 1, HOST))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_messages_arrive_in_order_and_whole(dtype):
    sent = [torch.arange(size, dtype=torch.float64).to(dtype) for size in (1, 0, 7, 100_003)]

    def body(links: Links) -> list[torch.Tensor]:
        if links.rank == 0:
            for operation in [links.send(1, 5, tensor) for tensor in sent]:
                operation.wait()
            return sent
        got = [torch.zeros_like(tensor) for tensor in sent]
        for operation in [links.receive(0, 5, tensor) for tensor in got]:
            operation.wait()
        return got

    _, got = connected(2, body)
    assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))


def test_big_messages_both_ways_at_once_do_not_block_each_other():
    def body(links: Links) -> bool:
        mine, theirs = torch.full((2 * MILLION,), float(links.rank)), torch.empty(2 * MILLION)  # 8 MB
        sends = [links.send(1 - links.rank, 0, mine) for _ in range(3)]
        for _ in range(3):
            links.receive(1 - links.rank, 0, theirs).wait()
        for send in sends:
            send.wait()
        return bool((theirs == 1 - links.rank).all())

    assert connected(2, body) == [True, True]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that holds far less than two million numbers between two ranks, on every machine."""
    monkeypatch.setattr("workers.comm.links._BUFFER_BYTES", 64 * 1024)


def test_a_send_that_waits_goes_out_while_the_rank_waits_for_somebody_else(small_buffers):
    """0 sends much to 1 and then waits for 2, which waits for 1, which waits for 0's message."""
    begun = threading.Event()

    def body(links: Links) -> float:
        big, word = torch.ones(2 * MILLION), torch.zeros(1)
        if links.rank == 0:
            send = links.send(1, 0, big)
            assert not send.done, "more than the kernel takes"
            begun.set()
            links.receive(2, 0, word).wait()
            send.wait()
        elif links.rank == 1:
            assert begun.wait(20)
            links.receive(0, 0, big).wait()
            links.send(2, 0, big[:1]).wait()
        else:
            links.receive(1, 0, word).wait()
            links.send(0, 0, word).wait()
        return word.item()

    assert connected(3, body) == [1.0, 0.0, 1.0]


def test_a_receive_that_waits_goes_on_while_the_rank_waits_for_somebody_else(small_buffers):
    """0 waits for 2, which waits for 1, which waits until 0 has taken more than the kernel holds."""

    def body(links: Links) -> float:
        big, word = torch.zeros(2 * MILLION), torch.zeros(1)
        if links.rank == 0:
            receive = links.receive(1, 0, big)
            links.receive(2, 0, word).wait()
            receive.wait()
        elif links.rank == 1:
            links.send(0, 0, big.fill_(1.0)).wait()
            links.send(2, 0, big[:1]).wait()
        else:
            links.receive(1, 0, word).wait()
            links.send(0, 0, word).wait()
        return big.mean().item() + word.item()

    assert connected(3, body) == [2.0, 1.0, 1.0]


def test_a_dead_peer_ends_a_receive():
    first, second = pair()
    operation = first.receive(1, 0, torch.zeros(1))
    second.close()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        operation.wait()
    first.close()


def test_a_dead_peer_ends_a_receive_that_waits_already():
    first, second = pair()
    waits = threading.Event()

    def body(rank: int) -> None:
        if rank == 0:
            operation = first.receive(1, 0, torch.zeros(1))
            waits.set()
            operation.wait()
        else:
            waits.wait()
            second.close()

    lost, _ = run_threads(2, body)
    assert isinstance(lost, PeerLost)
    first.close()


def test_a_dead_peer_ends_a_send():
    first, second = pair()
    second.close()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        for _ in range(10):
            first.send(1, 0, torch.zeros(2 * MILLION)).wait()
    first.close()


def test_the_death_of_one_frees_all_who_wait_in_a_chain():
    """2 waits for 1, 1 for 0; 0 dies, 1 closes its links as every rank that fails does."""

    def body(links: Links) -> str:
        if links.rank == 0:
            links.close()
            return "dead"
        try:
            links.receive(links.rank - 1, 0, torch.zeros(1)).wait()
        except PeerLost:
            return "freed"
        finally:
            links.close()
        return "got something"

    assert connected(3, body) == ["dead", "freed", "freed"]


@pytest.mark.parametrize("sent", [3, 4, 5], ids=["shorter", "of another channel", "longer"])
def test_a_message_that_was_not_due_is_an_error(sent):
    first, second = pair()
    first.send(1, 7, torch.zeros(sent)).wait()
    (error,) = run_threads(1, lambda _: second.receive(0, 2, torch.zeros(4)).wait())
    assert isinstance(error, MantaError)
    assert f"rank 0 sent (channel, bytes) (7, {4 * sent}) where (2, 16) was due" in str(error)
    first.close()
    second.close()


def knock(store: dist.Store, hello: bytes) -> socket.socket:
    """Somebody who connects to rank 0 and says `hello`."""
    host, port = store.get("address/0").decode().rsplit(":", 1)
    stranger = socket.create_connection((host, int(port)))
    stranger.sendall(hello)
    return stranger


@pytest.mark.parametrize(
    "hello",
    [b"", b"GET", b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n", struct.pack("<QQ", 8, 1), struct.pack("<QQ", 9, 5)],
    ids=["silent", "short", "another protocol", "an older generation", "an unknown rank"],
)
def test_strangers_are_refused_and_hold_nobody_up(hello):
    store = dist.HashStore()
    strangers = []

    def body(rank: int) -> Links:
        if rank == 1:
            strangers.append(knock(store, hello))
        return Links(rank, range(2), store, 9, HOST)

    first, second = run_threads(2, body, seconds=20)
    found = torch.zeros(1)
    first.send(1, 0, torch.ones(1)).wait()
    second.receive(0, 0, found).wait()
    assert found == 1
    strangers[0].settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        assert strangers[0].recv(1) == b"", "a stranger is told nothing"
    for each in (first, second, *strangers):
        each.close()


def test_a_peer_that_cannot_be_reached_is_named():
    store = dist.HashStore()
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    store.set("address/0", f"{HOST}:{port}")
    with pytest.raises(PeerLost, match=f"rank 0 cannot be reached at {HOST}:{port}"):
        Links(1, [0], store, 1, HOST)


def test_links_that_were_closed_say_so():
    first, second = pair()
    operation = first.receive(1, 0, torch.zeros(1))
    first.close()
    with pytest.raises(PeerLost):
        operation.wait()
    second.close()


class NotingProgress(Progress):
    """Says when a wait has begun, and for whom."""

    def __init__(self) -> None:
        self.waits, self.waited_for = threading.Event(), []
        super().__init__()

    def waits_for(self, peer: int, channel: int, sending: bool) -> None:
        self.waited_for.append((peer, channel))
        self.waits.set()


@pytest.mark.parametrize("rank", [0, 1], ids=["that is to be called", "that looks for the other's address"])
def test_a_rank_whose_generation_ends_before_its_peer_comes_gives_up(rank):
    """The other rank never calls, nor says where it is: only `is_over` can free this one."""
    over, progress = threading.Event(), NotingProgress()

    def body(thread: int) -> None:
        if thread == 0:
            Links(rank, range(2), dist.HashStore(), 1, HOST, over.is_set, progress)
        else:
            progress.waits.wait()
            over.set()

    lost, _ = run_threads(2, body)
    assert isinstance(lost, PeerLost)
    assert "is over" in str(lost)
    assert set(progress.waited_for) == {(1 - rank, CONNECTING_CHANNEL)}


def test_a_generation_that_is_over_already_is_not_waited_for():
    with pytest.raises(PeerLost, match="is over"):
        Links(0, range(2), dist.HashStore(), 1, HOST, lambda: True)


def test_the_record_learns_for_how_long_a_rank_waits():
    store, progress = dist.HashStore(), NotingProgress()
    first, second = run_threads(2, lambda rank: Links(rank, range(2), store, 1, HOST, progress=[progress, None][rank]))
    before = progress.idle_seconds
    progress.waits.clear()

    def body(rank: int) -> None:
        if rank == 0:
            first.receive(1, 0, torch.zeros(1)).wait()
        else:
            progress.waits.wait()
            second.send(0, 0, torch.ones(1)).wait()

    run_threads(2, body)
    assert progress.idle_seconds > before
    for each in (first, second):
        each.close()
