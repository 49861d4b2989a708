"""The positions in the sequence of the rows that a rank computes: learned and rotary positions and dropout depend on
them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.workers.parallel.tensor.sequence_parallel import Region


@dataclass(frozen=True)
class Positions:
    """Positions of rows, in their order."""

    runs: tuple[tuple[int, int], ...]
    """Consecutive positions: the first of them, and one past the last."""

    @classmethod
    def of(cls, length: int, first: int = 0) -> Positions:
        """`length` consecutive positions from `first` on."""
        return cls(((first, first + length),))

    @property
    def length(self) -> int:
        """Number of rows."""
        return sum(end - first for first, end in self.runs)

    def part(self, index: int, count: int) -> Positions:
        """Positions of part `index` of `count` equal parts of the rows."""
        size, at, runs = self.length // count, 0, []
        for first, end in self.runs:
            low, high = max(first, first + index * size - at), min(end, first + (index + 1) * size - at)
            if low < high:
                runs.append((low, high))
            at += end - first
        return Positions(tuple(runs))

    def outside(self, region: Region) -> Positions:
        """Positions of the rows that this rank has outside of tensor-parallel regions."""
        return self.part(region.comm.index("tensor"), region.sequence_split) if region.sequence_parallel else self

    def numbers(self, device: torch.device) -> torch.Tensor:
        """All of them, int32 [rows]."""
        runs = [torch.arange(first, end, dtype=torch.int32, device=device) for first, end in self.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def rows_of(self, table: torch.Tensor) -> torch.Tensor:
        """The rows of a `table` [s, ...] of all positions; a view of it if they are consecutive."""
        runs = [table[first:end] for first, end in self.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs)
