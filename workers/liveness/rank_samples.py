"""Numbers of all ranks, which rank 0 gets from the sum on which the ranks agree anyway, so that no rank needs to be
asked: samples of their times and memory every few seconds, and which ranks are persistently slower than others that do
the same work. Pure Python."""

from __future__ import annotations

import base64
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

from manta.workers.protocol.json_codec import JsonObject

EVERY_SECONDS = 2.0
"""The shortest time that a sample covers."""

RATIO = 1.5
"""A rank is slow in a step if it takes this many times the median of its stage,"""
MIN_SECONDS = 0.05
"""and at least this many seconds more: less is not worth reporting."""
WINDOW, SLOW_STEPS = 24, 20
"""A straggler is slow in this many of this many consecutive steps."""


@dataclass(frozen=True)
class Straggler:
    """One rank that holds up the others."""

    rank: int
    own_seconds: float
    """Median own time of the rank over the window."""
    usual_seconds: float
    """Median over the window of the median own time in the rank's stage."""
    slow_steps: int
    """Steps of the window in which it was slow."""

    @property
    def sentence(self) -> str:
        """A sentence for people."""
        return (
            f"rank {self.rank} slows the others down: its own work takes {self.own_seconds:.3f} s per step, that of "
            f"its peers {self.usual_seconds:.3f} s, in {self.slow_steps} of the last {WINDOW} steps"
        )

    def to_json(self) -> dict[str, Any]:
        """The evidence, for the event's data."""
        return {
            "straggler": self.rank,
            "own_seconds": round(self.own_seconds, 4),
            "usual_seconds": round(self.usual_seconds, 4),
            "slow_steps": self.slow_steps,
            "window": WINDOW,
        }


class Stragglers:
    """Watches the own times of all ranks, step by step. Own time is the part of a step that a rank did not spend
    waiting for others, so a straggler shows only in its own number. Only ranks of the same stage, which do equal work,
    are compared; the time of one whose experts get more tokens than the mean is divided by how many times as many: it
    has more work, and is not slow."""

    def __init__(self, stages: Sequence[int]):
        """`stages`: the stage of each rank."""
        self._stages = [[rank for rank, of in enumerate(stages) if of == stage] for stage in sorted(set(stages))]
        self._window: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._slow: deque[frozenset[int]] = deque(maxlen=WINDOW)
        self._named: set[int] = set()

    def add(self, own_seconds: Sequence[float], loads: Sequence[float] | None = None) -> list[Straggler]:
        """Add every rank's own time in one more step; returns the ranks that have become stragglers with it. A rank is
        reported again only after it has kept up for most of a window. `loads`: of each rank, the tokens that its
        experts got over the mean."""
        if loads is not None:
            own_seconds = [seconds / max(1.0, load) for seconds, load in zip(own_seconds, loads, strict=True)]
        self._window.append(own_seconds)
        self._slow.append(frozenset(rank for stage in self._stages for rank in _slow_ones(stage, own_seconds)))
        counts = {rank: sum(rank in slow for slow in self._slow) for rank in {*self._slow[-1], *self._named}}
        self._named = {rank for rank in self._named if counts[rank] > WINDOW // 2}
        stragglers = sorted(rank for rank, count in counts.items() if count >= SLOW_STEPS and rank not in self._named)
        self._named.update(stragglers)
        return [self._straggler(rank, counts[rank]) for rank in stragglers]

    @property
    def named(self) -> list[Straggler]:
        """The reported ones that still hold up the others, with their current numbers."""
        return [self._straggler(rank, sum(rank in slow for slow in self._slow)) for rank in sorted(self._named)]

    def _straggler(self, rank: int, slow_steps: int) -> Straggler:
        stage = next(stage for stage in self._stages if rank in stage)
        usual = [_usual(stage, own) for own in self._window]
        return Straggler(rank, _median([own[rank] for own in self._window]), _median(usual), slow_steps)


def _slow_ones(stage: Sequence[int], own_seconds: Sequence[float]) -> list[int]:
    if len(stage) < 2:
        return []
    usual = _usual(stage, own_seconds)
    bound = max(RATIO * usual, usual + MIN_SECONDS)
    return [rank for rank in stage if own_seconds[rank] > bound]


def _usual(stage: Sequence[int], own_seconds: Sequence[float]) -> float:
    return _median([own_seconds[rank] for rank in stage])


def _median(values: Sequence[float]) -> float:
    """The lower one of the two in the middle, so that of two ranks the quicker one is the measure."""
    return sorted(values)[(len(values) - 1) // 2]


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
    expert_tokens: str | None = None
    """Tokens that chose each expert in the last step, [layers with experts, experts]; None without experts."""


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
