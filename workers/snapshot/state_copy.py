"""HostCopies of a rank's state that are made beside the training, on a thread, while the state rests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Ready = torch.cuda.Event | None
"""On a GPU, an event after all work on the state so far."""


class StateCopier:
    """A thread that makes one copy at a time. All methods are called on the training thread."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._copying: Future[None] | None = None

    def start(self, state: Sequence[torch.Tensor], copy: Callable[[Ready], None]) -> None:
        """Begin `copy`, which is called on the thread with what to wait for before it reads `state`. The state must not
        change before `finish`, and the copy before must be finished."""
        self._copying = self._thread.submit(copy, event_after(state))

    def finish(self) -> bool:
        """Return once the copy that was begun is made, and whether there was one; raises what kept it from that."""
        if self._copying is None:
            return False
        copying, self._copying = self._copying, None
        copying.result()
        return True

    def close(self) -> None:
        """End the thread, after the copy that was begun."""
        self._thread.shutdown()


def event_after(state: Sequence[torch.Tensor]) -> Ready:
    """On a GPU, an event after all work on `state` so far. For the training thread."""
    if not state or not state[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(state[0].device))
    return event


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], ready: Ready) -> None:
    """Copy each source into its target. `ready` is waited for on a stream beside that of the training thread, so that
    no copy waits for the forward pass that was queued before it."""
    beside: AbstractContextManager[Any] = nullcontext()
    if ready is not None:
        stream = torch.cuda.Stream(sources[0].device)
        stream.wait_event(ready)
        beside = torch.cuda.stream(stream)
    with torch.no_grad(), beside:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
