"""What it costs a job to go from two replicas to one and back, and whether its numbers show it.

A stall is the time between two committed steps with a resize between them; a job that had not been resized would have
taken one step of the new size for it.
"""

from __future__ import annotations

import argparse
import itertools
import sqlite3
import statistics
import sys
from typing import Any

from benchmarks.support.jobs import quickstart
from benchmarks.support.own_service import OwnService, own_service
from benchmarks.support.report import Report, deliver, parser

STALL_TARGET, CURVE_TARGET = 0.5, 1e-5
STEPS_BETWEEN = 15
JOB_SECONDS = 300.0
LAYOUT = (2, 1, 2)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("resize", __doc__)
    options.add_argument("--cycles", type=int, default=5, help="times to go from 2 replicas to 1 and back (default: 5)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Resize a job again and again, with deterministic sums and with the ordinary ones."""
    report = Report("resize", options.seed)
    with own_service() as service:
        for mode in ("elastic", "layout"):
            document = _job(options.seed, mode, options.cycles)
            clean = service.client.submit(document).id
            service.succeed(clean, JOB_SECONDS)
            job_id = service.client.submit(document).id
            _resize(service, job_id, options.cycles)
            expected, rows = service.rows(clean), service.rows(job_id)
            report.add(f"same_bits_{mode}", rows == expected, "bool", True if mode == "elastic" else None)
            report.add(f"largest_relative_difference_{mode}", _difference(rows, expected), "ratio", CURVE_TARGET)
            report.add(f"steps_missing_{mode}", len(expected.keys() - rows.keys()), "steps", 0)
            report.add(f"restarts_{mode}", service.client.job(job_id).restarts, "restarts", 0)
            shrinking, growing = _stalls(service, job_id)
            report.add_spread(f"stall_beyond_two_steps_shrinking_{mode}", shrinking, "s", STALL_TARGET)
            report.add_spread(f"stall_beyond_two_steps_growing_{mode}", growing, "s", STALL_TARGET)
    report.settings = {"job": _job(options.seed, "elastic", options.cycles), "steps_between": STEPS_BETWEEN}
    return report


def _job(seed: int, mode: str, cycles: int) -> dict[str, Any]:
    # Standby ranks are made ready while the others train on, which takes them some steps more.
    document = quickstart(LAYOUT, STEPS_BETWEEN * (2 * cycles + 1) + 25 * cycles, seed)
    document["train"]["deterministic"] = mode
    document["elastic"] = {"min_data": 1, "max_data": 2}
    return document


def _resize(service: OwnService, job_id: str, cycles: int) -> None:
    step = STEPS_BETWEEN
    for size in [1, 2] * cycles:
        service.wait_for_step(job_id, step, JOB_SECONDS)
        generation = service.client.job(job_id).generation
        service.client.resize(job_id, size)
        service.wait_for_generation(job_id, generation + 1, JOB_SECONDS)
        step = service.client.job(job_id).step + STEPS_BETWEEN
    service.succeed(job_id, JOB_SECONDS)


def _stalls(service: OwnService, job_id: str) -> tuple[list[float], list[float]]:
    """For each shrinking and for each growing, the time from the last commit before it to the first after it, less two
    steps of the slower size: the one that is due, and the one that it may have broken off."""
    with sqlite3.connect(f"file:{service.home / 'manta.db'}?mode=ro", uri=True) as database:
        query = "SELECT generation, time, step_seconds FROM metrics WHERE job_id = ? ORDER BY step"
        rows = database.execute(query, (job_id,)).fetchall()
    step_seconds = {
        generation: statistics.median(seconds for number, _, seconds in rows if number == generation)
        for generation in {row[0] for row in rows}
    }
    stalls = [
        (after[0], after[1] - before[1] - 2 * max(step_seconds[before[0]], step_seconds[after[0]]))
        for before, after in itertools.pairwise(rows)
        if before[0] != after[0]
    ]
    # The second generation is the first smaller one.
    return [stall for number, stall in stalls if number % 2 == 0], [stall for number, stall in stalls if number % 2]


def _difference(rows: dict[int, Any], expected: dict[int, Any]) -> float:
    """Largest relative difference of a loss."""
    return max(abs(row[0] - expected[step][0]) / abs(expected[step][0]) for step, row in rows.items())


if __name__ == "__main__":
    sys.exit(main())
