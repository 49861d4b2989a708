"""Traces of single steps, on one rank: when they begin, and what happens to the recordings.

Only rank 0 is asked for a trace. It informs the others with the agreement of the step before, so that all record the
same steps, however late the request comes. Each rank reports its recording by itself when its last step is over.
"""

from __future__ import annotations

import base64
import gzip
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from manta.workers.comm.backend import new_event
from manta.workers.comm.comm import Comm
from manta.workers.parallel.data.agreement import StepStatistics
from manta.workers.protocol.reports import Profiled, TraceBegan, Traced
from manta.workers.timing.recorder import DeviceMoments, HostMoments, Moments, Recorder
from manta.workers.timing.recording import INTERRUPTED, Recording
from manta.workers.training.reporter import Reporter

BuildRecording = Callable[[], Recording]
"""Builds this rank's recording, on any thread. Raises RuntimeError if its device has failed."""
RecordingSink = Callable[[int, BuildRecording], None]
"""Takes the number of a trace, and the function that builds this rank's recording."""


class Tracing:
    """Records requested steps. For the training thread."""

    def __init__(self, comm: Comm, reporter: Reporter, peak_flops: float):
        """`peak_flops`: of this rank's device, FLOP/s."""
        self._comm, self._reporter = comm, reporter
        self._peak_flops = peak_flops
        self.sink: RecordingSink = self._report
        """Takes completed recordings; by default they are reported."""
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
            order = self._comm.requests.traces.take(self._comm.generation, number)
            if order is not None and self._comm.rank in order.profiler_ranks:
                self._profile = TorchProfile(self._comm.device)
            idle = self._comm.idle_seconds if self._comm.measures_idle_seconds else None
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
        """The step is over; all ranks have agreed on `statistics`."""
        recorder = self._comm.step.recorder
        if recorder is not None:
            recorder.end_step()
            if recorder.done:
                self._end(recorder, "")
        if statistics.asked.trace:
            self.begin_with_next_step(statistics.asked.trace, statistics.asked.traced_steps)

    def abort(self) -> None:
        """Stop recording: of an unfinished recording, the complete steps are kept."""
        recorder, self._next = self._comm.step.recorder, None
        if recorder is not None:
            self._end(recorder, INTERRUPTED)

    def _end(self, recorder: Recorder, problem: str) -> None:
        self._comm.step.recorder = None

        def make() -> Recording:
            recording = recorder.recording()
            return replace(recording, problem=recording.problem or problem, peak_flops=self._peak_flops)

        self.sink(recorder.number, make)

    def _report(self, number: int, make: BuildRecording) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
        made = _Made(number, self._first_step, make, profile)
        if profile is not None:
            self._reporter.deferred(made.profiled)
        elif self._comm.requests.traces.is_late(number, self._comm.rank):
            made.left_out = "the profiler was requested too late"
        self._reporter.deferred(made.traced)


@dataclass
class _Made:
    """A rank's recording, built on the reporter's thread."""

    number: int
    first_step: int
    make: BuildRecording
    profile: TorchProfile | None
    left_out: str = ""
    """Why there is no profile, although one was requested."""

    def profiled(self) -> Profiled:
        """The profile; empty if it is too large, or could not be made."""
        assert self.profile is not None
        try:
            content = self.profile.content()
            if content is None:
                self.left_out = f"its profile is larger than {MAX_BYTES >> 20} MiB and is left out"
        except (OSError, RuntimeError) as error:  # most likely there is no room for its file
            content, self.left_out = None, f"its profile could not be written ({error})"
        return Profiled(self.number, self.first_step, base64.b85encode(content or b"").decode())

    def traced(self) -> Traced:
        """The recording, with any problem."""
        try:
            recording = self.make()
        except RuntimeError as error:
            recording = Recording((), (), problem=f"the device has failed ({error})")
        problem = recording.problem or self.left_out
        return Traced(self.number, self.first_step, replace(recording, problem=problem).pack())


MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of a stored profile, compressed."""


class TorchProfile:
    """torch's own profile of the steps of a trace: every operator and kernel, as a Chrome trace. It runs from its
    creation to `stop`, and slows down the profiled rank far more than the trace itself, and therefore also the ranks
    that wait for it."""

    def __init__(self, device: torch.device):
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        """End the recording."""
        self._profile.stop()

    def content(self) -> bytes | None:
        """A Chrome trace, compressed with gzip; None if it is too large. Takes a while."""
        with tempfile.TemporaryDirectory(prefix="manta-profile-") as folder:
            file = Path(folder) / "profile.json"
            self._profile.export_chrome_trace(str(file))
            content = gzip.compress(file.read_bytes(), 6)
        return content if len(content) <= MAX_BYTES else None
