"""What ranks do together is everybody's, also where it fails; what makes no sense is told, and never run."""

from __future__ import annotations

import json
import os
import pickle
import time
from dataclasses import dataclass

import pytest
import torch
from rank_threads import connected

from manta.workers.comm.links import Links
from manta.workers.comm.shared_work import SharedWork, SharedWorkFailed
from manta.workers.liveness.progress import Progress, _parse


@dataclass(frozen=True)
class Part:
    """What a rank tells."""

    rank: int
    words: tuple[str, ...] = ()


KINDS = (Part, list[Part])


def test_each_part_comes_to_the_first_rank_and_each_share_to_its_own():
    def body(links: Links) -> list[Part]:
        mine = Part(links.rank, ("a", "\N{GREEK SMALL LETTER BETA}"))
        return SharedWork(links, 3).together(lambda: mine, lambda parts: [parts[rank:] for rank in range(3)], KINDS)

    assert [[part.rank for part in share] for share in connected(3, body)] == [[0, 1, 2], [1, 2], [2]]


def test_shared_work_records_for_whom_each_rank_waits():
    """A rank that stands still for long and waits for nobody counts as one that hangs."""
    records = [Progress() for _ in range(3)]

    def awaited(rank: int) -> int | None:
        record = _parse(bytes(records[rank].memory), torn=False)
        assert record is not None
        return record.waits_for

    def body(links: Links) -> tuple[int | None, int | None]:
        work = SharedWork(links, 3)

        def part() -> Part:
            deadline = time.monotonic() + 20
            while links.rank == 1 and (awaited(0), awaited(2)) != (1, 0):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            return Part(links.rank)

        work.together(part, lambda parts: [parts] * 3, KINDS, records[links.rank])
        return work.awaited, awaited(links.rank)

    assert connected(3, body) == [(None, None)] * 3


def test_shared_work_of_a_single_rank_sends_nothing():
    assert SharedWork().together(lambda: object, lambda parts: parts, KINDS) is object


@pytest.mark.parametrize("who", ["rank 0", "rank 1", "what combines"])
def test_shared_work_failure_on_one_rank_is_raised_on_all(who):
    def body(links: Links) -> str:
        def part() -> Part:
            if who == f"rank {links.rank}":
                raise OSError("the disk is full")
            return Part(links.rank)

        def combine(parts: list[Part]) -> list[list[Part]]:
            raise OSError("the disk is full" if who == "what combines" else "it was combined though a part is missing")

        with pytest.raises(SharedWorkFailed) as caught:
            SharedWork(links, 3).together(part, combine, KINDS)
        return str(caught.value)

    rank = 1 if who == "rank 1" else 0
    assert connected(3, body) == [f"rank {rank}: OSError: the disk is full"] * 3


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def say(links: Links, to: int, content: bytes) -> None:
    """Send what SharedWork would send as a message."""
    links.send(to, 0, torch.tensor([len(content)])).wait()
    links.send(to, 0, torch.frombuffer(bytearray(content), dtype=torch.uint8)).wait()


def hear(links: Links, source: int) -> bytes:
    """What SharedWork has sent."""
    length = torch.zeros(1, dtype=torch.int64)
    links.receive(source, 0, length).wait()
    content = torch.empty(int(length), dtype=torch.uint8)
    links.receive(source, 0, content).wait()
    return content.numpy().tobytes()


NONSENSE = {
    "broken JSON": b'{"value": {"rank"',
    "no text": b"\xff\xfe",
    "no object": b"[1, 2]",
    "nothing in it": b"{}",
    "another type": b'{"value": {"rank": "1"}}',
    "too deep": b"[" * 100_000,
    "a pickle": None,
}


@pytest.mark.parametrize("content", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("sender", [0, 1])
def test_shared_work_names_the_sender_of_an_invalid_message_and_runs_none_of_it(tmp_path, sender, content):
    trap = tmp_path / "it ran"
    content = content or pickle.dumps((Trap(str(trap)), None))

    def body(links: Links) -> str:
        if links.rank != sender:
            with pytest.raises(SharedWorkFailed) as caught:
                SharedWork(links, 2).together(lambda: Part(links.rank), lambda parts: [parts] * 2, KINDS)
            return str(caught.value)
        if sender == 1:
            say(links, 0, content)
        answer = hear(links, 1 - sender)
        if sender == 0:
            say(links, 1, content)
        return json.loads(answer).get("problem", "")

    said = connected(2, body)
    assert said[1 - sender].startswith(f"rank {sender} sent an invalid message: ")
    assert said[sender] == (said[0] if sender == 1 else ""), "all ranks learn what one of them said"
    assert not trap.exists()


@pytest.mark.parametrize("length", [-1, 1 << 40])
def test_shared_work_refuses_an_invalid_length_without_allocating_it(length):
    def body(links: Links) -> None:
        if links.rank == 1:
            links.send(0, 0, torch.tensor([length])).wait()
            hear(links, 0)
            return
        with pytest.raises(SharedWorkFailed, match=f"rank 1 sent an invalid length: {length} "):
            SharedWork(links, 2).together(lambda: Part(0), lambda parts: [parts] * 2, KINDS)

    connected(2, body)
