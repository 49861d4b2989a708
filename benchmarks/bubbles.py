"""Pipeline bubbles as the engine's runtime really has them, compared with those that the schedule promises.

Four stages whose work is a timed wait run whole steps through `manta.workers.parallel.pipeline.runtime`, messages and
all; the step is compared with the event simulation of the same schedule, and the idle time with the papers' formulas.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import Report, deliver, parser
from benchmarks.support.timeline import PassTimes, Timeline
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batches import MicroBatch
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.pipeline.runtime import Pipeline
from manta.workers.parallel.tensor.products import TorchProducts
from manta.workers.parallel.tensor.weight_gradients import WeightGradients
from manta.workers.schedules.stages import virtual_stage

STAGES = 4
MICRO_BATCHES = (4, 8, 16)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
VOCABULARY = 256


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("bubbles", __doc__)
    options.add_argument("--repetitions", type=int, default=3, help="steps of each kind (default: 3)")
    options.add_argument("--wait", type=float, default=0.05, help="seconds of each pass of a stage (default: 0.05)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Time every schedule with every number of micro-batches."""
    report = Report("bubbles", options.seed)
    wait, bubbles, ranks = options.wait, {}, LocalRanks()
    times = PassTimes(forward=wait, backward_input=wait, backward_weight=wait)
    for kind, virtual_stages in SCHEDULES.items():
        for m in MICRO_BATCHES:
            seconds = ranks.run(timed_steps, job(kind, virtual_stages, m), options.repetitions, wait)
            measured = statistics.median(max(step) for step in zip(*seconds, strict=True))
            expected = Timeline.of(times.pipeline(kind, STAGES, virtual_stages), m).makespan
            name = f"{kind}_m{m}".replace("-", "")
            bubbles[kind, m] = measured - 3 * wait * m
            report.add(f"{name}_step", round(1e3 * measured, 2), "ms")
            report.add(f"{name}_simulated", round(1e3 * expected, 2), "ms")
            report.add(f"{name}_deviation", round(abs(measured / expected - 1), 4), "ratio", 0.05)
    for m in MICRO_BATCHES:
        # arXiv:2104.04473, section 2.2.2: the bubble of interleaving is that of 1F1B divided by v.
        report.add(
            f"interleaved_to_1f1b_bubble_m{m}", round(bubbles["interleaved", m] / bubbles["1f1b", m], 3), "ratio"
        )
    report.settings = {"stages": STAGES, "pass_seconds": wait, "repetitions": options.repetitions}
    return report


def job(kind: str, virtual_stages: int, micro_batches: int) -> dict[str, Any]:
    """A job of so many micro-batches of one tiny sequence."""
    return {
        "model": {"layers": STAGES * virtual_stages, "hidden_size": 8, "heads": 1, "sequence_length": 4},
        "data": {"source": "python-stdlib"},
        "train": {"steps": 1, "global_batch_size": micro_batches},
        "parallel": {"pipeline": STAGES, "schedule": kind, "virtual_stages": virtual_stages},
    }


class _TimedWork(torch.autograd.Function):
    """Waits instead of computing, in each pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, store: WeightGradients, wait: float) -> torch.Tensor:
        ctx.store, ctx.wait = store, wait
        time.sleep(wait)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        wait = ctx.wait
        time.sleep(wait)
        ctx.store.submit(lambda: time.sleep(wait))
        return grads[0], None, None, None


class TimedChunk(nn.Module):
    """A virtual stage that takes its share of a stage's time."""

    def __init__(self, spec: JobSpec, index: int, wait: float, store: WeightGradients):
        super().__init__()
        count = spec.layout.pipeline * spec.layout.virtual_stages
        self.is_first, self.is_last = index == 0, index == count - 1
        self.wait, self.store = wait / spec.layout.virtual_stages, store
        self.weight = nn.Parameter(torch.zeros(VOCABULARY, spec.model.hidden_size))

    def forward(self, x: torch.Tensor, run: ForwardPass) -> torch.Tensor:
        """The input, late; tokens are embedded in the first chunk, logits come out of the last."""
        if self.is_first:
            x = nn.functional.embedding(x, self.weight)
        x = _TimedWork.apply(x, self.weight, self.store, self.wait)
        return x @ self.weight.t() if self.is_last else x


class TimedStage(nn.Module):
    """The chunks of one rank."""

    def __init__(self, spec: JobSpec, rank: int, wait: float):
        super().__init__()
        layout = spec.layout
        self.weight_gradients = WeightGradients(TorchProducts())
        self.chunks = nn.ModuleList(
            TimedChunk(
                spec,
                virtual_stage(layout.schedule, layout.pipeline, layout.virtual_stages, rank, chunk),
                wait,
                self.weight_gradients,
            )
            for chunk in range(layout.virtual_stages)
        )

    def begin(self) -> None:
        """Nothing is known of weights."""


def timed_steps(comm: Comm, spec: JobSpec, repetitions: int, wait: float) -> list[float]:
    """Seconds of each step on this rank, from a start that all ranks share."""
    pipeline = Pipeline(spec, TimedStage(spec, comm.index("pipeline"), wait), comm)
    tokens = torch.zeros(spec.model.sequence_length, 1, dtype=torch.int64)
    batch = [MicroBatch(range(i, i + 1), tokens, tokens) for i in range(spec.micro_batches)]
    seconds = []
    for _ in range(repetitions):
        comm.barrier()
        began = time.perf_counter()
        pipeline.train(batch, 1.0)
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
