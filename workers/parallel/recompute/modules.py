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

Recomputation = Callable[[], torch.Tensor]
"""Computes a tensor again in backward, which forward did not keep."""


class _ActivationHooks(threading.local):
    """The functions that `activation_hooks` has set, for each thread."""

    innermost: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None = None


_hooks = _ActivationHooks()


@contextmanager
def activation_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """Within the block, everything kept for backward is stored as keep(tensor), and restored by `unpack`: tensors that
    autograd keeps, and inputs of recomputation."""
    before, _hooks.innermost = _hooks.innermost, (pack, unpack)
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _hooks.innermost = before


def _saved(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns x in backward, detached from its graph."""
    x = x.detach()
    if _hooks.innermost is None:
        return lambda: x
    pack, unpack = _hooks.innermost
    packed = pack(x)
    return lambda: unpack(packed)


def recomputation(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Recomputation:
    """A function that computes function(x) again, for consumers of function(x) that do not keep it."""
    saved = _saved(x)
    return lambda: function(saved())


def shared_recomputation(recompute: Recomputation) -> Recomputation:
    """A recomputation for two consumers of a tensor: the first one that asks computes it, the second one takes that."""
    computed: list[torch.Tensor] = []

    def once() -> torch.Tensor:
        if computed:
            return computed.pop()
        computed.append(recompute())
        return computed[0]

    return once


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
        self._inputs = [_saved_leaf(value) for value in inputs]
        self._count = 0
        self._recomputed: dict[int, torch.Tensor] = {}

    def drop(self, tensor: torch.Tensor) -> int:
        """A number that replaces the tensor."""
        self._count += 1
        return self._count - 1

    def recomputed(self, number: int) -> torch.Tensor:
        """The tensor with this number, once; forward runs again for the first one that backward asks for."""
        if number not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(number)

    def _recompute(self) -> None:
        self._recomputed.clear()
        count = 0

        def keep(tensor: torch.Tensor) -> None:
            nonlocal count
            self._recomputed[count] = tensor.detach()
            count += 1
            if count == self._count:
                raise _EnoughRecomputed

        def refuse(nothing: None) -> torch.Tensor:
            raise RuntimeError("a recomputed forward has no backward of its own")

        inputs = [value() for value in self._inputs]
        try:
            with torch.enable_grad(), self._comm.step.forward_work(), saved_tensors_hooks(keep, refuse):
                self._function(*inputs)
        except _EnoughRecomputed:
            return
        raise RuntimeError(
            f"forward saved {self._count} tensors, but {count} when it was recomputed: it must do the same each time"
        )


def _saved_leaf(value: Any) -> Callable[[], Any]:
    """A function that returns an input in backward, detached from the graph that it came from."""
    if not isinstance(value, torch.Tensor):
        return lambda: value
    saved, has_gradient = _saved(value), value.requires_grad
    return lambda: saved().detach().requires_grad_(has_gradient)
