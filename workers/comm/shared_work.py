"""Work that all ranks do together beside the training, on a thread and over connections of their own: each does its
part, rank 0 combines the results, and everybody gets its share of what came out or learns what went wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from workers.comm.links import Links
from workers.errors import MantaError

Part = TypeVar("Part")
Share = TypeVar("Share")

_CHANNEL = 0


class SharedWorkFailed(MantaError):
    """What some rank's part of a work of all ranks failed with."""


class SharedWork:
    """The ranks of one generation, joined to rank 0. Used by one thread at a time."""

    def __init__(self, links: Links | None = None, size: int = 1):
        """`links`: between rank 0 and each other rank; None for a single rank."""
        self._links, self._size = links, size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._links is None or self._links.rank == 0

    def together(self, part: Callable[[], Part], combine: Callable[[list[Part]], list[Share]]) -> Share:
        """`part` on every rank; on rank 0 `combine` of all results, in order of ranks; what it returns for this rank.

        Raises the error of a single rank as it is, SharedWorkFailed on every rank when any part or `combine` has
        failed, PeerLost when a rank goes away.
        """
        if self._links is None:
            return combine([part()])[0]
        mine = _attempt(part, self._links.rank)
        if self._links.rank > 0:
            self._send(0, mine)
            value, problem = self._receive(0)
        else:
            value, problem = self._combine([mine, *(self._receive(rank) for rank in range(1, self._size))], combine)
        if problem is not None:
            raise SharedWorkFailed(problem)
        result: Share = value
        return result

    def _combine(self, parts: list[tuple[Any, str | None]], combine: Callable[[list[Any]], list[Any]]) -> Any:
        problem = next((problem for _, problem in parts if problem is not None), None)
        shares: list[Any] = [None] * self._size
        if problem is None:
            combined, problem = _attempt(lambda: combine([value for value, _ in parts]), 0)
            shares = combined if problem is None else shares
        for rank in range(1, self._size):
            self._send(rank, (shares[rank], problem))
        return shares[0], problem

    def _send(self, rank: int, value: Any) -> None:
        assert self._links is not None
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._links.send(rank, _CHANNEL, torch.tensor([len(content)])).wait()
        self._links.send(rank, _CHANNEL, content).wait()

    def _receive(self, rank: int) -> Any:
        assert self._links is not None
        length = torch.zeros(1, dtype=torch.int64)
        self._links.receive(rank, _CHANNEL, length).wait()
        content = torch.empty(int(length), dtype=torch.uint8)
        self._links.receive(rank, _CHANNEL, content).wait()
        return pickle.loads(content.numpy().tobytes())


def _attempt(work: Callable[[], Any], rank: int) -> tuple[Any, str | None]:
    """(Result, None), or (None, what went wrong)."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks get it and raise it
        lines = str(error).strip().splitlines()
        return None, f"rank {rank}: {type(error).__name__}" + (f": {lines[-1]}" if lines else "")
