"""The same fp32 job under seven layouts: how far loss and gradient norm of each step are from those of one rank, and
whether a layout gives the same bits twice."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from benchmarks.support.jobs import quickstart
from benchmarks.support.local_ranks import LocalRanks, RankResult
from benchmarks.support.report import Report, deliver, parser

Layout = tuple[int, int, int]

LAYOUTS: tuple[Layout, ...] = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2))
"""(tensor, pipeline, data); the first is what the others are compared with."""
STEPS = 30
LOSS_TARGET, NORM_TARGET = 2e-6, 2e-5


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("layouts", __doc__)
    options.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run (default: {STEPS})")
    return deliver(lambda chosen: measure(chosen, LAYOUTS), options.parse_args(arguments))


def measure(options: argparse.Namespace, layouts: Sequence[Layout]) -> Report:
    """Run every layout twice and compare."""
    report = Report("layouts", options.seed)
    ranks = LocalRanks()
    runs = {
        layout: [ranks.train(quickstart(layout, options.steps, options.seed)) for _ in range(2)] for layout in layouts
    }
    reference = runs[layouts[0]][0][0]
    loss_distances, norm_distances = [], []
    for layout, (first, second) in runs.items():
        name = "x".join(str(size) for size in layout)
        loss_distances.append(_distance(first[0].losses, reference.losses))
        norm_distances.append(_distance(first[0].grad_norms, reference.grad_norms))
        if layout != layouts[0]:
            report.add(f"loss_distance_{name}", loss_distances[-1], "ratio", LOSS_TARGET)
            report.add(f"grad_norm_distance_{name}", norm_distances[-1], "ratio", NORM_TARGET)
        report.add(f"same_bits_twice_{name}", _same_bits(first, second), "bool", True)
        report.add(f"step_median_{name}", round(1e3 * statistics.median(first[0].step_seconds), 2), "ms")
    report.add("loss_distance_max", max(loss_distances), "ratio", LOSS_TARGET)
    report.add("grad_norm_distance_max", max(norm_distances), "ratio", NORM_TARGET)
    report.settings = {"job": quickstart(layouts[-1], options.steps, options.seed), "steps": options.steps}
    report.samples = {"loss_of_one_rank": reference.losses, "grad_norm_of_one_rank": reference.grad_norms}
    return report


def _distance(values: list[float], reference: list[float]) -> float:
    """Largest relative difference at any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))


def _same_bits(first: list[RankResult], second: list[RankResult]) -> bool:
    """Whether losses, norms and final state of all ranks are equal."""
    return [(run.losses, run.grad_norms, run.state) for run in first] == [
        (run.losses, run.grad_norms, run.state) for run in second
    ]


if __name__ == "__main__":
    sys.exit(main())
