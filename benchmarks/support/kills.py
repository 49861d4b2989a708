"""Kill -9 of ranks chosen at random: what it costs, who survives, and whether the job's numbers show it."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.own_service import JobWentWrong, OwnService
from benchmarks.support.report import Report
from manta.service.states import is_final

JOB_SECONDS = 300.0
STEPS_BETWEEN = 10
"""Steps that are committed between two kills, and after the last."""


WATCH_SECONDS = 0.1
"""How often the service is asked: a request costs it and us 6 ms of the cores on which the step is done again."""


@dataclass(frozen=True)
class Kill:
    """What one kill did."""

    rank: int
    seconds: float
    """To the next committed step, by the clock of the ranks that committed it."""
    seen_seconds: float
    """Until that was seen over REST, asked every WATCH_SECONDS."""
    redone: int
    """Steps that some rank had committed and that were done again."""
    survived: int
    """Processes of the gang, by number and time of creation, that are there before and after."""


@dataclass
class Kills:
    """What the kills of one layout's job did."""

    ranks: int
    """Ranks of the job."""
    each: list[Kill] = field(default_factory=list)
    missing: int = 0
    """Steps without metrics at the end."""
    samples_differ: int = 0
    """Steps after which the number of tokens trained on is not the undisturbed run's."""
    same_bits: bool = False
    """Whether every loss and gradient norm has the bits of the undisturbed run's."""

    def report(self, report: Report, name: str, target: float | None = None, most: float | None = None) -> None:
        """Add the figures to `report`; `target` is for the largest time, `most` for its 95th percentile."""
        seconds = [kill.seconds for kill in self.each]
        report.add_spread(f"kill_to_next_step_{name}", seconds, "s", target, most)
        report.add(f"same_bits_as_undisturbed_{name}", self.same_bits, "bool", True)
        report.add(f"steps_redone_at_most_{name}", max(kill.redone for kill in self.each), "steps", 1)
        report.add(f"steps_missing_{name}", self.missing, "steps", 0)
        report.add(f"steps_with_other_samples_{name}", self.samples_differ, "steps", 0)
        lost = self.ranks - min(kill.survived for kill in self.each)
        report.add(f"processes_lost_at_most_{name}_of_{self.ranks}", lost, "processes", 1)
        samples: dict[str, Any] = {
            "seconds": [round(value, 3) for value in seconds],
            "seen_over_rest": [round(kill.seen_seconds, 3) for kill in self.each],
            "steps_redone": [kill.redone for kill in self.each],
            "survived": [kill.survived for kill in self.each],
            "ranks": [kill.rank for kill in self.each],
        }
        report.samples[f"kills_{name}"] = [samples]


def kills_of(service: OwnService, document: dict[str, Any], world: int, kills: int, choice: random.Random) -> Kills:
    """Run the job undisturbed, then again with `kills` kills of ranks chosen at random."""
    undisturbed = service.client.submit(document).id
    service.succeed(undisturbed, JOB_SECONDS)
    outcome, job_id = Kills(world), service.client.submit(document).id
    for number in range(1, kills + 1):
        service.wait_for_step(job_id, number * STEPS_BETWEEN, JOB_SECONDS)
        time.sleep(choice.uniform(0.0, 0.2))  # somewhere within a step
        outcome.each.append(kill_rank(service, job_id, choice.randrange(world), world))
    service.succeed(job_id, JOB_SECONDS)
    expected, curve = service.rows(undisturbed), service.rows(job_id)
    outcome.missing = len(set(range(1, document["train"]["steps"] + 1)) - set(curve))
    outcome.samples_differ = sum(expected[step][2] != row[2] for step, row in curve.items())
    outcome.same_bits = curve == expected
    return outcome


def kill_rank(service: OwnService, job_id: str, rank: int, world: int) -> Kill:
    """Kill one rank, and wait until the record of its recovery is whole, with the next generation's first step."""
    before = service.client.job(job_id)
    gang = service.processes(job_id)
    if rank not in gang or is_final(before.state):
        raise JobWentWrong(f"{before.name} is {before.state}, with no process to kill as rank {rank}")
    known = len(service.recoveries(job_id))
    os.kill(gang[rank][0], signal.SIGKILL)
    killed, killed_at, committed = time.monotonic(), time.time(), 0
    while len(recoveries := service.recoveries(job_id)) == known or recoveries[-1].total_seconds is None:
        newest = service.committed(job_id, world)
        job = service.client.job(job_id)
        if is_final(job.state) or time.monotonic() - killed > JOB_SECONDS:
            raise JobWentWrong(f"{job.name} did not recover from the loss of rank {rank}: {job.state}, {job.message}")
        if job.generation == before.generation:
            committed = newest
        time.sleep(WATCH_SECONDS)
    seen, recovery = time.monotonic() - killed, recoveries[-1]
    assert recovery.total_seconds is not None
    after = set(service.processes(job_id).values())
    return Kill(
        rank,
        recovery.time.timestamp() + recovery.total_seconds - killed_at,
        seen,
        max(0, committed - recovery.resume_step, recovery.steps_redone or 0),
        len(after & set(gang.values())),
    )
