"""Activations of layers in host memory from forward to backward (`parallel.offload_layers`).

What autograd keeps of a layer is copied to the host when the layer's forward has been queued, while the layers up to
the next offloaded one compute; it is freed on the device after the copies, when that next one has been queued. Backward
brings a layer's activations back while the next offloaded layer above it, and those in between, compute. On a GPU,
copies use pinned memory and two streams next to the compute stream, which waits for them by events. Device memory is
allocated and freed on the compute stream only, so no block waits for another stream, and the peak does not depend on
how far the host runs ahead. On a CPU the same happens without streams.

Tensors that share memory are copied once. Small tensors stay on the device, and so do those that are kept anyway:
parameters, tables that layers share, the input of a stage that came as a message.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from manta.workers.parallel import recompute
from manta.workers.parallel.recompute.modules import activation_hooks
from manta.workers.system.gpu import Streams, copy_streams

LARGEST_SHARE = 4
"""Largest ratio of a tensor's memory to its own size: queries, keys and values are parts of one product."""


def host_memory(size: int, pinned: bool) -> torch.Tensor:
    """`size` bytes of host memory."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class HostBlocks:
    """Host memory of one rank's activations, which is reused: in powers of two, as torch allocates pinned memory
    anyway.

    A block that was returned may still be read by a copy to the device. Its next user writes to it after the work that
    was queued on the compute stream by then, which includes a wait for that copy.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def acquire(self, like: torch.Tensor) -> torch.Tensor:
        """A block of the size and dtype of the vector `like`."""
        size = block_bytes(like.nbytes)
        block = self._free[size].pop() if self._free[size] else host_memory(size, like.is_cuda)
        return block[: like.nbytes].view(like.dtype)

    def release_block(self, block: torch.Tensor) -> None:
        """Return a block."""
        storage = block.view(torch.uint8)
        size = block_bytes(len(storage))
        self._free[size].append(storage.as_strided((size,), (1,)))


def block_bytes(size: int) -> int:
    """Size of the block for `size` bytes."""
    return 1 << (size - 1).bit_length()


