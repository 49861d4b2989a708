"""What is asked of CUDA to record and replay, told by a stand-in for torch's functions: no graph was captured here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from manta.workers.parallel.pipeline.graphed import CudaRecording

POOL = (0, 7)


class Device:
    """Notes what is asked of it; a capture that is `invalid` fails where it ends."""

    def __init__(self, invalid: bool):
        self.invalid, self.asked = invalid, list[str]()
        self.stream, self.allocates_to = "own", set[tuple[int, int]]()

    def replay(self) -> None:
        """Of the graph, on the current stream."""
        self.asked.append(f"replay on {self.stream}")

    @contextmanager
    def graph(self, graph: Any, pool: Any, capture_error_mode: str) -> Any:
        """As torch's, which leaves the stream what it is where the end of the capture fails."""
        assert graph is self and capture_error_mode == "thread_local"
        self.stream = "side"
        self.allocates_to.add(pool)
        try:
            yield
        finally:
            if self.invalid:
                raise RuntimeError("capture invalidated")
            self.allocates_to.remove(pool)
            self.stream = "own"

    @contextmanager
    def on(self, stream: str) -> Any:
        """As torch.cuda.stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def end(self, device: int, pool: tuple[int, int]) -> None:
        """Of what the allocator does for a pool; raises where that has ended."""
        if pool not in self.allocates_to:
            raise RuntimeError("not currently recording")
        self.allocates_to.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        """The pool."""
        self.asked.append("release")


@pytest.fixture
def device(monkeypatch, request) -> Device:
    """In place of torch.cuda."""
    made = Device(invalid=request.param)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    return made


@pytest.mark.parametrize("device", [False], indirect=True)
def test_captured_cuda_graph_is_replayed_at_once(device):
    recording = CudaRecording()
    recording.capture(lambda: device.asked.append(f"compute on {device.stream}"))
    recording.replay()
    assert device.asked == ["compute on side", "replay on own", "replay on own"]
    assert not device.allocates_to


@pytest.mark.parametrize("device", [True], indirect=True)
def test_failed_cuda_capture_restores_stream_and_allocator(device):
    with pytest.raises(RuntimeError, match="capture invalidated"):
        CudaRecording().capture(lambda: None)
    assert device.stream == "own" and not device.allocates_to
    assert device.asked == ["release"], "and nothing is replayed"


@pytest.mark.parametrize("device", [False], indirect=True)
def test_capture_that_ends_after_a_failed_computation_leaves_freeing_memory_to_torch(device):
    with pytest.raises(RuntimeError, match="no kernel"):
        CudaRecording().capture(Mock(side_effect=RuntimeError("no kernel")))
    assert device.stream == "own" and device.asked == []
