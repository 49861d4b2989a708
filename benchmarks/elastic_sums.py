"""What sums that do not depend on the number of replicas cost (`train.deterministic: elastic`): the same job with and
without, for one and two replicas in turn, and whether one, two and three replicas give the same bits with and without.

The kinds take turns, each run a fresh gang; a step's time is the median over all runs' steps but their first ones. The
tree costs one or two passes over the gradients a micro-batch, so the more a micro-batch computes, the less that is:
see `--micro-batch-size`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks.support.local_ranks import LocalRanks, RankResult
from benchmarks.support.report import Report, deliver, parser
from workers.accounting.flops import parameter_count, waiting_gradient_buffers
from workers.spec.reading import parse_job_spec

MODES = ("layout", "elastic")
TIMED = (1, 2)
COMPARED = (1, 2, 3)
WARM_UP = 3
MODEL = {"layers": 4, "hidden_size": 256, "heads": 4, "sequence_length": 128}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("elastic_sums", __doc__)
    options.add_argument("--steps", type=int, default=10, help="steps of each run (default: 10)")
    options.add_argument("--rounds", type=int, default=2, help="runs of each kind (default: 2)")
    options.add_argument("--micro-batch-size", type=int, default=2, help="sequences in one (default: 2)")
    options.add_argument("--micro-batches", type=int, default=8, help="of the global batch (default: 8)")
    return deliver(lambda chosen: measure(chosen, MODEL), options.parse_args(arguments))


def measure(options: argparse.Namespace, model: dict[str, Any]) -> Report:
    """Time both modes and compare bits."""
    report = Report("elastic_sums", options.seed)
    ranks = LocalRanks()
    seconds: dict[tuple[str, int], list[float]] = {(mode, data): [] for mode in MODES for data in TIMED}
    runs: dict[tuple[str, int], RankResult] = {}
    for _ in range(options.rounds):
        for mode, data in seconds:
            runs[mode, data] = ranks.train(job(options, model, mode, data))[0]
            seconds[mode, data] += runs[mode, data].step_seconds[min(WARM_UP, options.steps - 1) :]
    for data in TIMED:
        usual, elastic = (statistics.median(seconds[mode, data]) for mode in MODES)
        report.add(f"step_{data}_layout", round(1e3 * usual, 2), "ms")
        report.add(f"step_{data}_elastic", round(1e3 * elastic, 2), "ms")
        report.add(f"step_{data}_elastic_to_layout", round(elastic / usual, 4), "ratio")
        buffers = waiting_gradient_buffers(parse_job_spec(job(options, model, "elastic", data)))
        report.add(f"gradient_buffers_{data}", buffers, "buffers")
    for mode in MODES:
        for data in set(COMPARED) - set(TIMED):
            runs[mode, data] = ranks.train(job(options, model, mode, data))[0]
        numbers = [(runs[mode, data].losses, runs[mode, data].grad_norms) for data in COMPARED]
        same = all(each == numbers[0] for each in numbers)
        report.add(f"same_bits_{mode}", same, "bool", True if mode == "elastic" else None)
    report.settings = {
        "job": job(options, model, "elastic", TIMED[-1]),
        "parameters": parameter_count(parse_job_spec(job(options, model, "elastic", 1))),
        "steps": options.steps,
        "rounds": options.rounds,
    }
    return report


def job(options: argparse.Namespace, model: dict[str, Any], mode: str, data: int) -> dict[str, Any]:
    """A job of `data` replicas on the standard library's text."""
    return {
        "name": f"{mode}-{data}",
        "model": model,
        "data": {"source": "python-stdlib"},
        "train": {
            "steps": options.steps,
            "global_batch_size": options.micro_batch_size * options.micro_batches,
            "micro_batch_size": options.micro_batch_size,
            "seed": options.seed,
            "deterministic": mode,
            "time_parts_every": 0,
        },
        "parallel": {"data": data},
        "checkpoint": {"every_steps": 0},
    }


if __name__ == "__main__":
    sys.exit(main())
