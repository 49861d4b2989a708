"""Whether a job that is well is ever taken for one that hangs: many quick steps with checkpoints and validations, on a
machine that is kept busy on purpose. Every alarm is a false one, and there must be none.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.support.jobs import quickstart
from benchmarks.support.own_service import JobWentWrong, own_service
from benchmarks.support.report import Report, deliver, machine, parser
from service.states import is_final

LAYOUTS = {"tensor_data": (2, 1, 2), "pipeline_data": (1, 2, 2)}
ALARMS = ("rank_hung", "gang_hung", "straggler", "rank_lost")
"""Events that a job without a fault must not have."""
STEPS = 10_000
CHECKPOINT_EVERY, VALIDATE_EVERY = 200, 500
STEP_SECONDS = 5.0
"""A run is given up when its steps take longer than this on average."""
LOOK_SECONDS = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("false_alarms", __doc__)
    options.add_argument("--steps", type=int, default=STEPS, help=f"steps of both jobs together (default: {STEPS})")
    options.add_argument("--hogs", type=int, help="processes that only burn time (default: one a core)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Run one job after the other next to the processes that burn time, and count alarms."""
    report = Report("false_alarms", options.seed)
    hogs = machine()["cores"] if options.hogs is None else options.hogs
    steps, alarms = max(1, options.steps // len(LAYOUTS)), dict.fromkeys(ALARMS, 0)
    generations = 0
    with own_service() as service, _busy(hogs):
        for name, layout in LAYOUTS.items():
            began = time.monotonic()
            job_id = service.client.submit(_job(layout, steps, options.seed)).id
            deadline = began + 120.0 + STEP_SECONDS * steps
            while not is_final((job := service.client.job(job_id)).state):
                if time.monotonic() > deadline:
                    raise JobWentWrong(f"{job.name} is still {job.state} at step {job.step} of {steps}")
                time.sleep(LOOK_SECONDS)
            if job.state != "SUCCEEDED":
                raise JobWentWrong(f"{job.name} ended as {job.state}: {job.message}")
            for kind, count in _count(service.client, job_id).items():
                alarms[kind] += count
            generations = max(generations, job.generation)
            report.add(f"{name}_seconds_a_step", round((time.monotonic() - began) / steps, 4), "s")
    report.add("steps", steps * len(LAYOUTS), "steps")
    for kind in ALARMS:
        report.add(kind, alarms[kind], "events", 0)
    report.add("generations", generations, "generations", 1)
    report.settings = {"job": _job(LAYOUTS["tensor_data"], steps, options.seed), "hogs": hogs}
    return report


def _job(layout: tuple[int, int, int], steps: int, seed: int) -> dict[str, Any]:
    """Steps as quick as they get, so that the watch is as impatient as it gets."""
    document = quickstart(layout, steps, seed)
    document["model"].update(layers=2, hidden_size=32, heads=4, sequence_length=32)
    document["train"].update(global_batch_size=8, micro_batch_size=2, validate_every=min(VALIDATE_EVERY, steps))
    document["checkpoint"] = {"every_steps": min(CHECKPOINT_EVERY, steps), "keep": 2}
    return document


def _count(client: Any, job_id: str) -> dict[str, int]:
    alarms, cursor = dict.fromkeys(ALARMS, 0), None
    while True:
        page = client.events(job_id, cursor)
        for event in page.items:
            if event.type in alarms:
                alarms[event.type] += 1
                print(f"false alarm: {event.message}", file=sys.stderr)
        if page.next_cursor is None:
            return alarms
        cursor = page.next_cursor


@contextlib.contextmanager
def _busy(hogs: int) -> Iterator[None]:
    """So many processes that want a core each."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(hogs)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
