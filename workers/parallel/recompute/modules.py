"""Recomputes dropped activations in backward (the package's docstring says what is dropped)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from manta.workers.comm.comm import Comm

Result = TypeVar("Result")

Again = Callable[[], torch.Tensor]
"""Computes a tensor again in backward, which forward did not keep."""


class _Keepers(threading.local):
    """The functions that `kept_through` has set, for each thread."""

    innermost: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None = None


_keepers = _Keepers()


@contextmanager
def kept_through(keep: Callable[[torch.Tensor], Any], give: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """Within the block, everything kept for backward is stored as keep(tensor), and restored by `give`: tensors that
    autograd keeps, and inputs of recomputation."""
    before, _keepers.innermost = _keepers.innermost, (keep, give)
    try:
        with saved_tensors_hooks(keep, give):
            yield
    finally:
        _keepers.innermost = before


def _kept(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns x in backward, detached from its graph."""
    x = x.detach()
    if _keepers.innermost is None:
        return lambda: x
    keep, give = _keepers.innermost
    held = keep(x)
    return lambda: give(held)


def again(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Again:
    """A function that computes function(x) again, for consumers of function(x) that do not keep it."""
    kept = _kept(x)
    return lambda: function(kept())


def in_backward(compute: Callable[[], Result], comm: Comm) -> Result:
    """Runs `compute` within a backward that autograd runs; its time counts as recomputation."""
    with comm.step.phase("recompute"), torch.no_grad():
        return compute()


def checkpointed(comm: Comm, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """function(*inputs), of which only the inputs are kept: backward runs its forward again. Dropout needs no generator
    state for that (workers/parallel/tensor/dropout.py)."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    if torch.compiler.is_compiling():  # the compiler supports torch's own
        from torch.utils.checkpoint import checkpoint

        result: torch.Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return result
    dropped = _Dropped(comm, function, inputs)
    with comm.step.forward_work(), saved_tensors_hooks(dropped.drop, dropped.recomputed):
        return function(*inputs)


class _EnoughRecomputed(Exception):
    """Forward has recomputed everything that backward needs of it."""


class _Dropped:
    """The tensors that one forward of a function would have kept for backward. They are numbered in the order in which
    forward keeps them, which is the same each time.

    torch's own checkpoint does the same, but imports a compiler: a second for each process that trains.
    """

    def __init__(self, comm: Comm, function: Callable[..., torch.Tensor], inputs: tuple[Any, ...]):
        self._comm, self._function = comm, function
        self._inputs = [_again_a_leaf(each) for each in inputs]
        self._count = 0
        self._again: dict[int, torch.Tensor] = {}

    def drop(self, tensor: torch.Tensor) -> int:
        """A number that replaces the tensor."""
        self._count += 1
        return self._count - 1

    def recomputed(self, number: int) -> torch.Tensor:
        """The tensor with this number, once; forward runs again for the first one that backward asks for."""
        if number not in self._again:
            self._compute_again()
        return self._again.pop(number)

    def _compute_again(self) -> None:
        self._again.clear()
        kept = 0

        def keep(tensor: torch.Tensor) -> None:
            nonlocal kept
            self._again[kept] = tensor.detach()
            kept += 1
            if kept == self._count:
                raise _EnoughRecomputed

        def refuse(nothing: None) -> torch.Tensor:
            raise RuntimeError("a forward that runs again has no backward of its own")

        inputs = [each() for each in self._inputs]
        try:
            with torch.enable_grad(), self._comm.step.forward_work(), saved_tensors_hooks(keep, refuse):
                self._function(*inputs)
        except _EnoughRecomputed:
            return
        raise RuntimeError(
            f"forward kept {self._count} tensors, and {kept} when it ran again: it must do the same each time"
        )


def _again_a_leaf(value: Any) -> Callable[[], Any]:
    """A function that returns an input in backward, detached from the graph that it came from."""
    if not isinstance(value, torch.Tensor):
        return lambda: value
    kept, has_gradient = _kept(value), value.requires_grad
    return lambda: kept().detach().requires_grad_(has_gradient)
