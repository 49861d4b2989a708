"""A pipeline whose ranks share the cores of a node: ranks that compute get equal parts of them. Pure Python.

There may be more ranks than cores. A step then takes at least the work of all ranks divided by the cores, and at least
its longest chain of passes; a simulation of processor sharing (the ideal that a kernel's fair scheduler approximates)
says how these two combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = 1e-9
"""Relative remainder of a pass with which it counts as done."""

Pass = tuple[float, tuple[int, ...], tuple[int, ...]]
"""Seconds of a pass if it runs alone; the events that must come before it; the events that its end causes. Events are
numbers below the `count` of `simulate`."""


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


def simulate(
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
