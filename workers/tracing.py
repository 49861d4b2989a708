"""Traces of single steps, on one rank: when they begin, and where what was recorded goes.

A trace is asked of rank 0 alone, which tells the others with the agreement of the step before: so all record the same
steps, however late the order comes. What each has recorded it reports by itself once its last step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workers.comm.comm import Comm
from workers.comm.device_marks import new_event
from workers.parallel.data.step_statistics import StepStatistics
from workers.protocol.reports import TraceBegan, Traced
from workers.reporter import Reporter
from workers.timing.recorder import DeviceMoments, HostMoments, Moments, Recorder
from workers.timing.recording import INTERRUPTED, Recording

Take = Callable[[int, Recording], None]
"""Takes the number of a trace, and what this rank has recorded of it."""


class Tracing:
    """Records the steps that are to be traced. For the training thread."""

    def __init__(self, comm: Comm, reporter: Reporter, peak_flops: float):
        """`peak_flops`: of this rank's device, FLOP/s."""
        self._comm, self._reporter = comm, reporter
        self._peak_flops = peak_flops
        self.take: Take = self._report
        """Takes what is recorded, once it is whole: it is reported, unless somebody else wants it."""
        self._next: tuple[int, int] | None = None
        self._first_step = 0

    def begin_with_next_step(self, number: int, steps: int) -> None:
        """Record the next `steps` steps as trace `number`. All ranks are told the same before the same step."""
        self._next = (number, steps)

    def begin_step(self, step: int) -> None:
        """Step number `step` begins."""
        step_phases = self._comm.step
        if step_phases.recorder is None and self._next is not None:
            number, steps = self._next
            self._next, self._first_step = None, step
            self._comm.trace_orders.take(self._comm.generation, number)
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
        """Nothing more is recorded: of a recording that goes on, the whole steps are kept."""
        recorder, self._next = self._comm.step.recorder, None
        if recorder is not None:
            self._end(recorder, INTERRUPTED)

    def _end(self, recorder: Recorder, problem: str) -> None:
        self._comm.step.recorder = None
        recording = recorder.recording()
        problem = recording.problem or problem
        self.take(recorder.number, replace(recording, problem=problem, peak_flops=self._peak_flops))

    def _report(self, number: int, recording: Recording) -> None:
        first_step = self._first_step
        self._reporter.made(lambda: Traced(number, first_step, recording.pack()))
