"""Ranks as threads of the test's own process, for what needs links alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from manta.workers.comm.links import Links
from manta.workers.comm.secret import SECRET_LENGTH, Secret
from manta.workers.liveness.progress import Progress

HOST = "127.0.0.1"
SECRET = "7" * SECRET_LENGTH


def secret(generation: int = 1) -> Secret:
    """What the ranks of a generation know each other by."""
    return Secret(SECRET, generation, "test")


class NotingProgress(Progress):
    """Says when a wait has begun, and for whom."""

    def __init__(self) -> None:
        self.waits, self.waited_for = threading.Event(), list[tuple[int, int, bool]]()
        super().__init__()

    def waits_for(self, peer: int, channel: int, sending: bool) -> None:
        self.waited_for.append((peer, channel, sending))
        self.waits.set()


def run_threads(count: int, body: Callable[[int], Any], seconds: float = 20.0) -> list[Any]:
    """`body(rank)` in `count` threads; results by rank. A thread's exception is its result, but for what it asserts,
    which is raised here. Fails on a hang."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - the test judges it; pytest's own failures are no Exceptions
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for result in results:
        if isinstance(result, AssertionError | pytest.fail.Exception):
            raise result
    return results


def connected(count: int, body: Callable[[Links], Any], generation: int = 1, star: bool = False) -> list[Any]:
    """`body(links)` on `count` ranks that are all linked to each other, as a `star` to the first one only; every rank
    closes its links at its end."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        peers = [0] if star and rank > 0 else range(count)
        links = Links(rank, peers, store, secret(generation), HOST)
        try:
            return body(links)
        finally:
            links.close()

    results = run_threads(count, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
