"""How fast a job starts, how fast it goes on after kill -9 of a rank, and whether the kill shows in its losses.

All is seen from outside, over REST, on a service of the benchmark's own. Commits are seen in the ranks' shared
memory, where each marks a step the moment it is whole.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.jobs import quickstart
from benchmarks.own_service import POLL_SECONDS, JobWentWrong, OwnService, own_service
from benchmarks.report import Report, deliver, parser
from benchmarks.visibility import visibility_seconds
from service.states import is_final

START_TARGET, RECOVERY_TARGET, VISIBILITY_TARGET = 6.0, 4.0, 0.25
EIGHT = (2, 2, 2)
FOURS = {"tensor_data": (2, 1, 2), "pipeline_data": (1, 2, 2)}
STEPS_BETWEEN = 10
"""Steps that are committed between two kills, and after the last."""
JOB_SECONDS = 300.0


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
            found = _kills(service, layout, options.kills, options.seed, choice)
            everything += found.seconds
            _report_kills(report, name, found)
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


@dataclass
class _Kills:
    """What the kills of one layout's job did."""

    seconds: list[float] = field(default_factory=list)
    """From each kill to the next committed step over REST."""
    redone: list[int] = field(default_factory=list)
    """Steps that some rank had committed and that were done again, for each kill."""
    missing: int = 0
    """Steps without metrics at the end."""
    same_bits: bool = False
    """Whether every loss has the bits of the uninterrupted run's."""


def _kills(service: OwnService, layout: tuple[int, int, int], kills: int, seed: int, choice: random.Random) -> _Kills:
    """Run a job undisturbed, then again with `kills` kills of ranks chosen at random."""
    document = quickstart(layout, STEPS_BETWEEN * (kills + 1), seed)
    undisturbed = service.client.submit(document).id
    _succeed(service, undisturbed)
    found, job_id = _Kills(), service.client.submit(document).id
    world = layout[0] * layout[1] * layout[2]
    for number in range(1, kills + 1):
        service.wait_for_step(job_id, number * STEPS_BETWEEN, JOB_SECONDS)
        time.sleep(choice.uniform(0.0, 0.2))  # somewhere within a step
        seconds, redone = _kill(service, job_id, choice.randrange(world), world)
        found.seconds.append(seconds)
        found.redone.append(redone)
    _succeed(service, job_id)
    expected, curve = service.curve(undisturbed), service.curve(job_id)
    found.missing = len(set(range(1, document["train"]["steps"] + 1)) - set(curve))
    found.same_bits = curve == expected
    return found


def _kill(service: OwnService, job_id: str, rank: int, world: int) -> tuple[float, int]:
    """Kill one rank: seconds until the next generation's first step is seen, and steps that were done again."""
    before = service.client.job(job_id)
    pid = next(row.pid for row in service.client.ranks(job_id).items if row.rank == rank)
    if pid is None or is_final(before.state):
        raise JobWentWrong(f"{before.name} is {before.state}, with no process to kill as rank {rank}")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    seen: list[tuple[float, int]] = []
    committed = 0
    resumed: int | None = None
    while resumed is None or not any(step > resumed for _, step in seen):
        job, now = service.client.job(job_id), time.monotonic()
        if is_final(job.state) or now - killed > JOB_SECONDS:
            raise JobWentWrong(f"{job.name} did not recover from the loss of rank {rank}: {job.state}, {job.message}")
        if job.generation == before.generation:
            committed = max(committed, service.committed(job_id, world))
        else:
            seen.append((now, job.step))
            resumed = _resume_step(service, job_id, job.generation) if resumed is None else resumed
        time.sleep(POLL_SECONDS)
    recovered = next(moment for moment, step in seen if step > resumed)
    return recovered - killed, max(0, committed - resumed)


def _resume_step(service: OwnService, job_id: str, generation: int) -> int | None:
    """The committed step that a generation went on from."""
    items = service.client.events(job_id, limit=500).items
    steps = [event.step for event in items if event.type == "generation_started" and event.generation == generation]
    return steps[0] if steps else None


def _succeed(service: OwnService, job_id: str) -> None:
    job = service.wait_until_final(job_id, JOB_SECONDS)
    if job.state != "SUCCEEDED":
        raise JobWentWrong(f"{job.name} ended as {job.state}: {job.message}")


def _report_kills(report: Report, name: str, found: _Kills) -> None:
    report.add_spread(f"kill_to_next_step_{name}", found.seconds, "s", RECOVERY_TARGET)
    report.add(f"same_bits_as_undisturbed_{name}", found.same_bits, "bool", True)
    report.add(f"steps_redone_at_most_{name}", max(found.redone), "steps", 1)
    report.add(f"steps_missing_{name}", found.missing, "steps", 0)
    samples: dict[str, Any] = {"seconds": _rounded(found.seconds), "steps_redone": found.redone}
    report.samples[f"kills_{name}"] = [samples]


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    sys.exit(main())
