"""A rank of a job of any size, by itself and without its numbers: tensors are torch's fake ones, which have a shape and
no memory, and process groups are of torch's `fake` backend, which answers at once.

The device is a CPU that says it is a GPU where the engine asks a tensor: torch without CUDA cannot run a backward pass
on fake tensors of one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dispatch_mode import FakeMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.support.tensor_bytes import tracker_of_bytes
from manta.workers.accounting.activation_bytes import ExpertRows
from manta.workers.comm import process_groups
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.comm.process_groups import ProcessGroups
from manta.workers.comm.regroup import NewGroups
from manta.workers.config import JobSpec
from manta.workers.data.batches import MicroBatch
from manta.workers.engine import Engine
from manta.workers.parallel.data import offloaded
from manta.workers.parallel.experts import dispatch, exchange
from manta.workers.parallel.recompute import offload

CPU = torch.device("cpu")
_TENSOR = torch.Tensor
_ONES = {_TENSOR.item: 1.0, _TENSOR.__float__: 1.0, _TENSOR.__int__: 1, _TENSOR.__bool__: True}
_OTHERS = (_TENSOR.cpu, _TENSOR.numpy, torch.equal, _TENSOR.equal, torch.nonzero, _TENSOR.nonzero, _TENSOR.__index__)


class HostSyncs(TorchFunctionMode):
    """Counts where the host would wait for a GPU, by the function of the engine, and answers with ones."""

    def __init__(self) -> None:
        super().__init__()
        self.by_function: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (*_ONES, *_OTHERS) or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        self.by_function[_function_of_engine()] += 1
        if func in _ONES:
            return _ONES[func]
        return func(*args, **(kwargs or {}))


def _function_of_engine() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        at = path.rfind("workers/")
        if at >= 0 and "/tests/" not in path:
            return f"{path[at:]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of the engine"


class BalancedNumbers:
    """In place of numbers that the host waits for where tokens choose experts: each expert gets equally many."""

    def __init__(self, spec: JobSpec):
        model, layout, moe = spec.model, spec.layout, spec.model.moe
        assert moe is not None
        self.read_times, size, ranks, experts = 0, layout.exchange_size, layout.expert_size, moe.experts
        method = layout.dispatch(moe.per_token)
        tokens = model.sequence_length // layout.context * spec.train.micro_batch_size
        each, none_left = divmod(tokens * moe.per_token, experts)
        to_each_rank, whole = divmod(tokens * min(moe.per_token, ranks), ranks)
        assert none_left == whole == 0, "sizes that do not divide"
        gathered, reached = [size * each] * (experts // ranks), experts // ranks * size
        self._known = {
            reached: [each] * reached,
            len(gathered) + 1: [*gathered, size * tokens * moe.per_token - sum(gathered)],
            size * (reached + size): [*[each] * reached, *[to_each_rank] * size] * size,
        }
        """By length: choices of each expert; those of the rank's experts, and of others; by source, the choices of each
        expert and the rows to each rank. Of experts only those that tokens are sent to."""
        came = size * (tokens if method == "all_gather" else to_each_rank) if size > 1 else 0
        self.rows = [ExpertRows(each * reached, size * each, came)] * model.layers
        """Of each layer, for `StepPeak`."""

    def know(self, numbers: dict[int, list[int]]) -> None:
        """Other numbers than balanced ones, by their length."""
        self._known |= numbers

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Within the block the host gets these numbers."""
        with mock.patch.object(exchange, "NumbersForHost", self), mock.patch.object(dispatch, "NumbersForHost", self):
            yield

    def __call__(self, numbers: torch.Tensor) -> Any:
        """Like `NumbersForHost`."""
        return SimpleNamespace(read=lambda: self._read(numbers.numel()))

    def _read(self, count: int) -> list[int]:
        self.read_times += 1
        return self._known[count]


@contextmanager
def balanced_experts(spec: JobSpec) -> Iterator[BalancedNumbers | None]:
    """Within the block tokens choose all experts of a job that has some equally often."""
    if spec.model.moe is None:
        yield None
        return
    numbers = BalancedNumbers(spec)
    with numbers.instead():
        yield numbers


