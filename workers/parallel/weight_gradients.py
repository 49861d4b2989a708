"""Where weight gradients go: added to the flat gradient buffer as they are computed, in its precision, either at once
or, for the zero-bubble schedules, in a pass of their own (arXiv:2401.10241, section 2: B and W).

Autograd never sees them: a layer's backward hands over a function that computes them, which saves autograd's
temporary copy, and lets the input's gradient go on its way first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Task = Callable[[], None]


class WeightGradients:
    """The weight gradients of one rank's stage."""

    def __init__(self) -> None:
        self._kept: list[Task] | None = None
        self.when_added: Callable[[nn.Parameter], None] | None = None
        """Called with a parameter each time a micro-batch's gradient has been added to it."""

    def submit(self, task: Task) -> None:
        """Run `task`, which adds weight gradients; now, or when the pass that it was kept for comes."""
        if self._kept is None:
            task()
        else:
            self._kept.append(task)

    @property
    def keeping(self) -> bool:
        """Whether tasks are kept for later."""
        return self._kept is not None

    @contextmanager
    def kept(self) -> Iterator[list[Task]]:
        """Within the block, tasks are kept in the list that it gives."""
        tasks: list[Task] = []
        self._kept = tasks
        try:
            yield tasks
        finally:
            self._kept = None

    def add_product(self, weight: nn.Parameter, grads_no: torch.Tensor, inputs_ni: torch.Tensor) -> None:
        """Add grads^T inputs, [out, in], to the gradient of `weight`: n tokens."""
        total_oi = main_grad(weight)
        if total_oi.dtype == grads_no.dtype:
            total_oi.addmm_(grads_no.t(), inputs_ni)
        elif total_oi.is_cuda:
            # The product leaves the tensor cores in fp32, so no rounding lies between it and the sum.
            total_oi.add_(torch.mm(grads_no.t(), inputs_ni, out_dtype=total_oi.dtype))
        else:
            total_oi.add_(grads_no.t() @ inputs_ni)
        self._added(weight)

    def add_sum(self, bias: nn.Parameter, grads_no: torch.Tensor) -> None:
        """Add the sum over tokens, [out], to the gradient of `bias`."""
        total_o = main_grad(bias)
        if total_o.is_cuda or total_o.dtype != grads_no.dtype:
            total_o.add_(grads_no.sum(0, dtype=total_o.dtype))
        else:
            # On a CPU a product with ones reads the rows twice as fast as a sum over dimension 0.
            total_o.addmv_(grads_no.t(), grads_no.new_ones(len(grads_no)))
        self._added(bias)

    def add_rows(self, weight: nn.Parameter, rows_n: torch.Tensor, grads_nh: torch.Tensor) -> None:
        """Add each token's gradient to its row of `weight` [v, h]."""
        total_vh = main_grad(weight)
        if total_vh.is_cuda:
            # index_add_ adds in no fixed order there; this one sorts first.
            wide_nh = grads_nh.to(total_vh.dtype)
            total_vh.add_(torch.ops.aten.embedding_dense_backward(wide_nh, rows_n, total_vh.shape[0], -1, False))
        else:
            total_vh.index_add_(0, rows_n, grads_nh.to(total_vh.dtype))
        self._added(weight)

    def _added(self, parameter: nn.Parameter) -> None:
        if self.when_added is not None:
            self.when_added(parameter)


def main_grad(parameter: nn.Parameter) -> torch.Tensor:
    """The buffer in which `parameter`'s gradient is summed up (see workers/parallel/flat.py)."""
    buffer: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return buffer
