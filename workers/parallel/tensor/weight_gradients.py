"""Weight gradients are added to the flat gradient buffer as they are computed, in its precision, either at once or, for
the zero-bubble schedules, in a pass of their own (arXiv:2401.10241, section 2: B and W).

Autograd never sees them: a layer's backward passes on a function that computes them. This avoids autograd's temporary
copy, and lets the input's gradient be sent first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from manta.workers.parallel.tensor.products import Products

Task = Callable[[], None]


class WeightGradients:
    """The weight gradients of one rank's stage."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._kept: list[Task] | None = None
        self._when_added: Callable[[nn.Parameter], None] | None = None

    def submit(self, task: Task) -> None:
        """Run `task`, which adds weight gradients, now or in the pass that it is deferred to."""
        if self._kept is None:
            task()
        else:
            self._kept.append(task)

    @property
    def keeping(self) -> bool:
        """Whether tasks are deferred."""
        return self._kept is not None

    @contextmanager
    def deferred(self) -> Iterator[list[Task]]:
        """Within the block, tasks are deferred to the list that it yields."""
        tasks: list[Task] = []
        self._kept = tasks
        try:
            yield tasks
        finally:
            self._kept = None

    @contextmanager
    def reported(self, when_added: Callable[[nn.Parameter], None] | None) -> Iterator[None]:
        """Within the block, `when_added` is called with a parameter for each micro-batch's gradient that was added."""
        before, self._when_added = self._when_added, when_added
        try:
            yield
        finally:
            self._when_added = before

    def add_product(
        self, weight: nn.Parameter, grads_no: torch.Tensor, inputs_ni: torch.Tensor, is_last: bool = True
    ) -> None:
        """Add grads^T inputs, [out, in], to the gradient of `weight`: n tokens, a micro-batch's last if `is_last`."""
        self._products.add_weight_gradient(main_grad(weight), grads_no, inputs_ni, _take_up(weight))
        if is_last:
            self._added(weight)

    def add_products(
        self, weights: Sequence[nn.Parameter], grads_no: Sequence[torch.Tensor], inputs_ni: torch.Tensor
    ) -> None:
        """Add grads^T inputs, [out, in], to the gradient of each of `weights`, whose layers share their input."""
        totals, keeps = [main_grad(weight) for weight in weights], [_take_up(weight) for weight in weights]
        self._products.add_weight_gradients(totals, grads_no, inputs_ni, keeps)
        for weight in weights:
            self._added(weight)

    def add_sum(self, bias: nn.Parameter, grads_no: torch.Tensor) -> None:
        """Add the sum over tokens, [out], to the gradient of `bias`."""
        self._products.add_bias_gradient(main_grad(bias), grads_no, _take_up(bias))
        self._added(bias)

    def add_rows(self, weight: nn.Parameter, rows_n: torch.Tensor, grads_nh: torch.Tensor) -> None:
        """Add each token's gradient to its row of `weight` [v, h]."""
        total_vh = main_grad(weight)
        if not _take_up(weight):
            total_vh.zero_()
        if total_vh.is_cuda:
            # index_add_ adds in no fixed order there; this one sorts first.
            wide_nh = grads_nh.to(total_vh.dtype)
            total_vh.add_(torch.ops.aten.embedding_dense_backward(wide_nh, rows_n, total_vh.shape[0], -1, False))
        else:
            total_vh.index_add_(0, rows_n, grads_nh.to(total_vh.dtype))
        self._added(weight)

    def _added(self, parameter: nn.Parameter) -> None:
        if self._when_added is not None:
            self._when_added(parameter)


def forget(parameters: Sequence[nn.Parameter]) -> None:
    """Discard the gradients of `parameters`: the next ones overwrite them, which saves clearing and reading them."""
    for parameter in parameters:
        parameter.holds_gradient = False  # type: ignore[attr-defined]


def clear_forgotten(parameters: Sequence[nn.Parameter]) -> None:
    """Clear the gradients of those `parameters` that nothing has been added to since they were discarded."""
    for parameter in parameters:
        if not _take_up(parameter):
            main_grad(parameter).zero_()


def _take_up(parameter: nn.Parameter) -> bool:
    """Whether the next gradient of `parameter` is added, not written over the buffer; all that follow are added."""
    held: bool = parameter.holds_gradient  # type: ignore[attr-defined]
    parameter.holds_gradient = True  # type: ignore[attr-defined]
    return held


def main_grad(parameter: nn.Parameter) -> torch.Tensor:
    """The buffer in which `parameter`'s gradient is summed (see workers/parallel/data/flat.py)."""
    buffer: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return buffer
