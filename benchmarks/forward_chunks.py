"""What forward in chunks (`parallel.forward_chunks`) costs or gains on two tensor ranks: the same job with one, two and
four chunks, with the sequence split and whole, and how far its losses are from each other.

The kinds take turns, each run a fresh gang; a step's time is the median over all runs' steps but their first ones. On
cores that each have a rank, a message is sent and received by the core that computes, so nothing can be hidden but the
wait for the other rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import Report, deliver, parser

COUNTS = (1, 2, 4)
WARM_UP = 3
MODEL = {"layers": 4, "hidden_size": 256, "heads": 4, "sequence_length": 256}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("forward_chunks", __doc__)
    options.add_argument("--steps", type=int, default=12, help="steps of each run (default: 12)")
    options.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: 3)")
    return deliver(lambda chosen: measure(chosen, MODEL), options.parse_args(arguments))


def measure(options: argparse.Namespace, model: dict[str, Any]) -> Report:
    """Time every kind in turns."""
    report, ranks = Report("forward_chunks", options.seed), LocalRanks()
    kinds = [(split, count) for split in (True, False) for count in COUNTS]
    seconds: dict[tuple[bool, int], list[float]] = {kind: [] for kind in kinds}
    losses: dict[tuple[bool, int], list[float]] = {}
    for _ in range(options.rounds):
        for kind in kinds:
            run = ranks.train(job(options, model, *kind))[0]
            seconds[kind] += run.step_seconds[min(WARM_UP, options.steps - 1) :]
            losses[kind] = run.losses
    for split, count in kinds:
        name = f"{'split' if split else 'whole'}_{count}"
        median, alone = statistics.median(seconds[split, count]), statistics.median(seconds[split, 1])
        report.add(f"step_{name}", round(1e3 * median, 2), "ms")
        if count > 1:
            report.add(f"step_{name}_to_1", round(median / alone, 4), "ratio")
            pairs = zip(losses[split, count], losses[split, 1], strict=True)
            report.add(f"loss_distance_{name}", max(abs(a - b) / abs(b) for a, b in pairs), "ratio", 2e-6)
    report.settings = {"job": job(options, model, True, 2), "steps": options.steps, "rounds": options.rounds}
    return report


def job(options: argparse.Namespace, model: dict[str, Any], split: bool, count: int) -> dict[str, Any]:
    """A job of two tensor ranks on the standard library's text."""
    return {
        "name": f"chunks-{count}",
        "model": model,
        "data": {"source": "python-stdlib"},
        "train": {"steps": options.steps, "global_batch_size": 4, "micro_batch_size": 2, "seed": options.seed},
        "parallel": {"tensor": 2, "sequence_parallel": split, "forward_chunks": count},
        "checkpoint": {"every_steps": 0},
    }


if __name__ == "__main__":
    sys.exit(main())
