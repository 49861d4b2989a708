"""One training step of the engine in one process on a CPU, beside the same model written plainly in PyTorch and
beside `transformers`' GPT-2: forward, backward, clipping and AdamW (fused in all three) on the same tokens.

The three take turns in blocks of steps, so that the machine's other work meets all of them. A speed is the ratio of
median step times, theirs over the engine's: above 1 the engine is faster. Also the host's time a layer: the parallel
path with groups of size 2 whose collectives return at once, on tensors so small that arithmetic does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.faked_comm import FakedComm
from benchmarks.hugging_face import gpt2_like
from benchmarks.plain_gpt import Layer as PlainLayer
from benchmarks.plain_gpt import PlainLoop
from benchmarks.report import Report, deliver, parser
from workers.comm import Comm
from workers.config import JobSpec
from workers.data.batches import MicroBatch
from workers.engine import Engine
from workers.model.gpt import ForwardPass, Layer
from workers.parallel.flat import FlatParameters, Sharing
from workers.parallel.grid import RankGrid
from workers.parallel.linear import Region
from workers.parallel.shards import named_shards
from workers.parallel.weight_gradients import WeightGradients
from workers.spec_reading import parse_job_spec

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    batch: int
    vocabulary_size: int


SIZES = {
    "nanogpt": Size(4, 128, 4, 64, 12, 256),
    "middle": Size(4, 384, 6, 256, 4, 8192),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("step", __doc__)
    options.add_argument("--rounds", type=int, default=9, help="blocks of steps of each contestant (default: 9)")
    options.add_argument("--seconds", type=float, default=1.5, help="length of a block, roughly (default: 1.5)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Let the contestants race at each size."""
    report = Report("step", options.seed)
    torch.set_num_threads(1)
    for name, size in SIZES.items():
        medians = _race(_contestants(size, options.seed), options.rounds, options.seconds)
        for contestant, seconds in medians.items():
            report.add(f"{name}_{contestant}_step", round(1e3 * seconds, 3), "ms")
        # Targets are limits from above: the engine's time over theirs.
        report.add(f"{name}_engine_to_plain", round(medians["engine"] / medians["plain"], 4), "ratio", 1 / 0.97)
        # The cost if the parts of every step were measured; they are of every tenth.
        measuring = medians["engine_measured"] / medians["engine"] - 1
        report.add(f"{name}_cost_of_measuring_parts", round(measuring, 4), "ratio", 0.01)
        report.add(
            f"{name}_engine_to_transformers", round(medians["engine"] / medians["transformers"], 4), "ratio", 1.0
        )
    host = _race(_layers(), options.rounds, options.seconds / 3)
    for contestant, seconds in host.items():
        report.add(f"host_time_{contestant}_layer", round(1e6 * seconds, 1), "us")
    report.add("host_time_parallel_to_plain", round(host["parallel"] / host["plain"], 4), "ratio", 1.5)
    report.settings = {
        "sizes": {name: vars(size) for name, size in SIZES.items()},
        "threads": 1,
        "rounds": options.rounds,
        "seconds_a_round": options.seconds,
    }
    return report


def job(size: Size, seed: int) -> JobSpec:
    """The job of one process."""
    model = {key: value for key, value in vars(size).items() if key != "batch"}
    train = {"steps": 1000, "global_batch_size": size.batch, "micro_batch_size": size.batch, "seed": seed}
    return parse_job_spec({"model": model, "data": {"source": "python-stdlib"}, "train": train})


def _contestants(size: Size, seed: int) -> dict[str, Callable[[], object]]:
    """One step of each, on the same tokens and from the same weights."""
    spec = job(size, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (size.sequence_length + 1, size.batch)
    tokens_sb = torch.randint(size.vocabulary_size, shape, generator=generator)
    batch = MicroBatch(range(size.batch), tokens_sb[:-1], tokens_sb[1:])
    engine = Engine(spec, Comm(RankGrid(spec.layout), 0, torch.device("cpu")))
    engine.initialise(seed)
    plain = PlainLoop(spec, {entry.name: entry.parameter for entry in engine.model.named_shards()}, fused=True)

    def step() -> None:
        engine.step([batch], size.batch, LEARNING_RATE, 0)

    def measured_step() -> None:
        engine.comm.parts.begin()
        step()
        engine.comm.parts.end()

    return {
        "engine": step,
        "engine_measured": measured_step,
        "plain": lambda: plain.step(batch, LEARNING_RATE),
        "transformers": _transformers_step(spec, tokens_sb.t().contiguous()),
    }


def _transformers_step(spec: JobSpec, tokens_bs: torch.Tensor) -> Callable[[], object]:
    model = gpt2_like(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        logits = model(tokens_bs[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_bs[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def _layers() -> dict[str, Callable[[], object]]:
    """Forward and backward of one small layer: the parallel path, and the plain one."""
    model = {"layers": 1, "hidden_size": 32, "heads": 4, "sequence_length": 8}
    parallel = {"tensor": 2, "sequence_parallel": True}
    document = {"model": model, "data": {"source": "python-stdlib"}, "train": {"steps": 1}, "parallel": parallel}
    spec = parse_job_spec(document)
    region = Region(FakedComm(RankGrid(spec.layout), 0, torch.device("cpu")), True, WeightGradients())
    layer = Layer(spec, region, 0)
    FlatParameters(named_shards(layer), Sharing(1, False), torch.device("cpu"))
    plain = PlainLayer(spec.model)
    x_sbh = torch.randn(8 // 2, 1, 32, requires_grad=True)
    x_bsh = torch.randn(1, 8, 32, requires_grad=True)
    run = ForwardPass()
    grad_sbh, grad_bsh = torch.ones(8 // 2, 1, 32), torch.ones(1, 8, 32)
    return {
        "parallel": lambda: torch.autograd.backward(layer(x_sbh, run), grad_sbh),
        "plain": lambda: torch.autograd.backward(plain(x_bsh), grad_bsh),
    }


def _race(contestants: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, float]:
    """Median seconds of a step of each."""
    counts = {}
    for name, step in contestants.items():
        step()
        began = time.perf_counter()
        step()
        counts[name] = max(3, int(seconds / (time.perf_counter() - began)))
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            for _ in range(counts[name]):
                began = time.perf_counter()
                step()
                found[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
