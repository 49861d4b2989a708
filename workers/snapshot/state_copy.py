"""Copies a rank's state concurrently with training, on a thread, while the state does not change.

On a GPU they are made on a stream of their own, the one of the process: torch hands out streams from a pool of 32 again
and again, so that a new one for each copy would sooner or later be one that something else waits for. What is copied
into should be registered (`workers/system/pinned.py`), else the driver copies it twice. A state in host memory
(`train.optimizer.offload`) the thread copies itself: nothing of it is under way when an update has returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch

Ready = torch.cuda.Event | None
"""On a GPU, an event after all work on the state so far."""
Done = torch.cuda.Event | None
"""On a GPU, an event after a copy that is made."""


class StateCopier:
    """A thread that makes one copy at a time. All methods are called on the training thread."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._copying: Future[Done] | None = None
        self._state: Sequence[torch.Tensor] = ()
        self.stall_seconds = 0.0
        """For how long the training stood still at the last `finish`: the thread, or on a GPU the device."""

    def start(self, state: Sequence[torch.Tensor], copy: Callable[[Ready], Done]) -> None:
        """Begin `copy`, which is called on the thread with what to wait for before it reads `state`, and returns what
        `copy_tensors` does. The state must not change before `finish`, and the copy before must be finished."""
        self._state = state
        self._copying = self._thread.submit(copy, event_after(state))

    def finish(self) -> bool:
        """Return once the copy that was begun is made, and whether there was one; raises what kept it from that."""
        if self._copying is None:
            return False
        copying, self._copying = self._copying, None
        # A host is ahead of its GPU: that it waits here says nothing about whether the GPU has nothing to do.
        began, reached = time.perf_counter(), event_after(self._state, timed=True)
        done = copying.result()
        self.stall_seconds = time.perf_counter() - began if done is None else _seconds_between(reached, done)
        return True

    @property
    def under_way(self) -> Future[Done] | None:
        """The copy that was begun and not finished."""
        return self._copying

    def close(self) -> None:
        """End the thread, after the copy that was begun."""
        self._thread.shutdown()


def _seconds_between(reached: Ready, done: torch.cuda.Event) -> float:
    """For how long the device had reached the one event and not yet the other, which it has now."""
    if reached is None or not reached.query():
        return 0.0  # it still computes
    return max(0.0, reached.elapsed_time(done) / 1000)


def event_after(state: Sequence[torch.Tensor], timed: bool = False) -> Ready:
    """On a GPU, an event after all work on `state` so far, with its time where it is `timed`. For the training
    thread."""
    device = _device_of(state)
    if device is None:
        return None
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def _device_of(state: Sequence[torch.Tensor]) -> torch.device | None:
    """Where the first of these is that is on a GPU: an optimizer's state may be on the host, and the rest not."""
    return next((tensor.device for tensor in state if tensor.is_cuda), None)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this process copies state, as torch's streams belong to the process."""
    return torch.cuda.Stream(device)


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], ready: Ready) -> Done:
    """Copy each source into its target, and return once that is done, with what it was done at.

    With `ready` this is waited for on a stream other than that of the training thread, so that no copy waits for the
    forward pass that was queued before it; the copies are queued together, and the host waits once, for the last.
    """
    with torch.no_grad():
        if ready is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        device = _device_of((*sources, *targets))
        assert device is not None, "an event is of a device"
        stream = copy_stream(device)
        stream.wait_event(ready)
        pairs = list(zip(targets, sources, strict=True))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                if target.is_cuda or source.is_cuda:
                    target.copy_(source, non_blocking=True)
        for target, source in pairs:
            if not (target.is_cuda or source.is_cuda):  # an optimizer's state on the host, which has been waited for
                target.copy_(source)
        # Blocking: a thread that spins would take a core from the one that trains.
        done = torch.cuda.Event(enable_timing=True, blocking=True)
        done.record(stream)
    done.synchronize()
    return done
