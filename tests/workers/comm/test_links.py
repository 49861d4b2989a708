"""Links deliver what was sent, never block each other, and notice a peer's end and a bug."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rank_threads import HOST, NotingProgress, connected, run_threads, secret

from manta.workers.comm.links import Links
from manta.workers.errors import MantaError, PeerLost
from manta.workers.liveness.progress import Progress, ProgressReader, progress_path

MILLION = 1_000_000
SECONDS = 20.0


@pytest.fixture
def pair() -> Iterator[list[Links]]:
    """Two ranks, linked."""
    store = dist.HashStore()
    made = run_threads(2, lambda rank: Links(rank, range(2), store, secret(), HOST))
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_link_messages_arrive_whole_and_in_order(dtype):
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


def test_links_carry_large_messages_in_both_directions_at_once():
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
    monkeypatch.setattr("manta.workers.comm.links._BUFFER_BYTES", 64 * 1024)


def test_pending_send_proceeds_while_its_rank_waits_for_another(small_buffers):
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


def test_pending_receive_proceeds_while_its_rank_waits_for_another(small_buffers):
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


@pytest.mark.parametrize(
    ("closes", "said"), [(1, "lost the connection to rank 1"), (0, None)], ids=["the peer", "the rank itself"]
)
def test_link_receive_fails_with_peer_lost_if_either_end_closed_before_the_wait(pair, closes, said):
    operation = pair[0].receive(1, 0, torch.zeros(1))
    pair[closes].close()
    with pytest.raises(PeerLost, match=said):
        operation.wait()


def test_link_receive_fails_with_peer_lost_if_the_peer_dies_during_the_wait(pair):
    first, second = pair
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


def test_links_receive_is_interrupted_while_a_silent_peer_lives(pair):
    first, second = pair
    waits, ended = threading.Event(), []

    def wait() -> None:
        operation = first.receive(1, 0, torch.zeros(1))
        waits.set()
        try:
            operation.wait()
        except PeerLost as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    first.interrupt()
    thread.join(SECONDS)
    called_away = not thread.is_alive()
    second.close()  # which frees it in any case
    thread.join()
    assert called_away and len(ended) == 1
    with pytest.raises(PeerLost):
        first.receive(1, 0, torch.zeros(1)).wait()


def test_dead_peer_ends_a_send(pair):
    first, second = pair
    second.close()
    with pytest.raises(PeerLost, match="lost the connection to rank 1"):
        for _ in range(10):
            first.send(1, 0, torch.zeros(2 * MILLION)).wait()


def test_death_of_a_rank_frees_a_chain_of_waiting_ranks():
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
def test_unexpected_link_message_is_reported_with_what_was_due(pair, sent):
    first, second = pair
    first.send(1, 7, torch.zeros(sent)).wait()
    (error,) = run_threads(1, lambda _: second.receive(0, 2, torch.zeros(4)).wait())
    assert isinstance(error, MantaError)
    assert f"rank 0 sent (channel, bytes) (7, {4 * sent}) where (2, 16) was due" in str(error)


def watched_pair(progress: Progress) -> list[Links]:
    """Two ranks, linked; the first one keeps a record."""
    store = dist.HashStore()
    return run_threads(2, lambda rank: Links(rank, range(2), store, secret(), HOST, progress=[progress, None][rank]))


@pytest.mark.parametrize("sending", [False, True], ids=["a message", "room for one"])
def test_progress_record_says_for_whom_what_and_how_long_a_rank_waits(small_buffers, sending):
    progress = NotingProgress()
    first, second = watched_pair(progress)
    before = progress.idle_seconds
    progress.waits.clear()
    progress.waited_for.clear()

    def body(rank: int) -> None:
        if rank == 0:
            (first.send if sending else first.receive)(1, 3, torch.zeros(2 * MILLION)).wait()
        else:
            assert progress.waits.wait(20)
            (second.receive if sending else second.send)(0, 3, torch.zeros(2 * MILLION)).wait()

    assert run_threads(2, body) == [None, None]
    assert set(progress.waited_for) == {(1, 3, sending)}
    assert progress.idle_seconds > before
    for each in (first, second):
        each.close()


def test_connected_links_leave_no_rank_recorded_as_waiting(tmp_path):
    progress = Progress.shared(tmp_path, 0)
    reader = ProgressReader(progress_path(tmp_path, 0))
    links = watched_pair(progress)
    assert reader.read().waits_for is None
    for each in links:
        each.close()
    reader.close()


def test_links_send_short_messages_before_they_are_waited_for(pair):
    """So that it travels while its sender computes."""
    first, second = pair
    sent, got = [first.send(1, 0, torch.full((1,), value)) for value in (1.0, 2.0)], torch.zeros(1)
    assert all(each.done for each in sent)
    for value in (1.0, 2.0):
        second.receive(0, 0, got).wait()
        assert got.item() == value
