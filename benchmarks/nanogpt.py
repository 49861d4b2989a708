"""The engine alone in one process, with nanoGPT's settings for a CPU, compared with a plain PyTorch loop.

Both start from the same weights and see the same batches; they take turns in blocks of iterations, so that the
machine's other work meets both. The loss is that of the whole held-out tenth of the text, in windows that do not
overlap. nanoGPT publishes 1.88 from a small sample of it.

With `--processes` nothing is compared but time: whole processes take turns, each started as its users start it, on one
core and on two, `python -m manta.workers.run` and a plain loop, or with `--nanogpt DIR` nanoGPT itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.support.jobs import SHAKESPEARE, nanogpt
from benchmarks.support.nanogpt_processes import SETTLING, engine, plain_loop, take_turns, their_program
from benchmarks.support.plain_gpt import PlainLoop
from benchmarks.support.report import Report, deliver, parser
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec
from manta.workers.data.batches import Batches
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.protocol.messages import Resume
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import Trainer
from manta.workers.training.learning_rate import learning_rate
from manta.workers.training.reporter import Reporter

STEPS = 2000
BLOCK = 25
TURNS, ITERATIONS = 4, 240
EVALUATION_WINDOWS = 64


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("nanogpt", __doc__)
    options.add_argument("--text", type=Path, default=SHAKESPEARE, help="the text (default: tinyshakespeare)")
    options.add_argument("--steps", type=int, default=STEPS, help=f"iterations (default: {STEPS})")
    options.add_argument("--processes", action="store_true", help="compare the time of whole processes, in turns")
    options.add_argument("--nanogpt", type=Path, metavar="DIR", help="a copy of nanoGPT's repository; with --processes")
    options.add_argument("--turns", type=int, default=TURNS, help=f"with --processes (default: {TURNS})")
    chosen = options.parse_args(arguments)
    if chosen.nanogpt is not None and not chosen.processes:
        options.error("--nanogpt goes with --processes")
    # the processes run in a folder of their own
    chosen.text = chosen.text.resolve()
    chosen.nanogpt = None if chosen.nanogpt is None else chosen.nanogpt.resolve()
    return deliver(measure_processes if chosen.processes else measure, chosen)


def measure_processes(options: argparse.Namespace, iterations: int = ITERATIONS) -> Report:
    """Let whole processes take turns. Raises DataError when the text is not there, ProcessFailed."""
    report = Report("nanogpt_processes", options.seed)
    document = nanogpt(options.text, iterations, options.seed)
    cores = [count for count in (1, 2) if count <= len(os.sched_getaffinity(0))]
    with tempfile.TemporaryDirectory(prefix="nanogpt-") as name:
        folder = Path(name)
        other = (
            their_program(options.nanogpt, options.text, iterations, folder)
            if options.nanogpt is not None
            else plain_loop(options.text, iterations)
        )
        by_cores = take_turns((engine(document, options.text, folder), other), cores, options.turns)
    what = "plain" if options.nanogpt is None else "nanogpt"
    for count, turns in by_cores.items():
        report.add(f"iteration_engine_{count}_cores", round(statistics.median(turns.engine), 3), "ms")
        report.add(f"iteration_{what}_{count}_cores", round(statistics.median(turns.other), 3), "ms")
        report.add(f"iteration_engine_to_{what}_{count}_cores", round(turns.ratio, 4), "ratio", 1.0)
        report.samples[f"{count}_cores"] = [turns.engine, turns.other]
    document["data"]["paths"] = [options.text.name]
    report.settings = {"job": document, "turns": options.turns, "iterations": iterations, "settling": SETTLING}
    return report


def measure(options: argparse.Namespace) -> Report:
    """Train both. Raises DataError when the text is not there."""
    report = Report("nanogpt", options.seed)
    document = nanogpt(options.text, options.steps, options.seed)
    spec = parse_job_spec(document)
    torch.set_num_threads(1)
    trainer = Trainer(spec, Comm(RankGrid(spec.layout), 0, torch.device("cpu")), Reporter(lambda _: None), 1e12)
    trainer.restore(Resume())
    plain = PlainLoop(spec, {entry.name: entry.parameter for entry in trainer.engine.model.named_shards()})

    engine_seconds, plain_seconds, furthest = _race(spec, trainer, plain)

    batches = trainer.batches
    run = ForwardPass(Positions.of(spec.model.sequence_length))
    engine_loss = split_loss(batches, lambda tokens_sb: trainer.engine.model.chunks[0](tokens_sb, run))
    plain_loss = split_loss(batches, lambda tokens_sb: plain.model(tokens_sb.t()).transpose(0, 1))
    full_run = options.steps == STEPS
    report.add("validation_loss_engine", round(engine_loss, 5), "nats/token", 1.93 if full_run else None)
    report.add("validation_loss_plain", round(plain_loss, 5), "nats/token")
    report.add("validation_loss_difference", round(abs(engine_loss - plain_loss), 6), "nats/token", 0.02)
    report.add("training_loss_largest_difference", furthest, "nats/token")
    report.add("iteration_engine_median", round(1e3 * statistics.median(engine_seconds), 3), "ms")
    report.add("iteration_plain_median", round(1e3 * statistics.median(plain_seconds), 3), "ms")
    ratio = statistics.median(engine_seconds) / statistics.median(plain_seconds)
    report.add("iteration_engine_to_plain", round(ratio, 4), "ratio")
    document["data"]["paths"] = [options.text.name]
    report.settings = {"job": document, "threads": torch.get_num_threads(), "iterations_a_turn": BLOCK}
    return report


def _race(spec: JobSpec, trainer: Trainer, plain: PlainLoop) -> tuple[list[float], list[float], float]:
    """Train both to the end in turns: seconds of each iteration of both, largest difference of their losses."""
    engine_losses: list[float] = []
    plain_losses: list[float] = []
    engine_seconds: list[float] = []
    plain_seconds: list[float] = []

    def engine_step(_: int) -> float:
        return trainer.train_step().loss

    def plain_step(step: int) -> float:
        rate = learning_rate(spec.train.optimizer, step, spec.train.steps)
        return plain.step(trainer.batches.training(step)[0], rate)

    runners = [(engine_step, engine_losses, engine_seconds), (plain_step, plain_losses, plain_seconds)]
    for first in range(1, spec.train.steps + 1, BLOCK):
        block = range(first, min(first + BLOCK, spec.train.steps + 1))
        for run, losses, seconds in runners:
            for step in block:
                began = time.perf_counter()
                losses.append(run(step))
                seconds.append(time.perf_counter() - began)
        runners.reverse()
    furthest = max(abs(a - b) for a, b in zip(engine_losses, plain_losses, strict=True))
    return engine_seconds, plain_seconds, furthest


@torch.no_grad()
def split_loss(batches: Batches, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Mean loss over all windows of the held-out part, in nats a token. `logits_of`: tokens [s, b] -> [s, b, v]."""
    length = batches.spec.model.sequence_length
    windows = (batches.validation_tokens - 1) // length
    total = 0.0
    for first in range(0, windows, EVALUATION_WINDOWS):
        several = range(first, min(first + EVALUATION_WINDOWS, windows))
        starts = [batches.training_tokens + window * length for window in several]
        tokens = torch.stack([torch.from_numpy(batches.corpus.read(start, length + 1)) for start in starts], 1)
        losses = F.cross_entropy(logits_of(tokens[:-1]).flatten(0, 1), tokens[1:].flatten(), reduction="sum")
        total += losses.item()
    return total / (windows * length)


if __name__ == "__main__":
    sys.exit(main())
