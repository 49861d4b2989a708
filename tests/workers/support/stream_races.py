"""A GPU's streams and events, stood in for while torch computes on a CPU, and whether anything is used without a wait.

What runs on a stream, or on a thread of the host, comes after what that stream or thread has waited for, and after
nothing else; two uses of the same bytes, of which one writes, must have an order. Streams are those of each
communicator, the compute stream, and those that the engine makes, of snapshots and of what waits in host memory;
threads are whoever asks for a copy and waits for it, who writes checkpoints out of the snapshots' slots, and, in
`pretended_loader`, who reads batches ahead. An optimizer's state in host memory, and slots of snapshots, lie on no GPU:
what a thread does with these alone, no stream does.

torch's own sanitizer (`torch.cuda._sanitizer`) knows a tensor by its first byte, so to it a bucket and the parameters
that lie in it have nothing to do with each other; here bytes are compared.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from dispatch_mode import DispatchMode
from recorded_groups import Recorder, _ends, _Work, code_line

from manta.workers.checkpoint import checkpointer
from manta.workers.data import batches
from manta.workers.data.batches import MicroBatch
from manta.workers.parallel.data import offloaded
from manta.workers.parallel.recompute import offload
from manta.workers.snapshot import snapshots, state_copy
from manta.workers.snapshot.snapshots import ProtectedSlot
from manta.workers.system.gpu import PinnedMemory, copy_streams
from manta.workers.training import rank_state

Clock = dict[str, int]
"""How far each actor had come."""
COMPUTE = "compute"


def _join(clock: Clock, other: Clock) -> None:
    for actor, count in other.items():
        clock[actor] = max(clock.get(actor, 0), count)


@dataclass
class _Use:
    """One use of some bytes."""

    start: int
    end: int
    writes: bool
    actor: str
    count: int
    line: str


@dataclass
class Order:
    """What comes before what on one rank, as far as its waits say."""

    races: list[str] = field(default_factory=list)
    """Pairs of uses without an order, in words."""
    _clocks: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict), repr=False)
    _uses: dict[int, list[_Use]] = field(default_factory=lambda: defaultdict(list), repr=False)
    _kept: list[Any] = field(default_factory=list, repr=False)
    """Memory that was used, so that its address means nothing else."""
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def clock(self, actor: str) -> Clock:
        """A copy of what `actor` comes after."""
        with self._lock:
            return dict(self._clocks[actor])

    def after(self, actor: str, clock: Clock) -> None:
        """From now on `actor` comes after all of `clock`."""
        with self._lock:
            _join(self._clocks[actor], clock)

    def runs(self, actor: str, uses: list[tuple[torch.Tensor, bool]], asked_by: str) -> None:
        """`actor` uses tensors, each written or not; the host's thread `asked_by` has it do so."""
        with self._lock:
            clock = self._clocks[actor]
            _join(clock, self._clocks[asked_by])
            clock[actor] = clock.get(actor, 0) + 1
            for tensor, writes in uses:
                self._note(tensor, writes, actor, clock)

    def _note(self, tensor: torch.Tensor, writes: bool, actor: str, clock: Clock) -> None:
        storage, (start, end) = tensor.untyped_storage(), _ends(tensor)
        known = self._uses[storage.data_ptr()]
        if not known:
            self._kept.append(storage)
        now, left = _Use(start, end, writes, actor, clock[actor], code_line()), []
        for before in known:
            apart = before.end <= start or end <= before.start
            ordered = before.count <= clock.get(before.actor, 0)
            if not apart and not ordered and (writes or before.writes):
                self.races.append(f"{_words(before)}, and without a wait {_words(now)}")
            if (
                apart
                or not ordered
                or not (start <= before.start and before.end <= end)
                or (before.writes and not writes)
            ):
                left.append(before)  # what is all covered by a later use needs no more looks
        self._uses[storage.data_ptr()] = [*left, now]


def _words(use: _Use) -> str:
    return f"{use.actor} {'writes' if use.writes else 'reads'} at {use.line}"


def _thread() -> str:
    return f"thread {threading.current_thread().name.partition('_')[0]}"


class _Streams(threading.local):
    """The current stream of each thread."""

    name = COMPUTE


