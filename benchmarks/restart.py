"""How fast a job starts, how fast it continues after kill -9 of a rank, and whether the kill shows in its losses.

All is seen from outside, over REST, on a service of the benchmark's own. Commits are seen in the ranks' shared
memory, where each marks a step the moment it is whole.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time

from benchmarks.support.jobs import quickstart
from benchmarks.support.kills import JOB_SECONDS, STEPS_BETWEEN, kills_of
from benchmarks.support.own_service import POLL_SECONDS, OwnService, own_service
from benchmarks.support.report import Report, deliver, parser
from benchmarks.support.visibility import visibility_seconds

START_TARGET, RECOVERY_TARGET, VISIBILITY_TARGET = 6.0, 4.0, 0.25
EIGHT = (2, 2, 2)
FOURS = {"tensor_data": (2, 1, 2), "pipeline_data": (1, 2, 2)}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("restart", __doc__)
    options.add_argument("--starts", type=int, default=5, help="times that a job of 8 ranks is started (default: 5)")
    options.add_argument("--kills", type=int, default=5, help="kills of a rank for each layout (default: 5)")
    options.add_argument("--visible", type=int, default=60, help="steps watched from commit to REST (default: 60)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Start the service, and measure one thing after the other."""
    report = Report("restart", options.seed)
    choice = random.Random(options.seed)
    with own_service() as service:
        starts = [_start_seconds(service, options.seed) for _ in range(options.starts)]
        report.add_spread("submit_to_first_step_8_ranks", starts, "s", START_TARGET)
        report.samples["submit_to_first_step_8_ranks"] = _rounded(starts)
        everything: list[float] = []
        for name, layout in FOURS.items():
            document = quickstart(layout, STEPS_BETWEEN * (options.kills + 1), options.seed)
            outcome = kills_of(service, document, math.prod(layout), options.kills, choice)
            everything += [kill.seconds for kill in outcome.each]
            outcome.report(report, name, RECOVERY_TARGET)
        report.add_spread("kill_to_next_step_4_ranks", everything, "s", RECOVERY_TARGET)
        document = quickstart(FOURS["tensor_data"], options.visible, options.seed)
        visible = visibility_seconds(service, document, JOB_SECONDS)
        report.add_spread("commit_to_rest", visible, "s", VISIBILITY_TARGET)
        report.add("commit_to_rest_steps", len(visible), "steps")
    report.settings = {
        "job": quickstart(EIGHT, STEPS_BETWEEN, options.seed),
        "steps_between_kills": STEPS_BETWEEN,
        "layouts_killed": {name: list(layout) for name, layout in FOURS.items()},
        "polled_every_seconds": POLL_SECONDS,
    }
    return report


def _start_seconds(service: OwnService, seed: int) -> float:
    """Seconds from submission to the first committed step of a job of 8 ranks, which is then cancelled."""
    document = quickstart(EIGHT, 1000, seed)
    began = time.monotonic()
    job = service.client.submit(document)
    service.wait_for_step(job.id, 1, JOB_SECONDS)
    took = time.monotonic() - began
    service.client.cancel(job.id)
    service.wait_until_final(job.id, JOB_SECONDS)
    return took


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    sys.exit(main())
