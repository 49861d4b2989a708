"""A Comm whose collectives return at once, with tensors of the right shape: what a rank does by itself."""

from __future__ import annotations

import torch

from workers.comm.comm import Comm, Handle
from workers.comm.grid import Axis


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


_DONE = _Done()


class FakedComm(Comm):
    """As if every other rank were here and had only zeros."""

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, largest: bool = False) -> None:
        """The tensor as it is."""

    def start_all_reduce(self, axis: Axis, tensor: torch.Tensor) -> Handle:
        """The tensor as it is."""
        return _DONE

    def _start_all_gather(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Handle]:
        if out is None:
            out = tensor.new_empty((tensor.shape[0] * self.size(axis), *tensor.shape[1:]))
        return out, _DONE

    def _start_reduce_scatter(
        self, axis: Axis, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Handle]:
        if out is None:
            out = tensor.new_empty((tensor.shape[0] // self.size(axis), *tensor.shape[1:]))
        return out, _DONE
