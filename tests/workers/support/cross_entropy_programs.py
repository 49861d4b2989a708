"""Programs for ranks: the vocabulary-parallel cross-entropy of given logits."""

from __future__ import annotations

from typing import Any

import torch

from manta.workers.comm.comm import Comm
from manta.workers.parallel.tensor.cross_entropy import cross_entropy_and_log_z, vocabulary_parallel_cross_entropy


def cross_entropy(comm: Comm, logits: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> tuple[Any, Any]:
    """Loss of each token, and this rank's gradient of the losses weighted 1, 2, 3, ..., for logits [n, v padded]."""
    mine = _columns(comm, logits)
    losses = vocabulary_parallel_cross_entropy(mine, targets, vocabulary, comm)
    losses.backward(torch.arange(1, len(targets) + 1, dtype=logits.dtype))
    return losses.detach(), mine.grad


def cross_entropy_with_squares(
    comm: Comm, logits: torch.Tensor, targets: torch.Tensor, vocabulary: int, weight: float
) -> tuple[Any, Any, Any]:
    """Loss and squared log Z of each token, and this rank's gradient of both, the squares times `weight`, both weighted
    1, 2, 3, ..., for logits [n, v padded]."""
    mine = _columns(comm, logits)
    losses, squares = cross_entropy_and_log_z(mine, targets, vocabulary, comm)
    (losses + weight * squares).backward(torch.arange(1, len(targets) + 1, dtype=losses.dtype))
    return losses.detach(), squares.detach(), mine.grad


def _columns(comm: Comm, logits: torch.Tensor) -> torch.Tensor:
    """This rank's part of the logits."""
    columns = logits.shape[1] // comm.size("tensor")
    start = comm.index("tensor") * columns
    return logits[:, start : start + columns].clone().requires_grad_()
