"""Samples of all ranks that rank 0 gets from the sum on which the ranks agree anyway, one every few seconds: each
rank's own time of a step, its waiting time and its memory. Pure Python."""

from __future__ import annotations

import base64
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add

from workers.liveness.stragglers import Straggler
from workers.protocol.json_codec import JsonObject

EVERY_SECONDS = 2.0
"""The shortest time that a sample covers."""


def packed(numbers: Iterable[float]) -> str:
    """Numbers as text, in single precision: for thousands of ranks a third of the size of JSON."""
    values = array("f", numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def unpacked(text: str) -> list[float]:
    """The numbers in a text made by `packed`. Raises ValueError for any other text."""
    values = array("f")
    values.frombytes(base64.b64decode(text, validate=True))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


@dataclass(frozen=True)
class RankSample:
    """Numbers of all ranks, by rank; lists are encoded by `packed`."""

    step: int
    """The last step that it covers."""
    seconds: float
    """Mean seconds of a step, up to its agreement; the values by rank are means too."""
    own_seconds: str | None
    """The part of these that each rank did not wait for others; None if they cannot know."""
    memory_bytes: str
    """Memory in use on each rank, in the last step."""
    stragglers: tuple[JsonObject, ...] = ()
    """Ranks that hold up the others now: rank, own_seconds, usual_seconds, sentence."""


class RankSampler:
    """Makes samples from the numbers of every step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """`clock`: returns seconds."""
        self._clock = clock
        self._began = clock()
        self._steps, self._seconds, self._own = 0, 0.0, list[float]()

    def add(
        self,
        step: int,
        seconds: float,
        own_seconds: Sequence[float],
        memory_bytes: Sequence[float],
        stragglers: Callable[[], Iterable[Straggler]],
    ) -> RankSample | None:
        """Add one more step; returns a sample of the steps since the last one if one is due."""
        self._steps += 1
        self._seconds += seconds
        self._own = [*map(add, self._own, own_seconds)] if self._own else [*own_seconds]
        if self._clock() - self._began < EVERY_SECONDS:
            return None
        own = packed(each / self._steps for each in self._own) if any(self._own) else None
        named = tuple(_as_json(straggler) for straggler in stragglers())
        sample = RankSample(step, self._seconds / self._steps, own, packed(memory_bytes), named)
        self._began = self._clock()
        self._steps, self._seconds, self._own = 0, 0.0, []
        return sample


def _as_json(straggler: Straggler) -> JsonObject:
    return {
        "rank": straggler.rank,
        "own_seconds": round(straggler.own_seconds, 4),
        "usual_seconds": round(straggler.usual_seconds, 4),
        "sentence": straggler.sentence,
    }
