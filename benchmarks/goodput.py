"""The goodput of a long job of which a rank is killed again and again, and whether its ledger adds up.

Goodput is what the job's ledger says: the share of its time, but for queue and pauses, that went into steps that count.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import time
from typing import Any

from benchmarks.support.jobs import quickstart
from benchmarks.support.own_service import JobWentWrong, OwnService, own_service
from benchmarks.support.report import Report, deliver, parser
from manta.api.schemas import Job
from manta.service.states import is_final

LAYOUT = (2, 1, 2)
MINUTES = 10.0
TARGETS = {60.0: 0.95, 20.0: 0.90}
"""Goodput that is asked for, by seconds between two kills."""
MAX_OFF = 0.001
"""Share of the wall time by which the ledger's classes may miss it."""
STEPS = 10_000_000
MAX_RESTARTS = 1000
JOB_SECONDS = 300.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("goodput", __doc__)
    options.add_argument("--minutes", type=float, default=MINUTES, help=f"for each job (default: {MINUTES:g})")
    options.add_argument(
        "--every", type=float, nargs="+", default=list(TARGETS), help="seconds between two kills (default: 60 20)"
    )
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """One job for each time between two kills."""
    report = Report("goodput", options.seed)
    choice = random.Random(options.seed)
    with own_service() as service:
        for every in options.every:
            _job(report, service, every, options, choice)
    report.settings = {"job": _document(options.seed), "minutes": options.minutes}
    return report


def _document(seed: int) -> dict[str, Any]:
    """A job that may be killed as often as it takes."""
    return quickstart(LAYOUT, STEPS, seed) | {"recovery": {"max_restarts": MAX_RESTARTS}}


def _job(report: Report, service: OwnService, every: float, options: argparse.Namespace, choice: random.Random) -> None:
    job_id = service.client.submit(_document(options.seed)).id
    service.wait_for_step(job_id, 1, JOB_SECONDS)
    began = time.monotonic()
    kills = 0
    while (due := began + (kills + 1) * every) < began + 60 * options.minutes:
        time.sleep(max(0.0, due - time.monotonic()))  # the time between two kills is what is varied
        _kill(service, job_id, choice.randrange(math.prod(LAYOUT)))
        kills += 1
    time.sleep(max(0.0, began + 60 * options.minutes - time.monotonic()))
    service.client.cancel(job_id)
    job = service.wait_until_final(job_id, JOB_SECONDS)
    _report(report, service, job, every, kills)


def _kill(service: OwnService, job_id: str, rank: int) -> None:
    job, gang = service.client.job(job_id), service.processes(job_id)
    if is_final(job.state) or rank not in gang:
        raise JobWentWrong(f"{job.name} is {job.state}, with no process to kill as rank {rank}: {job.message}")
    os.kill(gang[rank][0], signal.SIGKILL)


def _report(report: Report, service: OwnService, job: Job, every: float, kills: int) -> None:
    name, ledger = f"kill_every_{every:g}_s", service.client.ledger(job.id)
    if job.finished_at is None or ledger.goodput is None:
        raise JobWentWrong(f"{job.name} is {job.state} and has no goodput")
    target = TARGETS.get(every)
    report.add(f"{name}_goodput", round(ledger.goodput, 4), "ratio")
    report.add(f"{name}_time_lost", round(1 - ledger.goodput, 4), "ratio", None if target is None else 1 - target)
    wall = (job.finished_at - job.created_at).total_seconds()
    report.add(f"{name}_ledger_off_by", round(abs(sum(ledger.seconds.values()) - wall) / wall, 6), "ratio", MAX_OFF)
    recoveries = service.client.recoveries(job.id, limit=1000).items
    report.add(f"{name}_kills", kills, "kills")
    report.add(f"{name}_recoveries", len(recoveries), "recoveries")
    report.samples[name] = [{kind: round(seconds, 3) for kind, seconds in ledger.seconds.items()}]
    times = [row.total_seconds for row in recoveries if row.total_seconds is not None]
    if times:
        report.add_spread(f"{name}_recovery", times, "s")


if __name__ == "__main__":
    sys.exit(main())
