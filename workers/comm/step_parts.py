"""Where the time of a step goes: every moment belongs to exactly one part.

Parts nest: while an inner one runs, the outer one stands still. On a CPU they are read from the clock; on a GPU from
events on the compute stream, so that what is measured is what that stream waits for, and nothing synchronises before
the step is over.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal

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
PARTS: tuple[Part, ...] = Part.__args__  # type: ignore[attr-defined]


class _Section:
    """`with` block of one part."""

    __slots__ = ("_name", "_parts")

    def __init__(self, parts: StepParts, name: Part):
        self._parts, self._name = parts, name

    def __enter__(self) -> None:
        if self._parts.measuring:
            self._parts.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._parts.measuring:
            self._parts.leave()


class StepParts:
    """Measures the parts of a step, when asked to; otherwise entering a part costs next to nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sections = {name: _Section(self, name) for name in PARTS}
        self.measuring = False
        self._stack: list[Part] = []
        self._seconds: dict[Part, float] = {}
        self._last = 0.0
        self._events: list[tuple[Part, torch.cuda.Event]] = []
        """The part that ends with each event, on a GPU."""

    def part(self, name: Part) -> _Section:
        """Context of one part."""
        return self._sections[name]

    def begin(self) -> None:
        """Start to measure a step; everything outside of a named part is `other`."""
        self.measuring = True
        self._stack, self._seconds, self._events = ["other"], dict.fromkeys(PARTS, 0.0), []
        self._last = time.perf_counter()
        self._mark("other")

    def drop(self) -> None:
        """Measure no longer: the step that was measured was broken off."""
        self.measuring = False

    def enter(self, name: Part) -> None:
        """A part begins."""
        self._mark(self._stack[-1])
        self._stack.append(name)

    def leave(self) -> None:
        """The innermost part ends."""
        if len(self._stack) > 1:  # a measurement may begin inside of a part
            self._mark(self._stack.pop())

    def forward_work(self) -> AbstractContextManager[None]:
        """Context of work of the forward pass, which within backward is recomputation."""
        return self._sections["recompute"] if self.measuring and self._stack[-1] == "backward" else nullcontext()

    def move(self, source: Part, to: Part, seconds: float) -> None:
        """Count `seconds` that were counted as `source` as `to` instead."""
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
        now = time.perf_counter()
        self._seconds[ends] += now - self._last
        self._last = now
