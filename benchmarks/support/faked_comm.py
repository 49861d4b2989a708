"""A Comm whose collectives return at once, with tensors of the right shape: what a rank does by itself."""

from __future__ import annotations

import torch

from manta.workers.comm.backend import DONE, Handle
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import Axis


class FakedComm(Comm):
    """As if every other rank were here and had only zeros."""

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool = False) -> None:
        """The tensor as it is."""

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool = False) -> Handle:
        """The tensor as it is."""
        return DONE

    def start_all_gather(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Handle]:
        """Whatever lies in the memory, unless it is given."""
        if out is None:
            out = tensor.new_empty((tensor.shape[0] * self.size(axis), *tensor.shape[1:]))
        return out, DONE

    def start_reduce_scatter(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Handle]:
        """Whatever lies in the memory, unless it is given."""
        if out is None:
            out = tensor.new_empty((tensor.shape[0] // self.size(axis), *tensor.shape[1:]))
        return out, DONE
