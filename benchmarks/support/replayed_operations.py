"""Stands in for a CUDA graph on a CPU: records every operation of torch's that a computation comes to, with the very
tensors that it used, and replays these operations on the same memory.

All that Python did beside them is frozen, as in a graph: numbers of the host, counters, which tensor was used. What a
graph cannot record is an error: to read a value on the host, or to make a tensor of the host's values.

It does not show what is the device's own: streams, the graph's memory, what its libraries allow during a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_TENSOR, _ATEN = torch.Tensor, torch.ops.aten
_READS = (
    *(_TENSOR.item, _TENSOR.tolist, _TENSOR.numpy, _TENSOR.cpu, _TENSOR.nonzero, _TENSOR.equal),
    *(_TENSOR.__bool__, _TENSOR.__float__, _TENSOR.__int__, _TENSOR.__index__, torch.equal, torch.nonzero),
)
"""Functions after which the host knows a value of a tensor."""
_MAKES = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)
"""Functions that make tensors of the host's values, which a GPU would have to copy from memory that is not pinned."""
_REFUSED = {
    torch.Tag.data_dependent_output: "the host reads a value",
    torch.Tag.dynamic_output_shape: "its shape depends on values",
}
"""Tags of operations that no graph holds."""
_UNSET = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)
"""Operations that compute nothing."""


class NotRecordable(RuntimeError):
    """The computation does what a CUDA graph cannot record."""


@dataclass(frozen=True)
class _Operation:
    function: Any
    arguments: Any
    options: Any
    results: list[tuple[int, torch.Tensor]]
    """Tensors in memory that the operation took for them, with their places among its results: replays put theirs
    there."""


class _HostReads(TorchFunctionMode):
    """Refuses functions that do not all come to an operation on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise NotRecordable(f"{func.__name__}: the host reads a value")
        if func in _MAKES:
            raise NotRecordable(f"{func.__name__}: a tensor is made of the host's values")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, options = func._overloadpacket, kwargs or {}
        _refuse(func, args)
        results = func(*args, **options)
        if packet not in _UNSET:
            given = {_memory(each) for each in _tensors((args, options))}
            own = [(at, _alone(each)) for at, each in enumerate(_tensors(results)) if _memory(each) not in given]
            if own or func._schema.is_mutable:  # others are views of what is there
                self.operations.append(_Operation(func, tree_map(_alone, args), tree_map(_alone, options), own))
        return results


def _refuse(func: Any, args: Any) -> None:
    """Raises NotRecordable where no graph holds the operation."""
    by_number = func._overloadpacket is _ATEN.index and not any(each.dtype == torch.bool for each in _tensors(args[1]))
    for tag, why in _REFUSED.items():
        if tag in func.tags and not by_number:
            raise NotRecordable(f"{func}: {why}")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _alone(value: Any) -> Any:
    """A tensor apart from its graph, in the same memory."""
    return value.detach() if isinstance(value, torch.Tensor) else value


class ReplayedOperations:
    """A `manta.workers.parallel.pipeline.graphed.Recording`."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self.replays = 0

    def capture(self, compute: Callable[[], None]) -> None:
        """Compute, and record the operations. Raises NotRecordable, in the midst of them."""
        recorder = _Recorder()
        with _HostReads(), recorder:
            compute()
        self._operations = recorder.operations

    def replay(self) -> None:
        """Do the recorded operations again."""
        self.replays += 1
        with torch.no_grad():
            for each in self._operations:
                made = _tensors(each.function(*each.arguments, **each.options))
                for at, kept in each.results:
                    kept.copy_(made[at])
