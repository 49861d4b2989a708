"""A seeded soak: small jobs, each with one to three faults drawn at random, all of which must end as if nothing had
happened: same curve and same final weights, bit for bit, the recoveries that the faults call for, and nothing left.

`--only K` repeats the schedule number K of the seed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import own_processes
from benchmarks.support.chaos_schedule import SLOW_SECONDS, STEPS, Job, Schedule, schedule
from benchmarks.support.chaos_strikes import Target, strike, struck
from benchmarks.support.own_service import POLL_SECONDS, JobWentWrong, OwnService, own_service
from benchmarks.support.ray_view import RayView
from benchmarks.support.report import Report, deliver, parser
from manta.workers.checkpoint.catalog import manifest_of

NO_WEIGHTS = "no checkpoint of the last step"
JOB_SECONDS = 400.0
GONE_SECONDS = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("chaos", __doc__)
    options.add_argument("--schedules", type=int, default=200, help="how many (default: 200)")
    options.add_argument("--first", type=int, default=0, metavar="K", help="the number of the first one (default: 0)")
    options.add_argument("--only", type=int, metavar="K", help="only the schedule number K")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Run one schedule after the other; those that fail are named on standard error at once."""
    report = Report("chaos", options.seed)
    numbers = range(options.first, options.first + options.schedules) if options.only is None else [options.only]
    began, failed, recoveries, strikes = time.monotonic(), [], 0, 0
    with own_service(allow_faults=True) as service, RayView(str(service.home)) as ray:
        soak = Soak(service, ray, options.seed)
        for number in numbers:
            drawn = schedule(options.seed, number)
            outcome = soak.run(drawn)
            recoveries, strikes = recoveries + outcome.recoveries, strikes + len(drawn.strikes)
            word = "failed" if outcome.problems else "ok"
            line = f"{number} {word} in {outcome.seconds:.1f} s, {outcome.recoveries} recoveries: {drawn.sentence}"
            print("\n  ".join([line, *outcome.problems]), file=sys.stderr, flush=True)
            if outcome.problems:
                again = f"python -m benchmarks.chaos --seed {options.seed} --only {number}"
                failed.append({"number": number, "again": again, "problems": outcome.problems})
    report.add("schedules", len(numbers), "schedules")
    report.add("schedules_failed", len(failed), "schedules", 0)
    report.add("strikes", strikes, "strikes")
    report.add("recoveries", recoveries, "recoveries")
    report.add("seconds_a_schedule", round((time.monotonic() - began) / max(1, len(numbers)), 2), "s")
    report.samples["failed"] = failed
    report.settings = {"steps": STEPS, "job": schedule(options.seed, 0).job.document(options.seed)}
    return report


@dataclass(frozen=True)
class Clean:
    """What a job ends with when nothing befalls it."""

    rows: dict[int, tuple[Any, Any, Any]]
    weights: str
    problems: list[str]


@dataclass
class Outcome:
    """How one schedule ended."""

    problems: list[str] = field(default_factory=list)
    """What was not as it must be; empty when all was."""
    recoveries: int = 0
    seconds: float = 0.0


class Soak:
    """Runs schedules on one service, whose clean runs it remembers."""

    def __init__(self, service: OwnService, ray: RayView, seed: int):
        self._service, self._ray, self._seed = service, ray, seed
        self._clean: dict[Job, Clean] = {}

    def run(self, drawn: Schedule) -> Outcome:
        """Run one schedule, and compare it with the clean run."""
        clean, began, outcome = self._clean_run(drawn), time.monotonic(), Outcome()
        outcome.problems += clean.problems
        job_id = self._service.client.submit(drawn.job.document(self._seed)).id
        target = Target(self._service, job_id, drawn.ranks)
        try:
            self._befall(target, drawn)
            self._service.succeed(job_id, JOB_SECONDS)
        except JobWentWrong as error:
            outcome.problems.append(str(error))
            self._service.give_up(job_id, JOB_SECONDS)
        else:
            outcome.problems += self._differences(job_id, clean)
            if missing := target.injected - struck(target):
                outcome.problems.append(f"{len(missing)} faults never struck")
        outcome.problems += self._left(job_id)
        outcome.recoveries = target.recoveries()
        outcome.seconds = time.monotonic() - began
        return outcome

    def _befall(self, target: Target, drawn: Schedule) -> None:
        for what in drawn.strikes:
            if what.way != "control_starting":
                target.inject("slow", 0, reported=False, seconds=SLOW_SECONDS)  # again: its process may be another
            strike(target, what)

    def _clean_run(self, drawn: Schedule) -> Clean:
        job = drawn.job
        if job not in self._clean:
            job_id = self._service.client.submit(job.document(self._seed)).id
            self._service.succeed(job_id, JOB_SECONDS)
            problems = self._left(job_id)
            if self._service.client.recoveries(job_id).items:
                problems.append("the clean run has recoveries")
            weights = self._weights(job_id)
            if weights == NO_WEIGHTS:
                problems.append("the clean run has no weights to compare with")
            self._clean[job] = Clean(self._service.rows(job_id), weights, problems)
        return self._clean[job]

    def _differences(self, job_id: str, clean: Clean) -> list[str]:
        rows, wrong = self._service.rows(job_id), []
        if set(rows) != set(clean.rows):
            wrong.append(f"steps without a row: {sorted(set(clean.rows) - set(rows))[:5]}")
        differing = [step for step, row in sorted(rows.items()) if clean.rows.get(step) != row]
        if differing:
            step = differing[0]
            wrong.append(f"{len(differing)} rows differ, first step {step}: {rows[step]}, not {clean.rows.get(step)}")
        if self._weights(job_id) != clean.weights:
            wrong.append("the final weights differ")
        return wrong

    def _weights(self, job_id: str) -> str:
        """A hash of everything in the last step's durable checkpoint."""
        whole = [
            row
            for row in self._service.client.checkpoints(job_id).items
            if row.state == "complete" and row.step == STEPS
        ]
        return weights_of(Path(whole[0].path)) if whole else NO_WEIGHTS

    def _left(self, job_id: str) -> list[str]:
        """What a job that is over has left behind; processes that are ending may take a moment."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := self._still_there(job_id):
            if time.monotonic() > deadline:
                return [f"left behind: {', '.join(left[:5])}"]
            time.sleep(POLL_SECONDS)
        return []

    def _still_there(self, job_id: str) -> list[str]:
        agents = [str(process) for process in own_processes.agents(self._service.paths)]
        return [*own_processes.leftovers(self._service.paths, job_id), *self._ray.held_by(job_id), *agents]


def weights_of(path: Path) -> str:
    """A hash of all tensors of the checkpoint at `path`, and of those that it refers to, by name."""
    # These take a second, also for a test that is only collected.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    digest, frozen = hashlib.sha256(), manifest_of(path).frozen
    for folder in (path, path.parent / frozen.folder) if frozen is not None else (path,):
        reader = dcp.FileSystemReader(folder)
        entries = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in sorted(entries.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings(action="ignore"):  # one process is what is meant
            dcp.load(state, storage_reader=reader, no_dist=True)
        for name, tensor in state.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
