"""What a trace costs the steps that it records, and whether its bubble is right.

A job of 2 x 2 ranks trains steps some of which are recorded, five in a row or one at a time; the medians of both kinds
are compared. A job of two stages does the same while timers of its own measure the bubble of the steps that are not
recorded: waits for messages, and the time from a rank's last pass to the last of all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import Report, deliver, parser
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.liveness.progress import Progress
from manta.workers.protocol.messages import Resume
from manta.workers.step_traces.analysis import bubble
from manta.workers.step_traces.assembly import assembled
from manta.workers.timing.recorder import HostMoments, Recorder
from manta.workers.timing.recording import Recording
from manta.workers.timing.step_phases import StepPhases
from manta.workers.trainer import Trainer
from manta.workers.training.reporter import Reporter
from manta.workers.training.tracing import BuildRecording

WARM_UP, PHASES = 4, 20_000
TURN = 5
"""Steps of a trace; and one step among others that are not recorded, as most traces are."""
COST_TARGET = 0.02
STAGES = RankGrid(ParallelConfig(pipeline=2))
MODEL = {"layers": 4, "hidden_size": 128, "heads": 4, "sequence_length": 128}


@dataclass
class Seen:
    """What one rank knows of its steps after the first few."""

    plain: list[float]
    """Seconds of steps that were not recorded."""
    traced: list[float]
    plain_processor: list[float]
    """Seconds of this rank's processor in them, which what else runs on the machine changes less."""
    traced_processor: list[float]
    recordings: list[Recording]
    bubbles: list[float]
    """Of steps that were not recorded, by timers of their own."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("traces", __doc__)
    options.add_argument("--steps", type=int, default=60, help="steps of each kind, a multiple of 5 (default: 60)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Alternate steps of both kinds."""
    report = Report("traces", options.seed)
    ranks = LocalRanks()
    for turn, name in ((TURN, "traced_step"), (1, "lone_traced_step")):
        four = ranks.run(alternating, job(options, tensor=2, pipeline=2), options.steps, turn)
        _compare(report, name, four[0])
    for name, recorder in (("phase", None), ("recorded_phase", Recorder(1, 1, HostMoments()))):
        report.add(name, round(1e6 * seconds_of_a_phase(recorder), 3), "us")
    report.add("slices_of_a_step", len(four[0].recordings[0].slices), "slices")
    report.add("bytes_of_a_step", len(four[0].recordings[0].pack().packed), "bytes")
    two = ranks.run(alternating, job(options, tensor=1, pipeline=2), options.steps, TURN)
    by_timers = statistics.mean(statistics.median(each.bubbles) for each in two)
    traces = [assembled(dict(enumerate(both)), STAGES) for both in zip(*(each.recordings for each in two), strict=True)]
    by_rank = [statistics.median(bubble(trace, trace.ranks[rank]) for trace in traces) for rank in range(2)]
    by_traces = statistics.mean(by_rank)
    report.add("bubble_by_timers", round(by_timers, 4), "ratio")
    report.add("bubble_by_traces", round(by_traces, 4), "ratio")
    report.add("bubble_difference", round(abs(by_traces - by_timers), 4), "ratio", 0.03)
    report.settings = {"model": MODEL, "steps": options.steps}
    return report


def _compare(report: Report, name: str, seen: Seen) -> None:
    """Of steps that were recorded the median, and what they took more than those next to them that were not."""
    plain, traced = statistics.median(seen.plain), statistics.median(seen.traced)
    report.add(f"beside_{name}", round(1e3 * plain, 3), "ms")
    report.add(name, round(1e3 * traced, 3), "ms")
    report.add(f"cost_of_{name}", round(traced / plain - 1, 4), "ratio", COST_TARGET)
    plain, traced = statistics.median(seen.plain_processor), statistics.median(seen.traced_processor)
    report.add(f"processor_of_{name}", round(traced / plain - 1, 4), "ratio", COST_TARGET)


def job(options: argparse.Namespace, **parallel: int) -> dict[str, Any]:
    """A job long enough for both kinds of steps."""
    return {
        "model": MODEL,
        "data": {"source": "python-stdlib"},
        "train": {
            "steps": WARM_UP + 2 * options.steps,
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "seed": options.seed,
            "time_parts_every": 0,
        },
        "parallel": parallel,
    }


def seconds_of_a_phase(recorder: Recorder | None) -> float:
    """Of the processor, to enter and leave one, whatever else runs."""
    phases = StepPhases(torch.device("cpu"), Progress())
    phases.recorder = recorder
    if recorder is not None:
        recorder.begin_step(1)
    began = time.process_time()
    for _ in range(PHASES):
        with phases.phase("forward", 3, 1):
            pass
    return (time.process_time() - began) / PHASES


class _Timers:
    """Measures the bubble of a rank's steps, with the recorder and without it."""

    def __init__(self, trainer: Trainer):
        self._comm, pipeline = trainer.comm, trainer.engine.pipeline
        self.waited = self.passed_at = 0.0
        arrived, run = pipeline._arrived, pipeline.train

        def timed_arrival(*arguments: Any) -> torch.Tensor:
            began = time.monotonic()
            try:
                return arrived(*arguments)
            finally:
                self.waited += time.monotonic() - began

        def timed_passes(*arguments: Any) -> Any:
            self.waited = 0.0
            try:
                return run(*arguments)
            finally:
                self.passed_at = time.monotonic()

        pipeline._arrived = timed_arrival  # type: ignore[method-assign, assignment]
        pipeline.train = timed_passes  # type: ignore[method-assign, assignment]

    def bubble(self, seconds: float) -> float:
        """Of the last step, which took so many seconds. All ranks of the one machine ask together."""
        last = torch.tensor([self.passed_at], dtype=torch.float64)
        self._comm.all_reduce("world", last, largest=True)
        return (self.waited + float(last) - self.passed_at) / seconds


def alternating(comm: Comm, spec: JobSpec, steps: int, turn: int) -> Seen:
    """Train, with `turn` steps recorded by one trace and as many not, in turns."""
    trainer = Trainer(spec, comm, Reporter(lambda _: None), 1e12)
    trainer.restore(Resume())
    timers, seen = _Timers(trainer), Seen([], [], [], [], [], [])
    makes: list[BuildRecording] = []
    trainer.tracing.sink = lambda _number, make: makes.append(make)
    for number in range(WARM_UP + 2 * steps):
        trace, place = divmod(number - WARM_UP, turn)
        records = number >= WARM_UP and trace % 2 == 0
        if records and place == 0:
            trainer.tracing.begin_with_next_step(number, turn)
        comm.barrier()
        began, busy = time.monotonic(), time.process_time()
        trainer.train_step()
        seconds, busy = time.monotonic() - began, time.process_time() - busy
        if number >= WARM_UP:
            (seen.traced if records else seen.plain).append(seconds)
            (seen.traced_processor if records else seen.plain_processor).append(busy)
            if not records:
                seen.bubbles.append(timers.bubble(seconds))
    comm.barrier()
    seen.recordings = [make() for make in makes]
    return seen


if __name__ == "__main__":
    sys.exit(main())
