"""What the state of a rank consists of: named parts, which snapshots, checkpoints and copies to roll back to walk over,
and the pieces of them that an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from manta.workers.parallel.data.flat import Range

MODEL = "model"
"""Name of the part with the weights of trained parameters, in fp32."""
FROZEN = "frozen"
"""Name of the part with the parameters that are not trained, in the precision of compute. Checkpoints call them
`model.NAME` as well."""


@dataclass(frozen=True)
class StatePart:
    """One named part of a rank's state. A part either has elements of parameters, or it is small and replicated: the
    same on all ranks, such as the scale of the loss."""

    name: str
    """MODEL, FROZEN, a moment of the optimizer (`OptimizerConfig.moments`), or the name of something small; snapshots
    and checkpoints use it."""
    tensors: tuple[torch.Tensor, ...]
    """1-D, of one dtype; one after the other they are the part."""
    changes: bool = True
    """Whether a step may change it."""
    holders: tuple[int, ...] = ()
    """Ranks whose part has the same bits, this one included, ascending."""
    ranges: tuple[Range, ...] = ()
    """Ranges of the flat buffer whose elements the part has, one after the other; none if it is small."""
    saved: tuple[Range, ...] = ()
    """Ranges, each within one of `ranges`, that this rank writes to checkpoints: over all holders each element once."""

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(len(tensor) for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.tensors[0].dtype

    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of `values`, all elements of such a part, one for each of its tensors."""
        return values.split([len(tensor) for tensor in self.tensors])


def tensors_of(parts: Iterable[StatePart]) -> list[torch.Tensor]:
    """The tensors of all these parts, in their order."""
    return [tensor for part in parts for tensor in part.tensors]


def same_state(parts: Iterable[StatePart]) -> list[int]:
    """The ranks of which each of these parts has the same bits, ascending."""
    return sorted(set.intersection(*(set(part.holders) for part in parts)))


@dataclass(frozen=True)
class Piece:
    """A range of the state whose elements have the same weight decay."""

    values: torch.Tensor
    gradient: torch.Tensor
    """The range's part of the flat gradient buffer, where the reduction leaves the sum."""
    moments: tuple[torch.Tensor, ...]
    """Vectors as long as the values, in the order of `OptimizerConfig.moments`."""
    steps: torch.Tensor
    """Steps done, fp32 scalar."""
    rounded: torch.Tensor | None
    """Where the values are also stored in 16 bits; None: nowhere, or not by the update."""


Groups = Mapping[float, Sequence[Piece]]
"""Pieces by their weight decay."""
