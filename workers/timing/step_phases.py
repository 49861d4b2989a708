"""What a rank does at every moment, marked once: `with step.phase("backward", micro_batch=3)`.

Four readers follow from it: the record in shared memory by which the rank's agent knows where it stands
(`liveness/progress.py`), the clock that tells computing from waiting (`step_clock.py`), in the steps that are measured,
the parts of which the step's time consists (`StepParts`), and in steps that are traced a slice for each phase
(`recorder.py`). A step passes some 300 of these marks, so entering a phase costs a few stores, and leaving one does not
touch the record: that keeps the phase that was entered last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, get_args

import torch

from manta.workers.liveness.device_trail import DeviceTrail
from manta.workers.liveness.progress import Phase, Progress
from manta.workers.timing.recorder import Recorder
from manta.workers.timing.step_clock import StepClock, Wait

State = Literal["starting", "preparing", "connecting", "restoring", "resting", "done"]
"""Phases outside of steps, which last until the next one."""
StepPhase = Literal[
    "data",
    "receive_forward",
    "forward",
    "send_forward",
    "receive_backward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_backward",
    "recompute",
    "reduction",
    "replica_check",
    "agreement",
    "optimizer",
    "gather",
    "snapshot",
    "checkpoint",
    "validation",
    "tensor_communication",
    "pipeline_communication",
    "data_communication",
    "context_communication",
    "dispatch",
    "combine",
    "bubble",
    "other",
]
OnPhase = Callable[[int, Phase], None]
"""Called with the step's number and the phase of the record that has been entered."""


class _Follows(NamedTuple):
    """What follows from a phase; None: it stays as it was."""

    record: Phase | None
    part: Part | None = None
    wait: Wait | None = None


_TABLE: dict[StepPhase, _Follows] = {
    "data": _Follows("data", "data", "data_wait"),
    "receive_forward": _Follows("forward", "pipeline_communication"),
    "forward": _Follows("forward", "forward"),
    "send_forward": _Follows("forward", "pipeline_communication"),
    "receive_backward": _Follows("backward", "pipeline_communication"),
    "backward": _Follows("backward", "backward"),
    "backward_input": _Follows("backward", "backward"),
    "backward_weight": _Follows("backward", "backward"),
    "send_backward": _Follows("backward", "pipeline_communication"),
    "recompute": _Follows(None, "recompute"),
    "reduction": _Follows("reduction"),
    "replica_check": _Follows("agreement"),
    "agreement": _Follows("agreement", "optimizer"),
    "optimizer": _Follows("optimizer", "optimizer"),
    "gather": _Follows(None),
    "snapshot": _Follows("snapshot", None, "snapshot_stall"),
    "checkpoint": _Follows("checkpoint", None, "checkpoint_stall"),
    "validation": _Follows("validation"),
    "tensor_communication": _Follows(None, "tensor_communication"),
    "pipeline_communication": _Follows(None, "pipeline_communication"),
    "data_communication": _Follows(None, "data_communication"),
    "context_communication": _Follows(None, "context_communication"),
    "dispatch": _Follows(None, "dispatch"),
    "combine": _Follows(None, "combine"),
    "bubble": _Follows(None, "bubble"),
    "other": _Follows(None, "other"),
}


class _Section:
    """`with` block of a phase."""

    __slots__ = ("_part", "_parts", "record")

    def __init__(self, follows: _Follows, parts: StepParts):
        self.record, self._part, self._parts = follows.record, follows.part, parts

    def __enter__(self) -> None:
        if self._parts.measuring:
            self._parts.enter(self._part)

    def __exit__(self, *error: object) -> None:
        if self._parts.measuring:
            self._parts.leave()


class _WaitSection(_Section):
    """`with` block of a phase that keeps the training thread from computing."""

    __slots__ = ("_clock", "_wait")

    def __init__(self, follows: _Follows, wait: Wait, parts: StepParts, clock: StepClock):
        super().__init__(follows, parts)
        self._wait, self._clock = wait, clock

    def __enter__(self) -> None:
        super().__enter__()
        self._clock.enter(self._wait)

    def __exit__(self, *error: object) -> None:
        self._clock.leave()
        super().__exit__(*error)


class StepPhases:
    """The phases of one rank. For its training thread."""

    def __init__(
        self,
        device: torch.device,
        record: Progress,
        clock: Callable[[], float] = time.perf_counter,
        trail: DeviceTrail | None = None,
    ):
        """`clock`: monotonic, in seconds; `trail`: gets the phases too, where the host runs ahead of its device."""
        self.record = record
        """What the rank's agent reads."""
        self._trail = trail
        self.clock = StepClock(clock)
        self.parts = StepParts(device, clock)
        self.on_phase: OnPhase | None = None
        """Called at every entry into a phase of the record, on the training thread: None until a fault is armed."""
        self.recorder: Recorder | None = None
        """Records the steps of a trace: None while there is none."""
        self._sections: dict[StepPhase, _Section] = {
            name: _Section(follows, self.parts)
            if follows.wait is None
            else _WaitSection(follows, follows.wait, self.parts, self.clock)
            for name, follows in _TABLE.items()
        }

    def begin(self, step: int, measure: bool = False) -> None:
        """Step number `step` begins; with `measure` its parts are measured, until `parts.end`."""
        self.record.begin_step(step)
        if self._trail is not None:
            self._trail.begin_step()
        if measure:
            self.parts.begin()
        else:
            self.parts.drop()

    def phase(self, name: StepPhase, micro_batch: int = -1, stage: int = -1) -> AbstractContextManager[None]:
        """The rank enters phase `name`, at `micro_batch` and virtual stage `stage` where these mean something: context
        of what it does there."""
        section = self._sections[name]
        if section.record is not None:
            self.record.at(section.record, micro_batch)
            if self._trail is not None:
                self._trail.at(self.record.position)
            if self.on_phase is not None:
                self.on_phase(self.record.step, section.record)
        if self.recorder is not None:
            return self.recorder.phase(name, section, micro_batch, stage)
        return section

    def enter(self, state: State) -> None:
        """The rank is in `state` from now on."""
        self.record.at(state)
        if self.on_phase is not None:
            self.on_phase(self.record.step, state)

    def forward_work(self) -> AbstractContextManager[None]:
        """Context of work of the forward pass, which within backward is recomputation."""
        if self.recorder is not None and self.recorder.in_backward:
            return self.phase("recompute")
        return self._sections["recompute"] if self.parts.innermost == "backward" else nullcontext()


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
    "context_communication",
    "dispatch",
    "combine",
]
PARTS: tuple[Part, ...] = get_args(Part)


class StepParts:
    """Measures how the time of a step is spent, between `begin` and `end`: every moment belongs to exactly one part.

    Parts nest: while an inner one runs, the outer one is suspended. On a CPU times are read from the clock; on a GPU
    from events on the compute stream, so that what is measured is what that stream waits for, and nothing synchronises
    before the step is over.
    """

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
