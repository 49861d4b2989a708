"""Traces of single steps, on one rank: when they begin, and where what was recorded goes.

A trace is asked of rank 0 alone, which tells the others with the agreement of the step before: so all record the same
steps, however late the order comes. What each has recorded it reports by itself once its last step is over.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace

from workers.comm.comm import Comm
from workers.comm.device_marks import new_event
from workers.parallel.data.step_statistics import StepStatistics
from workers.protocol.reports import Profiled, TraceBegan, Traced
from workers.reporter import Reporter
from workers.timing.recorder import DeviceMoments, HostMoments, Moments, Recorder
from workers.timing.recording import INTERRUPTED, Recording
from workers.torch_profile import MOST_BYTES, TorchProfile

Make = Callable[[], Recording]
"""Makes what this rank has recorded, on any thread. Raises RuntimeError where its device has failed."""
Take = Callable[[int, Make], None]
"""Takes the number of a trace, and what makes this rank's recording of it."""


class Tracing:
    """Records the steps that are to be traced. For the training thread."""

    def __init__(self, comm: Comm, reporter: Reporter, peak_flops: float):
        """`peak_flops`: of this rank's device, FLOP/s."""
        self._comm, self._reporter = comm, reporter
        self._peak_flops = peak_flops
        self.take: Take = self._report
        """Takes what is recorded, once it is whole: it is reported, unless another consumer takes it."""
        self._next: tuple[int, int] | None = None
        self._first_step = 0
        self._profile: TorchProfile | None = None

    def begin_with_next_step(self, number: int, steps: int) -> None:
        """Record the next `steps` steps as trace `number`. All ranks get the same order before the same step."""
        self._next = (number, steps)

    def begin_step(self, step: int) -> None:
        """Step number `step` begins."""
        step_phases = self._comm.step
        if step_phases.recorder is None and self._next is not None:
            number, steps = self._next
            self._next, self._first_step = None, step
            order = self._comm.trace_orders.take(self._comm.generation, number)
            if order is not None and self._comm.rank in order.profiler_ranks:
                self._profile = TorchProfile(self._comm.device)
            idle = self._comm.idle_seconds if self._comm.tells_idle_seconds else None
            step_phases.recorder = Recorder(number, steps, self._moments(), idle)
            if self._comm.rank == 0:
                self._reporter.send(TraceBegan(number, step))
        if step_phases.recorder is not None:
            step_phases.recorder.begin_step(step)

    def _moments(self) -> Moments:
        if self._comm.device.type == "cuda":
            return DeviceMoments(new_event, self._comm.settle)
        return HostMoments()

    def end_step(self, statistics: StepStatistics) -> None:
        """The step is over, in which all ranks have agreed on `statistics`."""
        recorder = self._comm.step.recorder
        if recorder is not None:
            recorder.end_step()
            if recorder.done:
                self._end(recorder, "")
        if statistics.trace is not None:
            self._next = statistics.trace

    def break_off(self) -> None:
        """Nothing more is recorded: of a recording that continues, the whole steps are kept."""
        recorder, self._next = self._comm.step.recorder, None
        if recorder is not None:
            self._end(recorder, INTERRUPTED)

    def _end(self, recorder: Recorder, problem: str) -> None:
        self._comm.step.recorder = None

        def make() -> Recording:
            recording = recorder.recording()
            return replace(recording, problem=recording.problem or problem, peak_flops=self._peak_flops)

        self.take(recorder.number, make)

    def _report(self, number: int, make: Make) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
        made = _Made(number, self._first_step, make, profile)
        if profile is not None:
            self._reporter.made(made.profiled)
        elif self._comm.trace_orders.came_late(number, self._comm.rank):
            made.left_out = "the profiler was asked for too late"
        self._reporter.made(made.traced)


@dataclass
class _Made:
    """What a rank has recorded, on the reporter's thread."""

    number: int
    first_step: int
    make: Make
    profile: TorchProfile | None
    left_out: str = ""
    """Why there is no profile of it, though one was wanted."""

    def profiled(self) -> Profiled:
        """What the profiler says; nothing where it is too much, or cannot be had."""
        assert self.profile is not None
        try:
            content = self.profile.content()
            if content is None:
                self.left_out = f"its profile is larger than {MOST_BYTES >> 20} MiB and is left out"
        except (OSError, RuntimeError) as error:  # no room for its file, most likely
            content, self.left_out = None, f"its profile could not be written ({error})"
        return Profiled(self.number, self.first_step, base64.b85encode(content or b"").decode())

    def traced(self) -> Traced:
        """The recording, and what is wrong with it."""
        try:
            recording = self.make()
        except RuntimeError as error:
            recording = Recording((), (), problem=f"the device has failed ({error})")
        problem = recording.problem or self.left_out
        return Traced(self.number, self.first_step, replace(recording, problem=problem).pack())
