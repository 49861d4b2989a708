"""Event simulation of a pipeline whose stages differ, over the schedules that the engine runs, and a lower bound of its
time without simulating it. Pure Python.

Every virtual stage has times of its own. A message delays only the pass that waits for it, or takes time at both ends.

Ranks may share the cores of a node, and there may be more ranks than cores: ranks that compute get equal parts of them.
A step then takes at least the work of all ranks divided by the cores, and at least its longest chain of passes; a
simulation of processor sharing (the ideal that a kernel's fair scheduler approximates) says how these two combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from manta.service.planner.stage_shares import chunks_of
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.action_lists import evaluation_actions, passes_of_rank
from manta.workers.schedules.schedule import Action, Kind
from manta.workers.schedules.stages import chunk_location

_PASSES = frozenset(("forward", "backward", "backward_input", "backward_weight"))
"""Kinds of actions that take time."""
MAX_PASSES = 100_000
"""Most passes that are simulated to find the steady pace of a pipeline."""
ROUNDING = 1e-9
"""Relative difference that rounding may cause between sums of the same seconds."""
_Row = tuple[list[float] | None, float, float, float, list[float] | None, float]
"""Of a pass: when what it needs is done, by micro-batch, and how long a message from there delays it; seconds of the
message that comes in, where it takes this rank's time, and its own; when it is done, by micro-batch; seconds of the
message that leaves."""
Pass = tuple[float, tuple[int, ...], tuple[int, ...]]
"""Seconds of a pass if it runs alone; the events that must come before it; the events that its end causes. Events are
numbers below the `count` of `simulate_sharing`."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on one virtual stage."""

    forward: float
    backward_input: float
    """The half of backward that makes gradients of activations, with what is recomputed."""
    backward_weight: float

    @property
    def seconds(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def backward(self) -> float:
        """Both halves of backward."""
        return self.backward_input + self.backward_weight


class Bar(NamedTuple):
    """One pass on a pipeline rank, including messages that take its time."""

    rank: int
    kind: Kind
    stage: int
    """Index of the virtual stage, in the model's order."""
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of one replica's step."""

    kind: str
    stages: int
    virtual_stages: int
    times: tuple[StageTimes, ...]
    """Times of each virtual stage, in the model's order."""
    messages: tuple[float, ...]
    """Seconds of a message from each virtual stage to the next, and back."""
    blocking: bool
    """Whether a message occupies both its ends, so that no other pass or message runs there meanwhile."""
    cores: SharedCores | None = None
    """The cores that the ranks share; None: each rank has a device of its own."""
    trains: bool = True
    """Whether there are backwards; else only forwards, as in evaluation."""

    def seconds(self, micro_batches: int) -> float:
        """Seconds from the first start to the last end. Once there are a few times as many micro-batches as stages,
        every further one takes equally long, so not all are simulated. If that pace is faster than the busiest rank can
        be, another rank that began later is still catching up, and more micro-batches are simulated."""
        p, busy = self.stages, (1 - ROUNDING) * self._busy()
        few, more = (4 * p, 2 * p) if p <= 8 else (3 * p, p)
        while (count := few + micro_batches % more) + more < micro_batches:
            first, second = self._simulated_twice(count, count + more)
            each = (second - first) / more
            if each >= busy:
                return first + each * (micro_batches - count)
            if 2 * len(self.times) * count > MAX_PASSES:
                return second + busy * (micro_batches - count - more)
            few *= 2
        return self.simulated_seconds(micro_batches)

    def _busy(self) -> float:
        """Seconds that each micro-batch occupies the busiest rank, or all cores, including messages that take its
        time."""
        seconds = [time.seconds if self.trains else time.forward for time in self.times]
        if self.blocking:
            ways = 2 if self.trains else 1
            (before, behind), _ = self._occupied()
            seconds = [own + ways * sum(ends) for own, *ends in zip(seconds, before, behind, strict=True)]
        return self._most(seconds)

    def bars(self, micro_batches: int) -> list[Bar]:
        """Every pass of every rank, with its begin and end."""
        spans: list[tuple[int, int, float, float]] = []
        self.simulated_seconds(micro_batches, spans)
        ranks, held = self._orders(micro_batches), self._held()
        bars = []
        for rank, at, begin, end in sorted(spans):
            kind, micro_batch, chunk = ranks[rank][at]
            bars.append(Bar(rank, kind, held[rank][chunk], micro_batch, begin, end))
        return bars

    def simulated_seconds(self, micro_batches: int, spans: list[tuple[int, int, float, float]] | None = None) -> float:
        """Seconds from the first start to the last end, with every micro-batch simulated. `spans`: receives rank,
        number of the pass on it, begin and end of each pass."""
        if self.cores is not None:
            return self._on_shared_cores(micro_batches, self.cores, spans)
        ranks = self._orders(micro_batches)
        return self._advance(_Clocks.of(self, micro_batches), ranks, [len(passes) for passes in ranks], spans)

    def _simulated_twice(self, fewer: int, more: int) -> tuple[float, float]:
        """`simulated_seconds` for two numbers of micro-batches; the passes with which both begin are simulated once."""
        if self.cores is not None:
            return self.simulated_seconds(fewer), self.simulated_seconds(more)
        shape = self.kind, self.stages, self.virtual_stages, fewer, more, self.trains
        clocks = _Clocks.of(self, more)
        self._advance(clocks, self._orders(more), _alike(*shape))
        ends = [[len(passes) for passes in self._orders(each)] for each in (fewer, more)]
        first = self._advance(clocks.copy(), self._orders(fewer), ends[0])
        return first, self._advance(clocks, self._orders(more), ends[1])

    def _advance(
        self,
        clocks: _Clocks,
        ranks: Sequence[Sequence[Action]],
        ends: Sequence[int],
        spans: list[tuple[int, int, float, float]] | None = None,
    ) -> float:
        """Let each rank do its passes up to number `ends`, as far as their inputs are there. Returns when the last of
        them is done."""
        tables, now, reached = self._tables(clocks.done), clocks.now, clocks.reached
        waiting = True
        while waiting:
            waiting = False
            for rank, passes in enumerate(ranks):
                at, clock, end, rows = reached[rank], now[rank], ends[rank], tables[rank]
                while at < end:
                    kind, micro_batch, chunk = passes[at]
                    needed, delay, arriving, seconds, done, leaving = rows[kind][chunk]
                    begin = clock
                    if needed is not None:
                        ready = needed[micro_batch]
                        if ready < 0:
                            waiting = True
                            break
                        ready += delay
                        if ready > clock:
                            begin = ready
                        clock = begin + arriving
                    clock += seconds
                    if done is not None:
                        done[micro_batch] = clock
                        clock += leaving
                    if spans is not None:
                        spans.append((rank, at, begin, clock))
                    at += 1
                reached[rank], now[rank] = at, clock
        return max(now)

    def _tables(self, done: Sequence[Sequence[list[float]]]) -> list[dict[str, list[_Row]]]:
        """What the simulation reads for each kind of pass on each chunk of each rank. `done`: as in `_Clocks`."""
        none, (arriving, leaving) = [0.0] * len(self.times), self._occupied()
        # A message that does not block delays only who waits for it.
        delays = [none, none] if self.blocking else arriving
        if not self.blocking:
            arriving = leaving = [none, none]

        def row(way: int, index: int, seconds: float) -> _Row:
            source = index + 1 if way else index - 1
            needed = done[way][source] if 0 <= source < len(self.times) else None
            return needed, delays[way][index], arriving[way][index], seconds, done[way][index], leaving[way][index]

        def of_kind(kind: str, index: int) -> _Row:
            seconds = getattr(self.times[index], kind)
            if kind == "backward_weight":
                return None, 0.0, 0.0, seconds, None, 0.0
            return row(int(kind != "forward"), index, seconds)

        return [{kind: [of_kind(kind, index) for index in held] for kind in _PASSES} for held in self._held()]

    def _on_shared_cores(
        self, micro_batches: int, cores: SharedCores, spans: list[tuple[int, int, float, float]] | None
    ) -> float:
        """`simulated_seconds` if ranks that compute share cores; messages occupy both ends."""
        count = len(self.times)
        arriving, leaving = self._occupied()

        def key(way: int, index: int, micro_batch: int) -> int:
            return (way * count + index) * micro_batches + micro_batch

        def of(held: Sequence[int], action: Action) -> Pass:
            kind, micro_batch, index = action.kind, action.micro_batch, held[action.chunk]
            seconds: float = getattr(self.times[index], kind)
            if kind == "backward_weight":
                return seconds, (), ()
            way = int(kind != "forward")
            source = index + 1 if way else index - 1
            needed = (key(way, source, micro_batch),) if 0 <= source < count else ()
            return seconds + arriving[way][index] + leaving[way][index], needed, (key(way, index, micro_batch),)

        ranks = self._orders(micro_batches)
        each_rank = [[of(held, pass_) for pass_ in passes] for held, passes in zip(self._held(), ranks, strict=True)]
        return simulate_sharing(each_rank, 2 * count * micro_batches, cores, spans)

    def work(self, micro_batches: int) -> float:
        """Most seconds that any rank computes in the step, or that all cores do, without messages that block."""
        return self._most([time.seconds for time in self.times]) * micro_batches

    def rank_work(self) -> list[float]:
        """Seconds that each rank computes for one micro-batch."""
        return self._by_rank([time.seconds for time in self.times])

    def _most(self, seconds: Sequence[float]) -> float:
        """The most seconds of any rank, or of all cores, if virtual stages take `seconds`."""
        ranks = self._by_rank(seconds)
        if self.cores is None:
            return max(ranks)
        # The ranks of a tensor group, in all replicas, share cores even while no other stage computes.
        return max(max(ranks) / self.cores.speed(1), sum(ranks) * self.cores.ranks / self.cores.most)

    def _by_rank(self, seconds: Sequence[float]) -> list[float]:
        total = [0.0] * self.stages
        for index, each in enumerate(seconds):
            rank, _ = chunk_location(self.kind, self.stages, self.virtual_stages, index)
            total[rank] += each
        return total

    def _held(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stages of each rank, by chunk."""
        return chunks_of(self.kind, self.stages, self.virtual_stages)

    def _orders(self, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        return _orders(self.kind, self.stages, self.virtual_stages, micro_batches, self.trains)

    def _occupied(self) -> tuple[list[list[float]], list[list[float]]]:
        """Seconds of the incoming and of the outgoing message of each virtual stage: [is backward][index]. There is no
        message between virtual stages of the same rank."""
        count = len(self.times)
        ranks = [chunk_location(self.kind, self.stages, self.virtual_stages, index)[0] for index in range(count)]
        between = [self.messages[i] if ranks[i] != ranks[i + 1] else 0.0 for i in range(count - 1)]
        before, behind = [0.0, *between], [*between, 0.0]
        return [before, behind], [behind, before]


@dataclass
class _Clocks:
    now: list[float]
    """Time of each rank."""
    reached: list[int]
    """Number of passes that each rank has done."""
    done: list[list[list[float]]]
    """When the pass of each micro-batch on each virtual stage is done, negative if it is not: [is backward][virtual
    stage][micro-batch]."""

    @classmethod
    def of(cls, pipeline: Pipeline, micro_batches: int) -> _Clocks:
        """The state at the beginning."""
        done = [[[-1.0] * micro_batches for _ in pipeline.times] for _ in range(2)]
        return cls([0.0] * pipeline.stages, [0] * pipeline.stages, done)

    def copy(self) -> _Clocks:
        """A copy, to continue from twice."""
        return _Clocks([*self.now], [*self.reached], [[[*each] for each in way] for way in self.done])


@lru_cache(maxsize=64)
def _alike(kind: str, stages: int, virtual_stages: int, fewer: int, more: int, trains: bool) -> tuple[int, ...]:
    """Number of passes of each rank that are the same at the beginning for both numbers of micro-batches."""
    both = (_orders(kind, stages, virtual_stages, count, trains) for count in (fewer, more))
    return tuple(
        next((at for at, (a, b) in enumerate(zip(*passes, strict=False)) if a != b), len(passes[0]))
        for passes in zip(*both, strict=True)
    )


@lru_cache(maxsize=64)
def _orders(
    kind: str, stages: int, virtual_stages: int, micro_batches: int, trains: bool
) -> tuple[tuple[Action, ...], ...]:
    if trains:
        return tuple(passes_of_rank(kind, rank, stages, virtual_stages, micro_batches) for rank in range(stages))
    evaluated = evaluation_actions(kind, stages, virtual_stages, micro_batches)
    return tuple(tuple(action for action in actions if action.kind in _PASSES) for actions in evaluated)


def min_pipeline_seconds(
    schedule: str,
    chunks: Sequence[Sequence[int]],
    times: Sequence[StageTimes],
    messages: Sequence[float],
    micro_batches: int,
) -> float:
    """Seconds that a pipeline takes at least: a rank begins when the first micro-batch has passed the ranks before it,
    computes all of its passes, and then the gradients of the last micro-batch return through those ranks. If the
    schedule separates the weights' half of backward, that half of up to as many micro-batches as there are ranks may
    come later. `chunks`: virtual stages of each rank; `messages`: seconds of a message between each rank and the
    next."""
    apart = SCHEDULES[schedule].splits_backward
    came, back, least = 0.0, 0.0, 0.0
    for rank, (own, message) in enumerate(zip(chunks, [*messages, 0.0], strict=True)):
        busy = came + micro_batches * sum(times[index].seconds for index in own)
        late = min(micro_batches, len(chunks)) * sum(times[index].backward_weight for index in own) if apart else 0.0
        least = max(least, busy, busy - late + back)
        came += times[rank].forward + message
        back += message + (times[rank].backward_input if apart else times[rank].backward)
    return least


@dataclass(frozen=True)
class SharedCores:
    """The cores of all nodes of a job, as if they were of one node, and the ranks that compute on them."""

    count: float
    """Cores of all nodes."""
    ranks: int
    """Ranks that do the same at the same time: those of a tensor group, in all replicas."""
    all_busy: float
    """Speed of a core while all compute, relative to one alone."""
    threads: int = 1
    """Threads of each rank."""

    def speed(self, groups: int) -> float:
        """Speed of each rank, relative to one alone, while `groups` groups of `ranks` ranks compute."""
        wanted = groups * self.ranks * self.threads
        busy = min(self.count, float(wanted))
        share = busy / wanted
        if self.count <= 1:
            return share
        return share * (1 - (1 - self.all_busy) * max(0.0, busy - 1) / (self.count - 1))

    @property
    def most(self) -> float:
        """Most rank-seconds of work that are done per second."""
        return max(1.0, self.count * self.all_busy) / self.threads


def simulate_sharing(
    ranks: Sequence[Sequence[Pass]],
    count: int,
    cores: SharedCores,
    spans: list[tuple[int, int, float, float]] | None = None,
) -> float:
    """Seconds until every rank has done its passes in order. `spans`: receives rank, number of the pass on it, begin
    and end of each pass."""
    began = [0.0] * len(ranks)
    done = [False] * count
    reached = [0] * len(ranks)
    left: dict[int, float] = {}
    now = 0.0
    while True:
        for rank, passes in enumerate(ranks):
            if rank not in left and reached[rank] < len(passes):
                seconds, needed, _ = passes[reached[rank]]
                if all(done[key] for key in needed):
                    left[rank], began[rank] = seconds, now
        if not left:
            return now
        speed = cores.speed(len(left))
        shortest = min(left.values())
        now += shortest / speed
        for rank in list(left):
            left[rank] -= shortest
            if left[rank] <= ROUNDING * shortest:
                del left[rank]
                if spans is not None:
                    spans.append((rank, reached[rank], began[rank], now))
                for key in ranks[rank][reached[rank]][2]:
                    done[key] = True
                reached[rank] += 1
