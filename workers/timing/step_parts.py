"""How the time of a step is spent: every moment belongs to exactly one part.

Parts nest: while an inner one runs, the outer one is suspended. On a CPU times are read from the clock; on a GPU from
events on the compute stream, so that what is measured is what that stream waits for, and nothing synchronises before
the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

import torch

Part = Literal[
    "data",
    "forward",
    "backward",
    "recompute",
    "tensor_communication",
    "pipeline_communication",
    "data_communication",
    "bubble",
    "optimizer",
    "other",
]
PARTS: tuple[Part, ...] = get_args(Part)


class StepParts:
    """Measures the parts of a step, between `begin` and `end`."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        """`clock`: a monotonic clock, in seconds; used if there are no events."""
        self._device, self._clock = device, clock
        self.measuring = False
        """Whether a step is being measured: parts may be entered and left only then."""
        self._stack: list[Part] = []
        self._seconds: dict[Part, float] = {}
        self._last = 0.0
        self._events: list[tuple[Part, torch.cuda.Event]] = []
        """On a GPU, the part that ends with each event."""

    def begin(self) -> None:
        """Start to measure a step; everything outside of a named part is `other`."""
        self.measuring = True
        self._stack, self._seconds, self._events = ["other"], dict.fromkeys(PARTS, 0.0), []
        self._last = self._clock()
        self._mark("other")

    def drop(self) -> None:
        """Stop measuring: if a step was being measured, it was broken off."""
        self.measuring = False

    @property
    def innermost(self) -> Part | None:
        """The part to which time is currently assigned; None while nothing is measured."""
        return self._stack[-1] if self.measuring else None

    def enter(self, name: Part | None) -> None:
        """A part begins; with None the surrounding part continues."""
        self._mark(self._stack[-1])
        self._stack.append(name or self._stack[-1])

    def leave(self) -> None:
        """The innermost part ends."""
        if len(self._stack) > 1:  # a measurement may begin inside a part
            self._mark(self._stack.pop())

    def move(self, source: Part, to: Part, seconds: float) -> None:
        """Assign `seconds` that were assigned to `source` to `to` instead."""
        if self.measuring:
            self._seconds[source] -= seconds
            self._seconds[to] += seconds

    def end(self) -> dict[Part, float]:
        """Seconds of each part; their sum is the time since `begin`."""
        self._mark(self._stack[-1])
        self.measuring = False
        if self._events:
            self._events[-1][1].synchronize()
            for (_, before), (name, event) in zip(self._events, self._events[1:], strict=False):
                self._seconds[name] += before.elapsed_time(event) / 1000
        return self._seconds

    def _mark(self, ends: Part) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((ends, event))
            return
        now = self._clock()
        self._seconds[ends] += now - self._last
        self._last = now
