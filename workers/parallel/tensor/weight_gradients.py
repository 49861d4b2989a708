"""Where weight gradients go: added to the flat gradient buffer as they are computed, in its precision, either at once
or, for the zero-bubble schedules, in a pass of their own (arXiv:2401.10241, section 2: B and W).

Autograd never sees them: a layer's backward hands over a function that computes them, which saves autograd's
temporary copy, and lets the input's gradient go on its way first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

Task = Callable[[], None]


class WeightGradients:
    """The weight gradients of one rank's stage."""

    def __init__(self) -> None:
        self._kept: list[Task] | None = None
        self._ones: dict[tuple[int, torch.dtype], torch.Tensor] = {}
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
        total_oi, kept = main_grad(weight), _factor_of_what_is_there(weight)
        if total_oi.dtype == grads_no.dtype:
            total_oi.addmm_(grads_no.t(), inputs_ni, beta=kept)
        else:
            product_oi = _wide_product(grads_no.t(), inputs_ni, total_oi.dtype)
            total_oi.add_(product_oi) if kept else total_oi.copy_(product_oi)
        self._added(weight)

    def add_sum(self, bias: nn.Parameter, grads_no: torch.Tensor) -> None:
        """Add the sum over tokens, [out], to the gradient of `bias`."""
        total_o, kept = main_grad(bias), _factor_of_what_is_there(bias)
        if total_o.is_cuda or total_o.dtype != grads_no.dtype:
            sum_o = grads_no.sum(0, dtype=total_o.dtype)
            total_o.add_(sum_o) if kept else total_o.copy_(sum_o)
        else:
            # On a CPU a product with ones reads the rows twice as fast as a sum over dimension 0.
            total_o.addmv_(grads_no.t(), self._ones_like_rows(grads_no), beta=kept)
        self._added(bias)

    def add_rows(self, weight: nn.Parameter, rows_n: torch.Tensor, grads_nh: torch.Tensor) -> None:
        """Add each token's gradient to its row of `weight` [v, h]."""
        total_vh = main_grad(weight)
        if not _factor_of_what_is_there(weight):
            total_vh.zero_()
        if total_vh.is_cuda:
            # index_add_ adds in no fixed order there; this one sorts first.
            wide_nh = grads_nh.to(total_vh.dtype)
            total_vh.add_(torch.ops.aten.embedding_dense_backward(wide_nh, rows_n, total_vh.shape[0], -1, False))
        else:
            total_vh.index_add_(0, rows_n, grads_nh.to(total_vh.dtype))
        self._added(weight)

    def _ones_like_rows(self, grads_no: torch.Tensor) -> torch.Tensor:
        key = (len(grads_no), grads_no.dtype)
        if key not in self._ones:
            self._ones[key] = grads_no.new_ones(len(grads_no))
        return self._ones[key]

    def _added(self, parameter: nn.Parameter) -> None:
        if self.when_added is not None:
            self.when_added(parameter)


def forget(parameters: Sequence[nn.Parameter]) -> None:
    """Whatever the gradients of `parameters` hold, the first that is added takes its place: that saves clearing them,
    and reading them once."""
    for parameter in parameters:
        parameter.holds_gradient = False  # type: ignore[attr-defined]


def clear_forgotten(parameters: Sequence[nn.Parameter]) -> None:
    """Clear the gradients of those `parameters` to which nothing has been added since they were forgotten."""
    for parameter in parameters:
        if not _factor_of_what_is_there(parameter):
            main_grad(parameter).zero_()


def _wide_product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product of 16-bit matrices, to be added in `dtype`: on a GPU it leaves the tensor cores like that, so no
    rounding lies between it and the sum."""
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else left @ right


def _factor_of_what_is_there(parameter: nn.Parameter) -> int:
    """0 where the next gradient of `parameter` takes the place of what is there, else 1."""
    held: bool = parameter.holds_gradient  # type: ignore[attr-defined]
    parameter.holds_gradient = True  # type: ignore[attr-defined]
    return 1 if held else 0


def main_grad(parameter: nn.Parameter) -> torch.Tensor:
    """The buffer in which `parameter`'s gradient is summed up (see workers/parallel/data/flat.py)."""
    buffer: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return buffer
