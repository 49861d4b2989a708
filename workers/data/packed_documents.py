"""Where documents begin in the samples of a micro-batch, so that attention can stay within each.

Shapes: s sequence, b micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch


@dataclass(frozen=True)
class Documents:
    """The documents of some samples, which are consecutive within each sample."""

    starts: tuple[tuple[int, ...], ...]
    """For each sample the positions at which a document begins; the first is 0."""
    length: int
    """Tokens of a sample (s)."""

    @classmethod
    def of(cls, tokens_bs: np.ndarray, end: int) -> Documents:
        """The documents of samples in which `end` is each document's last token."""
        length = tokens_bs.shape[1]
        starts = [(0, *(np.flatnonzero(row[: length - 1] == end) + 1).tolist()) for row in tokens_bs]
        return cls(tuple(starts), length)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document, sample after sample; s b in total."""
        return [end - start for row in self.starts for start, end in pairwise((*row, self.length))]

    def first_tokens(self) -> torch.Tensor:
        """For each token the position at which its document begins: int64 [b, s]."""
        rows = [
            torch.repeat_interleave(torch.tensor(row), torch.tensor([*row, self.length]).diff()) for row in self.starts
        ]
        return torch.stack(rows)
