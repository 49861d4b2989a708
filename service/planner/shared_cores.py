"""A pipeline whose ranks share the cores of a node: each of those that compute gets an equal part of them. Pure Python.

Ranks may be more than cores. Then a step takes at least all ranks' work over the cores, and at least what its longest
chain of passes takes; how these two meet is what the simulation of processor sharing says (the ideal of which a
kernel's fair scheduler is an approximation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = 1e-9
"""Part of a pass that may be left of it when it is done."""

Pass = tuple[float, tuple[int, ...], tuple[int, ...]]
"""Seconds that a pass takes alone, what must be done before it can begin, and what is done when it ends; both are
numbers below the `count` of `simulate`."""


@dataclass(frozen=True)
class SharedCores:
    """The cores of all nodes of a job, as if they were one node's, and who computes on them."""

    count: float
    """Cores in all."""
    ranks: int
    """Ranks that do the same at the same time: those of a tensor group, in all replicas."""
    all_busy: float
    """Speed of a core while all compute, of that of one alone."""
    threads: int = 1
    """Of each rank."""

    def speed(self, groups: int) -> float:
        """Speed of each rank, of that of one alone, while so many groups of `ranks` compute."""
        wanted = groups * self.ranks * self.threads
        busy = min(self.count, float(wanted))
        share = busy / wanted
        if self.count <= 1:
            return share
        return share * (1 - (1 - self.all_busy) * max(0.0, busy - 1) / (self.count - 1))

    @property
    def most(self) -> float:
        """Most work of ranks that is done in a second."""
        return max(1.0, self.count * self.all_busy) / self.threads


def simulate(
    ranks: Sequence[Sequence[Pass]],
    count: int,
    cores: SharedCores,
    spans: list[tuple[int, int, float, float]] | None = None,
) -> float:
    """Seconds until every rank has done its passes, in their order. `spans`: takes rank, number of the pass on it,
    begin and end of each."""
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