@contextmanager
def pretended_gpu() -> Iterator[HostSyncs]:
    """Within the block tensors have no memory and say that they lie on a GPU; process groups are fake."""
    syncs = HostSyncs()
    with ExitStack() as stack:
        # Nobody else comes, and of gloo, whose waits are looked after by turns, there is nothing.
        stack.enter_context(mock.patch.object(process_groups, "GlooWaits", lambda _: None))
        stack.enter_context(mock.patch.object(ProcessGroups, "_wait_for_all", lambda *_: None))
        stack.enter_context(mock.patch.object(dist.ProcessGroup, "set_timeout", lambda *_: None))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *_: None))
        # What is sent has left by the time of the next look, and its memory is free.
        stack.enter_context(mock.patch.object(process_groups._Work, "done", True))
        stack.enter_context(mock.patch.object(FakeTensor, "is_cuda", property(lambda _: True), create=True))
        stack.enter_context(FakeMode())
        stack.enter_context(syncs)
        try:
            yield syncs
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@dataclass
class HostMemory:
    """Of activations and of the optimizer's state, where a rank has them there."""

    taken: int = 0
    """Bytes."""


@contextmanager
def host_memory_apart() -> Iterator[HostMemory]:
    """Within the block host memory for activations and the optimizer's state counts for itself; streams are not there,
    and copies do nothing."""
    host = HostMemory()

    def state_on_host(kinds: int, elements: int, like: torch.Tensor) -> torch.Tensor:
        state = torch.empty(kinds, elements, dtype=like.dtype, device="meta")
        host.taken += state.nbytes
        return state

    def of_host(size: int, pinned: bool) -> torch.Tensor:
        assert pinned
        host.taken += size
        return torch.empty(size, dtype=torch.uint8, device="meta")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(offload, "host_memory", of_host))
        stack.enter_context(mock.patch.object(offload, "copy_streams", lambda _: None))
        stack.enter_context(mock.patch.object(offload.OffloadedLayer, "_copy", lambda *_: None))
        stack.enter_context(mock.patch.object(offloaded, "host_state", state_on_host))
        stack.enter_context(mock.patch.object(offloaded, "PinnedMemory", mock.MagicMock()))
        for name in ("copy_in", "copy_out", "end", "__init__"):
            stack.enter_context(mock.patch.object(offloaded._Queue, name, lambda *_: None))
        yield host


class OwnMemory:
    """A recording that keeps as much memory as what it records takes, and replays nothing."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None

    def capture(self, compute: Callable[[], None]) -> None:
        """Compute, and keep what that took besides what was there."""
        tracker = tracker_of_bytes()
        with tracker:
            compute()
        before, peak = (tracker.get_tracker_snapshot(which)[CPU]["Total"] for which in ("current", "peak"))
        self.memory = torch.empty(peak - before, dtype=torch.uint8)

    def replay(self) -> None:
        """Nothing is computed here anyway."""


class FakeRank:
    """The engine of one rank of a job; call within `pretended_gpu`."""

    def __init__(self, spec: JobSpec, rank: int):
        grid = RankGrid(spec.layout)
        self.spec, self.tracker = spec, tracker_of_bytes()
        self.comm = Comm(grid, rank, CPU, backend="process_groups")
        breaking = mock.MagicMock(options=lambda: None)
        self.comm._backend = groups = ProcessGroups(grid, rank, CPU, NewGroups("fake", breaking))
        groups.connect(FakeStore())
        groups._open_channels()
        with self.tracker:
            self.engine = Engine(spec, self.comm, new_recording=OwnMemory)

    def batch(self) -> list[MicroBatch]:
        """This replica's micro-batches of a step."""
        train, length = self.spec.train, self.spec.model.sequence_length // self.spec.layout.context
        size = train.micro_batch_size
        tokens = [
            torch.empty(length, size, dtype=torch.int64) if self.engine.model.reads_tokens else None
            for _ in range(self.spec.micro_batches)
        ]
        return [MicroBatch(range(n * size, (n + 1) * size), each, each) for n, each in enumerate(tokens)]

    def step(self) -> dict[str, int]:
        """A whole optimizer step. Bytes at its peak, by MemTracker's kinds."""
        with self.tracker:
            self.engine.step(self.batch(), self.spec.train.global_batch_size, 1e-4, 0)
        kinds = self.tracker.get_tracker_snapshot("peak")[CPU]
        return {str(getattr(kind, "value", kind)): size for kind, size in kinds.items()}
