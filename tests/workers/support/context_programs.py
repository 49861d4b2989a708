"""Attention of the ranks that share a sequence, for the tests: programs, and what one process computes instead.

Shapes: s sequence, b micro-batch, a heads, g key-value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.data.batches import Documents
from manta.workers.model.core_attention import Visible, explicit_attention
from manta.workers.parallel.context import attention
from manta.workers.parallel.context.attention import ContextAttention
from manta.workers.parallel.context.kernels import WeightDropout
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.spec.sequence_runs import runs_of

S, B, A, D = 16, 2, 4, 6


@dataclass(frozen=True)
class Case:
    """One attention."""

    groups: int = 2
    window: int | None = None
    starts: tuple[tuple[int, ...], ...] | None = None
    """Of documents in each sample."""
    written_out: bool = False
    rate: float = 0.0
    rows: int = 1024
    """Most queries of a tile with a mask, or written out."""

    @property
    def documents(self) -> Documents | None:
        """Those of the samples."""
        return None if self.starts is None else Documents(self.starts, S)

    def drawn(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """q, k, v, a gradient of the result, and the keys of dropout [b, a]."""
        generator = torch.Generator().manual_seed(3)
        shapes = (S, B, A, D), (S, B, self.groups, D), (S, B, self.groups, D), (S, B, A, D)
        inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
        return [*inputs, torch.arange(1, B * A + 1, dtype=torch.int32).view(B, A) * 77]


def whole(case: Case) -> list[torch.Tensor]:
    """Result and gradients of q, k and v, from one process in fp64."""
    *inputs, grad, keys_ba = case.drawn()
    inputs = [x.requires_grad_() for x in inputs]
    comm = Comm(RankGrid(ParallelConfig()), 0, torch.device("cpu"))
    keys = keys_ba if case.rate else None
    result = explicit_attention(*inputs, Visible(case.window), case.documents, False, case.rate, keys, comm)
    return [result.detach(), *torch.autograd.grad(result, inputs, grad)]


def attend(comm: Comm, layout: ParallelConfig, cases: list[Case], dtype: torch.dtype) -> list[list[Any]]:
    """This rank's rows of the same, by the layout's method, as arrays."""
    return [[x.double().numpy() for x in _attend(comm, layout, case, dtype)] for case in cases]


def _attend(comm: Comm, layout: ParallelConfig, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    positions = Positions(runs_of(layout, S, comm.index("context")))
    *own, keys_ba = case.drawn(dtype)
    *inputs, grad = (positions.rows_of(x).clone() for x in own)
    inputs = [x.requires_grad_() for x in inputs]
    dropout = WeightDropout(case.rate, keys_ba) if case.rate else None
    across = ContextAttention(comm, layout, S)
    with mock.patch.object(attention, "MASKED_ROWS", case.rows):
        result = across.attend(*inputs, case.documents, case.window, case.written_out, dropout)
        return [result.detach(), *torch.autograd.grad(result, inputs, grad)]
