"""How evenly tokens are spread over experts, and over the ranks that these are on, from the counts that all ranks agree
on in each step: the load of a layer, of a rank, and when it is more than was planned for. Pure Python."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manta.workers.accounting.activation_bytes import IMBALANCE
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.schedules.stages import layers_of, stages_of_rank

STEPS = 100
"""Steps whose tokens are counted together before ranks are judged: routers begin uneven, and a batch may be so."""
AGAIN_SECONDS = 600.0
"""How long the same is not reported again."""
_MOST_NAMED = 8

Tokens = Sequence[Sequence[int]]
"""Tokens of one step, [layers with experts, experts]."""


def expert_load(tokens: Tokens) -> float:
    """Tokens of the busiest expert of a layer over the mean of its experts, in the layer where that is highest."""
    return max((_ratio(counts) for counts in tokens), default=1.0)


def _ratio(counts: Sequence[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


@dataclass(frozen=True)
class Unbalanced:
    """Ranks whose experts got more tokens than was planned for, over STEPS steps."""

    layer: int
    """The model's layer in which they get most."""
    ratio: float
    """Tokens of their experts there, over the mean of all ranks."""
    expert_ratio: float
    """Tokens of the busiest expert there, over the mean of all experts."""
    ranks: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """A sentence for people."""
        few = ", ".join(map(str, self.ranks[:_MOST_NAMED]))
        more = " and others" if len(self.ranks) > _MOST_NAMED else ""
        return (
            f"over {STEPS} steps the experts of rank{'s' if len(self.ranks) > 1 else ''} {few}{more} got "
            f"{self.ratio:.2f} times as many tokens of layer {self.layer} as those of the mean rank: time and memory "
            f"are planned for {IMBALANCE}. A larger model.moe.balance.weight, or balance.bias_rate, spreads tokens "
            "more evenly"
        )

    def to_json(self) -> dict[str, Any]:
        """The evidence, for the event's data."""
        return {
            "layer": self.layer,
            "ratio": round(self.ratio, 4),
            "planned_ratio": IMBALANCE,
            "expert_ratio": round(self.expert_ratio, 4),
            "ranks": [*self.ranks],
        }


class ExpertLoads:
    """Loads of the ranks of one job with experts."""

    def __init__(self, spec: JobSpec, clock: Callable[[], float] = time.monotonic):
        """`clock`: returns seconds."""
        layout, model = spec.layout, spec.model
        self._layers, self._size, self._clock = model.expert_layers, layout.expert_size, clock
        self._again_at, self._steps = -math.inf, 0
        self._sums = [[0] * (model.moe.experts if model.moe is not None else 0) for _ in self._layers]
        shape = layout.schedule, layout.pipeline, layout.virtual_stages
        held = [
            {layer for stage in stages_of_rank(*shape, rank) for layer in layers_of(model.layers, layout, stage)}
            for rank in range(layout.pipeline)
        ]
        self._rows = [[row for row, layer in enumerate(self._layers) if layer in layers] for layers in held]
        grid = RankGrid(layout)
        places = [grid.coordinates(rank) for rank in range(layout.world_size)]
        self._places = [(at.pipeline, layout.expert_index(at.tensor, at.data, at.context) or 0) for at in places]
        """Stage and part of the experts of each rank."""

    def by_rank(self, tokens: Tokens) -> list[float]:
        """For each rank the tokens that its experts get in all its layers, over the mean of the ranks of its stage."""
        if self._size == 1:
            return [1.0] * len(self._places)
        parts = [self._parts(counts) for counts in tokens]
        loads = [self._ratios([sum(column) for column in zip(*(parts[row] for row in rows), strict=True)])
                 for rows in self._rows]  # fmt: skip
        return [loads[stage][part] for stage, part in self._places]

    def add(self, tokens: Tokens) -> Unbalanced | None:
        """Count a step; every STEPS steps, the ranks that got most in these, if that is more than was planned for and
        has not been reported for a while."""
        if self._size == 1:
            return None
        for sums, counts in zip(self._sums, tokens, strict=True):
            sums[:] = map(int.__add__, sums, counts)
        self._steps += 1
        if self._steps < STEPS:
            return None
        found = self._unbalanced(self._sums)
        self._sums, self._steps = [[0] * len(sums) for sums in self._sums], 0
        return found

    def _unbalanced(self, tokens: Tokens) -> Unbalanced | None:
        ratios = [self._ratios(self._parts(counts)) for counts in tokens]
        row = max(range(len(ratios)), key=lambda each: max(ratios[each]))
        most, now = max(ratios[row]), self._clock()
        if most <= IMBALANCE or now < self._again_at:
            return None
        self._again_at = now + AGAIN_SECONDS
        busiest = ratios[row].index(most)
        ranks = [
            rank for rank, (stage, part) in enumerate(self._places) if part == busiest and row in self._rows[stage]
        ]
        return Unbalanced(self._layers[row], most, _ratio(tokens[row]), tuple(ranks))

    def _parts(self, counts: Sequence[int]) -> list[int]:
        """The tokens of each equal part of a layer's experts."""
        each = len(counts) // self._size
        return [sum(counts[start : start + each]) for start in range(0, len(counts), each)]

    def _ratios(self, parts: Sequence[int]) -> list[float]:
        """Each part over their mean; 1 if there are no tokens."""
        total = sum(parts)
        return [part * self._size / total for part in parts] if total else [1.0] * self._size
