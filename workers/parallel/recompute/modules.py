"""How what forward has dropped comes back in backward (see the package for what is dropped)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from workers.comm.comm import Comm

Result = TypeVar("Result")

Again = Callable[[], torch.Tensor]
"""Computes a tensor once more in backward, which forward has not kept."""


def again(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Again:
    """Computes function(x) once more, for whoever takes function(x) and does not keep it."""
    kept = x.detach()
    return lambda: function(kept)


def in_backward(compute: Callable[[], Result], comm: Comm) -> Result:
    """What `compute` computes once more, within a backward that autograd runs; its time counts as recomputation."""
    with comm.step.phase("recompute"), torch.no_grad():
        return compute()


def checkpointed(comm: Comm, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """function(*inputs), of which only the inputs are kept: backward runs its forward again. Dropout needs no generator
    state for that (workers/parallel/tensor/dropout.py)."""
    if not torch.is_grad_enabled():
        return function(*inputs)

    def timed(*inputs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return function(*inputs)
        with comm.step.forward_work():
            return function(*inputs)

    result: torch.Tensor = checkpoint(timed, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result
