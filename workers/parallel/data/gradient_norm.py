"""The squared norm of the gradients that one rank counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from workers.parallel.data.flat import ALIGNMENT, FlatParameters, Range

_LONG_ROW = 4096
"""Elements of a row on a GPU."""


class SquaredNorm(Protocol):
    """The squared norm of a rank's part of the step's summed gradient."""

    def square(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """fp64 scalar, of the gradient of the rank's `parts`, in their order."""
        ...


class CountedNorm:
    """A norm that counts each global parameter once over all ranks."""

    def __init__(self, flat: FlatParameters, owned: list[Range], tensor_index: int):
        """`owned`: the ranges of the flat buffer whose reduced gradients this rank has."""
        self._elsewhere: torch.Tensor | None = None
        """bool: which rows of ALIGNMENT elements of the owned ranges are counted by another rank of the replica."""
        others = flat.not_answered_for(tensor_index)
        if others:
            rows = torch.zeros(flat.size // ALIGNMENT, dtype=torch.bool)
            for start, end in others:
                rows[start // ALIGNMENT : end // ALIGNMENT] = True
            mine = [rows[start // ALIGNMENT : end // ALIGNMENT] for start, end in owned]
            self._elsewhere = torch.cat(mine).to(flat.gradients.device)

    def square(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """fp64 scalar, of the owned ranges' gradient."""
        if self._elsewhere is None and all(part.is_cuda for part in parts):
            return torch.stack([_square_by_long_rows(part) for part in parts]).sum()
        # Short rows, summed in fp64: as exact as squaring in fp64, and forty times as fast on a CPU.
        norms = [torch.linalg.vector_norm(part.view(-1, ALIGNMENT), dim=1) for part in parts]
        rows = torch.cat(norms).double().square()
        return rows.sum() if self._elsewhere is None else rows.masked_fill(self._elsewhere, 0.0).sum()


def _square_by_long_rows(part: torch.Tensor) -> torch.Tensor:
    """fp64 scalar. On a GPU the threads of a block sum one row, and short rows keep few of them busy."""
    end = len(part) // _LONG_ROW * _LONG_ROW
    whole, rest = part[:end].view(-1, _LONG_ROW), part[end:].view(1, -1)
    return torch.stack([torch.linalg.vector_norm(rows, dim=1).double().square().sum() for rows in (whole, rest)]).sum()