def device_memory(like: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Device memory of the size of `like`, for the compute stream; earlier work on that stream may still use it."""
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def memory_of(tensor: torch.Tensor) -> int:
    """A number that identifies the memory of a tensor while it exists."""
    number: int = tensor.untyped_storage()._cdata
    return number


class _Stored:
    """Memory in which autograd keeps something; deleted when nothing in it is kept any more."""

    def __init__(self, layer: OffloadedLayer, storage: torch.Tensor):
        self.layer = layer
        self.device: torch.Tensor | None = storage
        """All of the memory as a vector, while it is on the device."""
        self.host: torch.Tensor | None = None

    def __del__(self) -> None:
        if self.host is not None:  # backward has failed before
            self.layer.host.release_block(self.host)


@dataclass(frozen=True)
class _Saved:
    """What autograd holds instead of a tensor."""

    stored: _Stored
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadedLayer:
    """What is kept of one layer's forward of one micro-batch."""

    def __init__(self, host: HostBlocks, not_copied: Collection[int]):
        """`host`: memory for it; `not_copied`: memory that is not copied."""
        self.host, self._not_copied = host, not_copied
        self._new: dict[tuple[int, torch.dtype], _Stored] = {}
        self._stored: list[weakref.ref[_Stored]] = []
        self._device: torch.device | None = None
        self._streams: Streams | None = None
        self._copied: torch.cuda.Event | None = None
        self._fetched: torch.cuda.Event | None = None
        self._on_device = True

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        """What autograd should hold instead of the tensor; may be the tensor itself."""
        size, memory = tensor.untyped_storage().nbytes(), memory_of(tensor)
        if size < recompute.OFFLOADED_BYTES or size > LARGEST_SHARE * tensor.nbytes or memory in self._not_copied:
            return tensor
        key = memory, tensor.dtype
        if key not in self._new:
            storage = tensor.detach().as_strided((size // tensor.itemsize,), (1,), 0)
            self._new[key] = _Stored(self, storage)
        return _Saved(self._new[key], tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        """The tensor for what autograd holds."""
        if isinstance(saved, torch.Tensor):
            return saved
        self.fetch()
        if self._fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(self._fetched)
            self._fetched = None
        assert saved.stored.device is not None
        return saved.stored.device.as_strided(saved.size, saved.stride, saved.offset)

    def start_copy_to_host(self) -> None:
        """Forward has been queued: begin to copy to the host."""
        kept = list(self._new.values())
        self._new = {}
        self._stored = [weakref.ref(stored) for stored in kept]
        if not kept:
            return
        storages = [stored.device for stored in kept if stored.device is not None]
        self._device = storages[0].device
        self._streams = copy_streams(self._device) if storages[0].is_cuda else None
        for stored, storage in zip(kept, storages, strict=True):
            stored.host = self.host.acquire(storage)
        pairs = [
            (stored.host, storage) for stored, storage in zip(kept, storages, strict=True) if stored.host is not None
        ]
        self._copied = self._copy(pairs, 0)

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], direction: int) -> torch.cuda.Event | None:
        """Copy into the first of each pair; on a GPU after the work queued so far, with an event after the copies."""
        with torch.no_grad():
            if self._streams is None:
                for target, source in pairs:
                    target.copy_(source)
                return None
            stream, queued = self._streams[direction], torch.cuda.Event()
            queued.record(torch.cuda.current_stream(self._device))
            stream.wait_event(queued)
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
            return done

    def release(self) -> None:
        """Free what has been copied; on a GPU, after the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        for stored in self._alive():
            stored.device = None
        self._on_device = False

    def fetch(self) -> None:
        """Begin to bring the activations back, unless that has begun."""
        if self._on_device:
            return
        self._on_device, pairs = True, []
        for stored in self._alive():
            assert stored.host is not None
            stored.device = device_memory(stored.host, self._device)
            pairs.append((stored.device, stored.host))
            stored.host = None
        if pairs:
            self._fetched = self._copy(pairs, 1)  # after the copies to the host, which have been waited for
        for _, host in pairs:
            self.host.release_block(host)

    def __del__(self) -> None:
        # Backward has failed before anything waited, and the memory that is copied to becomes free now.
        if self._fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(self._fetched)

    def _alive(self) -> list[_Stored]:
        return [stored for reference in self._stored if (stored := reference()) is not None]


class OffloadedPass:
    """The layers of one virtual stage in one micro-batch's forward, some of which are offloaded."""

    def __init__(self, layers: int, count: int, host: HostBlocks, not_copied: Collection[int]):
        """`layers`: of the stage, `count` of them offloaded; `host`: memory for these; `not_copied`: memory not
        copied."""
        self._layers, self._count, self._host, self._not_copied = layers, count, host, set(not_copied)
        self._position = 0
        self._below: OffloadedLayer | None = None
        """The last offloaded layer."""
        self._before: OffloadedLayer | None = None
        """The layer before, if it is offloaded."""

    def run(self, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """layer(x) of the next layer."""
        if x.is_leaf and x.requires_grad:  # it is kept for its gradient
            self._not_copied.add(memory_of(x))
        wanted = [self._before] if self._before is not None else []
        if recompute.is_offloaded(self._position, self._layers, self._count):
            offloaded = OffloadedLayer(self._host, self._not_copied)
            with activation_hooks(offloaded.pack, offloaded.unpack):
                y = layer(x)
            offloaded.start_copy_to_host()
            # The layer below is copied back while everything in between computes, so that the link is never idle.
            wanted = [offloaded]
            if self._below is not None:
                wanted.append(self._below)
                self._below.release()
            self._below = self._before = offloaded
        else:
            y, self._before = layer(x), None
        self._position += 1
        if wanted and y.requires_grad:
            y.register_hook(lambda _: _fetch(wanted))  # when this layer's backward is about to begin
        return y

    def end(self) -> None:
        """The last layer has been queued."""
        if self._below is not None:
            self._below.release()


def _fetch(layers: list[OffloadedLayer]) -> None:
    for layer in layers:
        layer.fetch()
