"""Work that all ranks do together concurrently with training, on a separate thread and separate connections: each does
its part, rank 0 combines the results, and every rank gets its share of the result or the error.

Messages are JSON of types that both ends specify (`workers/protocol/json_codec.py`): nothing that a rank receives can
be executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from manta.workers.comm.grid import AXES
from manta.workers.comm.links import Links
from manta.workers.errors import MantaError
from manta.workers.liveness.progress import Progress
from manta.workers.protocol.json_codec import Codec, MalformedMessage, codec_of

Part = TypeVar("Part")
Share = TypeVar("Share")

_CHANNEL = 0
WORLD = AXES.index("world")
"""The name in records for a wait for such work."""
_MESSAGE_BYTES = 1 << 30
"""Marks that a rank has nothing more to send."""


class SharedWorkFailed(MantaError):
    """The error of some rank's part of such work; also if a rank sent something invalid."""


class SharedWork:
    """The ranks of one generation, joined to rank 0. Used by one thread at a time."""

    def __init__(self, links: Links | None = None, size: int = 1):
        """`links`: between rank 0 and each other rank; None for a single rank."""
        self._links, self._size = links, size
        self.awaited: int | None = None
        """The rank whose message is being waited for. For any thread."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self._links is None else self._links.rank

    def together(
        self,
        part: Callable[[], Part],
        combine: Callable[[list[Part]], list[Share]],
        kinds: tuple[Any, Any],
        progress: Progress | None = None,
    ) -> Share:
        """Runs `part` on every rank; on rank 0 `combine` of all results, in order of ranks; returns this rank's share
        of what that returns. `kinds`: the types of a part and of a share, as annotations, which determine their
        encoding. `progress`: the calling thread's record, if it has one, of the rank that it waits for.

        Raises the error of a single rank as it is, SharedWorkFailed on every rank if any part or `combine` has failed
        or a rank sends anything of another type, PeerLost if a rank is lost.
        """
        if self._links is None:
            return combine([part()])[0]
        parts, shares = (codec_of(kind) for kind in kinds)
        own_result = _attempt(part, self.rank)
        if self.rank > 0:
            self._send(0, parts, own_result)
            value, problem = self._receive(0, shares, progress)
        else:
            others = [self._receive(rank, parts, progress) for rank in range(1, self._size)]
            value, problem = self._combine([own_result, *others], combine, shares)
        if problem is not None:
            raise SharedWorkFailed(problem)
        result: Share = value
        return result

    def _combine(self, parts: list[_Outcome], combine: Callable[[list[Any]], list[Any]], kind: Codec) -> _Outcome:
        problem = next((problem for _, problem in parts if problem is not None), None)
        shares: list[Any] = [None] * self._size
        if problem is None:
            combined, problem = _attempt(lambda: combine([value for value, _ in parts]), 0)
            shares = combined if problem is None else shares
        for rank in range(1, self._size):
            self._send(rank, kind, (shares[rank], problem))
        return shares[0], problem

    def _send(self, rank: int, kind: Codec, outcome: _Outcome) -> None:
        assert self._links is not None
        value, problem = outcome
        document = {"value": kind.encode(value)} if problem is None else {"problem": problem}
        content = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        self._links.send(rank, _CHANNEL, torch.tensor([len(content)])).wait()
        self._links.send(rank, _CHANNEL, content).wait()

    def _receive(self, rank: int, kind: Codec, progress: Progress | None) -> _Outcome:
        assert self._links is not None
        length = torch.zeros(1, dtype=torch.int64)
        self.awaited = rank
        if progress is not None:
            progress.waits_for(rank, WORLD, sending=False)
        self._links.receive(rank, _CHANNEL, length).wait()
        self.awaited = None
        if progress is not None:
            progress.moved()
        if not 0 <= int(length) <= _MESSAGE_BYTES:
            return None, f"rank {rank} sent an invalid length: {int(length)} bytes"
        content = torch.empty(int(length), dtype=torch.uint8)
        self._links.receive(rank, _CHANNEL, content).wait()
        try:
            document = json.loads(content.numpy().tobytes())
            if "problem" in document:
                return None, str(document["problem"])
            return kind.decode(document["value"]), None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MalformedMessage) as error:
            return None, f"rank {rank} sent an invalid message: {_sentence(error)}"


_Outcome = tuple[Any, str | None]
"""(result, None), or (None, the problem)."""


def _attempt(work: Callable[[], Any], rank: int) -> _Outcome:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - all ranks get it and raise it
        return None, f"rank {rank}: {_sentence(error)}"


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[-1]}" if lines else "")