class PretendedCuda:
    """In the place of what the engine uses of torch.cuda."""

    def __init__(self, order: Order):
        self.order, self.current, self.made, self.registered = order, _Streams(), 0, []
        self.host: list[range] = []
        """Addresses of the host's memory."""
        outer = self

        class Stream:
            """One stream."""

            def __init__(self, device: Any = None, name: str | None = None):
                outer.made += name is None
                self.name = name or f"stream {outer.made}"

            def wait_event(self, event: Any) -> None:
                """What is given to it from now on comes after the event."""
                outer.order.after(self.name, event.clock)

        class Event:
            """One event."""

            def __init__(self, **_: Any):
                self.clock: Clock = {}

            def record(self, stream: Any = None) -> None:
                """After all that the stream was given."""
                name = outer.current.name if stream is None else stream.name
                # The stream also comes after what the thread knew when it gave it its work.
                self.clock = outer.order.clock(name)

            def synchronize(self) -> None:
                """The thread waits."""
                outer.order.after(_thread(), self.clock)

            def query(self) -> bool:
                """It has been reached."""
                return True

            def elapsed_time(self, other: Any) -> float:
                """Milliseconds."""
                return 2000.0

        self.Stream, self.Event = Stream, Event
        self.cudaHostRegister = lambda address, size, flags: self.registered.append(address) or 0
        self.cudaHostUnregister = lambda address: self.registered.remove(address) or 0

    def current_stream(self, device: Any = None) -> Any:
        """Of this thread."""
        return self.Stream(name=self.current.name)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Within the block, work of this thread goes to `stream`."""
        before, self.current.name = self.current.name, stream.name
        try:
            yield
        finally:
            self.current.name = before

    def cudart(self) -> Any:
        """The driver's functions."""
        return self

    def of_host(self, memory: torch.Tensor) -> torch.Tensor:
        """The same, which says from now on that it lies on no GPU."""
        self.host.append(range(memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return memory

    def is_cuda(self, tensor: torch.Tensor) -> bool:
        """Whether it says that it lies on a GPU."""
        return not any(tensor.data_ptr() in addresses for addresses in self.host)

    def runs(self, uses: list[tuple[torch.Tensor, bool]]) -> None:
        """This thread asks for an operation; for one with host memory beside no copying stream it also waits."""
        actor, waits = self.current.name, False
        if actor == COMPUTE and not all(self.is_cuda(each) for each, _ in uses):
            actor, waits = (COMPUTE if any(self.is_cuda(each) for each, _ in uses) else _thread()), True
        self.order.runs(actor, uses, _thread())
        if waits:
            self.order.after(_thread(), self.order.clock(actor))


class _Kernels(DispatchMode):
    """Tells the order which memory this thread's kernels use, on its current stream."""

    def __init__(self, cuda: PretendedCuda):
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            schema = func._schema.arguments
            named = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
            uses = [
                (each, argument.alias_info is not None and argument.alias_info.is_write)
                for argument, value in named
                for each in (value if isinstance(value, list | tuple) else (value,))
                if isinstance(each, torch.Tensor)
            ]
            self._cuda.runs(uses)
        return func(*args, **kwargs)


def _threads_of(cuda: PretendedCuda) -> type[ThreadPoolExecutor]:
    """Executors whose threads come after whoever gives them work, and before whoever asks for its result."""

    class Threads(ThreadPoolExecutor):
        def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            asked, over = cuda.order.clock(_thread()), {}

            def run() -> Any:
                cuda.order.after(_thread(), asked)
                try:
                    with _Kernels(cuda):
                        return work(*args, **kwargs)
                finally:
                    over.update(cuda.order.clock(_thread()))

            future = super().submit(run)
            result, done = future.result, future.done

            def joined(timeout: float | None = None) -> Any:
                value = result(timeout)
                cuda.order.after(_thread(), over)
                return value

            def seen() -> bool:
                there = done()
                if there:
                    cuda.order.after(_thread(), over)
                return there

            future.result, future.done = joined, seen  # type: ignore[method-assign]
            return future

    return Threads


def _flags_of(cuda: PretendedCuda) -> type[threading.Event]:
    """Flags between threads: whoever sees one set comes after whoever has set it."""

    class Flag(threading.Event):
        clock: Clock

        def set(self) -> None:
            self.clock = cuda.order.clock(_thread())
            super().set()

        def is_set(self) -> bool:
            there = super().is_set()
            if there:
                cuda.order.after(_thread(), self.clock)
            return there

        def wait(self, timeout: float | None = None) -> bool:
            super().wait(timeout)
            return self.is_set()

    return Flag


class RaceRecorder(Recorder):
    """Process groups whose operations run on their communicator's stream."""

    order: Order

    def _started(self, on: Any, what: Any, touched: Any) -> Any:
        work = super()._started(on, what, touched)
        # NCCL's stream waits for what the compute stream was given.
        self.order.after(str(on), self.order.clock(COMPUTE))
        self.order.runs(str(on), touched, _thread())
        return OrderedWork(self, work._number, self.order.clock(str(on)))


class OrderedWork(_Work):
    """An operation on its communicator's stream."""

    def __init__(self, recorder: RaceRecorder, number: int, clock: Clock):
        super().__init__(recorder, number)
        self._order, self._clock = recorder.order, clock

    def wait(self) -> bool:
        """The compute stream comes after it."""
        self._order.after(COMPUTE, self._clock)
        return super().wait()


class _Slots(checkpointer.Checkpointer):
    """What a save writes out of a slot, its thread reads until it has compared the sums."""

    order: Order

    def _in_slot(self, held: ProtectedSlot) -> Any:
        uses: list[tuple[torch.Tensor, bool]] = []

        def part(name: str) -> torch.Tensor:
            uses.append((held.part(name), False))
            return uses[-1][0]

        def check() -> None:
            self.order.runs(_thread(), uses, _thread())
            held.check()

        return super()._in_slot(replace(held, part=part, check=check))


def _to_device(cuda: PretendedCuda, thread: Callable[[], None]) -> Callable[..., Any]:
    """In the place of a batch's way to a GPU: pinned, and copied on the stream of the thread that asks for it."""

    def moved(batch: MicroBatch, device: Any) -> MicroBatch:
        if batch.inputs_sb is None or batch.targets_sb is None:
            return batch
        thread()
        pinned = [tokens.clone() for tokens in (batch.inputs_sb, batch.targets_sb)]
        inputs_sb, targets_sb = (torch.empty_like(each).copy_(each) for each in pinned)
        return replace(batch, inputs_sb=inputs_sb, targets_sb=targets_sb)

    return moved


def _of_offloading(cuda: PretendedCuda) -> dict[str, Any]:
    """In the place of what moves activations to the host and back: the compute stream has used the memory that it is
    given, and uses at once what is let go of."""

    def device_memory(like: torch.Tensor, device: Any) -> torch.Tensor:
        given = torch.empty_like(like)
        cuda.order.runs(COMPUTE, [(given, True)], _thread())
        return given

    class Layer(offload.OffloadedLayer):
        def release(self) -> None:
            wholes = [each.device for each in self._alive() if each.device is not None]
            super().release()
            cuda.order.runs(COMPUTE, [(each, True) for each in wholes], _thread())

    return {
        "host_memory": lambda size, _: torch.empty(size, dtype=torch.uint8),
        "device_memory": device_memory,
        "OffloadedLayer": Layer,
    }


def _of_offloaded_state(cuda: PretendedCuda) -> dict[str, Any]:
    """The same for an optimizer's state."""
    places: list[torch.Tensor] = []

    def used() -> None:
        cuda.order.runs(COMPUTE, [(each, True) for each in places], _thread())

    def slice_buffer(kinds: int, elements: int, like: torch.Tensor) -> torch.Tensor:
        places.append(torch.empty(kinds, elements, dtype=like.dtype))
        used()
        return places[-1]

    class Queue(offloaded._Queue):
        def end(self) -> None:
            super().end()
            used()
            places.clear()

    host_state = offloaded.host_state
    return {
        "host_state": lambda *given: cuda.of_host(host_state(*given)),
        "slice_buffer": slice_buffer,
        "_Queue": Queue,
        "PinnedMemory": mock.MagicMock(),  # which would be let go of after the block
    }


def _slots_of(cuda: PretendedCuda) -> type[PinnedMemory]:
    """In the place of what registers the slots of snapshots."""

    class Slots(PinnedMemory):
        def __init__(self, memory: torch.Tensor, on_gpu: bool):
            super().__init__(cuda.of_host(memory), on_gpu)

    return Slots


@contextmanager
def pretended_loader(cuda: PretendedCuda, stream: str = COMPUTE) -> Iterator[None]:
    """Within the block batches are copied to the device by the thread that reads ahead, on the current stream of that
    thread, which torch makes the device's own; `stream`: as if it were another one."""

    def on_stream() -> None:
        if threading.current_thread() is not threading.main_thread():
            cuda.current.name = stream

    threads = mock.patch.object(batches, "ThreadPoolExecutor", _threads_of(cuda))
    with threads, mock.patch.object(batches, "_on_device", _to_device(cuda, on_stream)):
        yield


@contextmanager
def pretended_streams() -> Iterator[PretendedCuda]:
    """Within the block tensors say that they lie on a GPU, whose streams are pretended; races are in `order.races`."""
    cuda = PretendedCuda(Order())
    state_copy.copy_stream.cache_clear()
    copy_streams.cache_clear()
    with ExitStack() as stack:
        for name, stand_in in _of_offloading(cuda).items():
            stack.enter_context(mock.patch.object(offload, name, stand_in))
        for name, stand_in in _of_offloaded_state(cuda).items():
            stack.enter_context(mock.patch.object(offloaded, name, stand_in))
        stack.enter_context(mock.patch.object(snapshots, "PinnedMemory", _slots_of(cuda)))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(cuda.is_cuda), create=True))
        for name in ("Stream", "Event", "current_stream", "stream", "cudart"):
            stack.enter_context(mock.patch.object(torch.cuda, name, getattr(cuda, name)))
        for module in (state_copy, checkpointer, snapshots):
            stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", _threads_of(cuda)))
        flags = SimpleNamespace(Event=_flags_of(cuda))
        stack.enter_context(mock.patch.object(checkpointer, "threading", flags))
        slots = type("Slots", (_Slots,), {"order": cuda.order})
        stack.enter_context(mock.patch.object(rank_state, "Checkpointer", slots))
        stack.enter_context(_Kernels(cuda))
        yield cuda
    state_copy.copy_stream.cache_clear()
    copy_streams.cache_clear()
