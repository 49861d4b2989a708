"""What a failure costs: a killed rank, also over process groups, a stopped one, a killed control plane; and the same
kill under torchrun and Ray Train, on the same machine in the same run.

Times run from the signal to the next committed step by the clock of the ranks, for the baselines to the next completed
step in their own log, also when it is an old one that is done again; after a SIGSTOP until the step is seen over REST.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support import baselines
from benchmarks.support.jobs import MIXTRAL, QUICKSTART, quickstart
from benchmarks.support.kills import JOB_SECONDS, STEPS_BETWEEN, WATCH_SECONDS, kills_of
from benchmarks.support.own_service import POLL_SECONDS, JobWentWrong, OwnService, own_service
from benchmarks.support.report import Report, deliver, parser
from manta.service.states import is_final

FOURS = {"tensor_data": (2, 1, 2), "pipeline_data": (1, 2, 2)}
EXPERTS = (1, 1, 4)
"""Of a model with experts, which are spread over two ranks."""
EIGHT = (2, 2, 2)
FOUR_P95, EIGHT_P95 = 0.9, 1.8
NOTICED_TARGET, STOPPED_TARGET, CONTROL_TARGET = 3.0, 5.0, 5.0
GROUPS_TIMES_LINKS = 2.0
OVER_GROUPS = {"MANTA_PROCESS_GROUPS_FOR_TESTS": "1"}
AWAY_SECONDS = 3.0
"""How long the control plane is gone."""
LONG_STEPS = 100_000


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("recovery", __doc__)
    options.add_argument("--kills", type=int, default=20, help="kills for each layout of 4 ranks (default: 20)")
    options.add_argument("--kills-eight", type=int, default=10, help="kills for 8 ranks (default: 10)")
    options.add_argument("--kills-groups", type=int, default=20, help="kills over process groups (default: 20)")
    options.add_argument("--stops", type=int, default=5, help="SIGSTOPs of a rank (default: 5)")
    options.add_argument("--control-kills", type=int, default=3, help="kills of the control plane (default: 3)")
    options.add_argument("--baseline-kills", type=int, default=5, help="kills of each baseline; 0: none (default: 5)")
    options.add_argument("--ray-train-python", default=sys.executable, help="a Python with ray[train], if not this one")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """One thing after the other."""
    report = Report("recovery", options.seed)
    choice = random.Random(options.seed)
    with own_service() as service:
        _kills(report, service, options, choice)
        if options.stops:
            _stops(report, service, options, choice)
        if options.control_kills:
            _control_kills(report, service, options)
    if options.kills_groups:
        with own_service(environment=OVER_GROUPS) as service:
            _kills_over_groups(report, service, options, choice)
    if options.baseline_kills:
        _baselines(report, options, choice)
    report.settings = {
        "job": quickstart(FOURS["tensor_data"], STEPS_BETWEEN, options.seed),
        "steps_between_kills": STEPS_BETWEEN,
        "layouts": {name: list(layout) for name, layout in (FOURS | {"expert_data": EXPERTS, "eight": EIGHT}).items()},
        "asked_every_seconds": {"after_a_kill": WATCH_SECONDS, "else": POLL_SECONDS},
        "control_plane_away_seconds": AWAY_SECONDS,
        "baselines": {"checkpoint_every": baselines.CHECKPOINT_EVERY, "steps_between_kills": baselines.STEPS_BETWEEN},
        **report.settings,
    }
    return report


def _kills(report: Report, service: OwnService, options: argparse.Namespace, choice: random.Random) -> None:
    wanted = (
        *((name, layout, QUICKSTART, options.kills, FOUR_P95) for name, layout in FOURS.items()),
        ("expert_data", EXPERTS, MIXTRAL, options.kills, FOUR_P95),
        ("eight", EIGHT, QUICKSTART, options.kills_eight, EIGHT_P95),
    )
    for name, layout, example, kills, most in wanted:
        if kills:
            document = quickstart(layout, STEPS_BETWEEN * (kills + 1), options.seed, example)
            kills_of(service, document, math.prod(layout), kills, choice).report(report, name, most=most)


def _kills_over_groups(report: Report, service: OwnService, options: argparse.Namespace, choice: random.Random) -> None:
    """The kills of 4 ranks again, over process groups on gloo, as GPUs have them over NCCL."""
    for name, layout in FOURS.items():
        document = quickstart(layout, STEPS_BETWEEN * (options.kills_groups + 1), options.seed)
        kills_of(service, document, math.prod(layout), options.kills_groups, choice).report(report, f"groups_{name}")
        over_links = report.figures.get(f"kill_to_next_step_{name}_median")
        if over_links is not None:
            median = float(report.figures[f"kill_to_next_step_groups_{name}_median"].value)
            times = round(median / float(over_links.value), 2)
            report.add(f"groups_times_links_{name}", times, "ratio", GROUPS_TIMES_LINKS)


@dataclass
class _Stops:
    noticed: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    wrong: int = 0
    """Ranks that were named and had not been stopped, and stops that named no rank."""


def _stops(report: Report, service: OwnService, options: argparse.Namespace, choice: random.Random) -> None:
    """SIGSTOP to a rank, again and again."""
    layout, stops = FOURS["tensor_data"], _Stops()
    job_id = service.client.submit(quickstart(layout, LONG_STEPS, options.seed)).id
    for number in range(1, options.stops + 1):
        # Long enough that the step's usual length is known again to a process that is new.
        service.wait_for_step(job_id, service.client.job(job_id).step + STEPS_BETWEEN, JOB_SECONDS)
        _stop(service, job_id, choice.randrange(math.prod(layout)), number, stops)
    service.give_up(job_id, JOB_SECONDS)
    report.add_spread("stop_to_noticed", stops.noticed, "s", NOTICED_TARGET)
    report.add_spread("stop_to_next_step", stops.recovered, "s", STOPPED_TARGET)
    report.add("stop_culprits_wrong", stops.wrong, "ranks", 0)
    samples = {"noticed": _rounded(stops.noticed), "recovered": _rounded(stops.recovered)}
    report.samples["stops"] = [samples]


def _stop(service: OwnService, job_id: str, rank: int, number: int, stops: _Stops) -> None:
    generation, gang = service.client.job(job_id).generation, service.processes(job_id)
    os.kill(gang[rank][0], signal.SIGSTOP)
    stopped, stopped_at = time.monotonic(), time.time()
    resumed: int | None = None
    while True:
        job = service.client.job(job_id)
        if resumed is None and job.generation > generation:
            resumed = service.resume_step(job_id, job.generation)
        if resumed is not None and job.step > resumed:
            break
        if is_final(job.state) or time.monotonic() - stopped > JOB_SECONDS:
            raise JobWentWrong(f"{job.name} did not recover from the stop of rank {rank}: {job.state}, {job.message}")
        time.sleep(POLL_SECONDS)
    stops.recovered.append(time.monotonic() - stopped)
    named = service.events(job_id, "rank_hung", "gang_hung")[number - 1 :]
    stops.wrong += sum(event.rank != rank for event in named) if named else 1
    if named:
        stops.noticed.append(named[0].time.timestamp() - stopped_at)


def _control_kills(report: Report, service: OwnService, options: argparse.Namespace) -> None:
    """SIGKILL to the control plane, which comes back a little later."""
    world = math.prod(FOURS["tensor_data"])
    job_id = service.client.submit(quickstart(FOURS["tensor_data"], LONG_STEPS, options.seed)).id
    service.wait_for_step(job_id, STEPS_BETWEEN, JOB_SECONDS)
    controlled, answered, away, gaps = [], [], [], []
    for number in range(1, options.control_kills + 1):
        before = service.committed(job_id, world)
        service.kill()
        gaps.append(_longest_gap(service, job_id, world, AWAY_SECONDS))
        away.append(service.committed(job_id, world) - before)
        began, began_at = time.monotonic(), time.time()
        service.start()
        while len(adopted := service.events(job_id, "adopted")) < number:
            if time.monotonic() - began > JOB_SECONDS:
                raise JobWentWrong(f"{job_id} was not taken over")
            time.sleep(POLL_SECONDS)
        answered.append(time.monotonic() - began)
        controlled.append(adopted[-1].time.timestamp() - began_at)
        service.wait_for_step(job_id, service.committed(job_id, world) + STEPS_BETWEEN, JOB_SECONDS)
    job, rows = service.client.job(job_id), service.rows(job_id)
    report.add_spread("control_plane_start_to_jobs_under_control", controlled, "s", CONTROL_TARGET)
    report.add_spread("control_plane_start_to_rest_answers", answered, "s")
    report.add("control_plane_away_steps_committed_min", min(away), "steps")
    report.add("control_plane_away_longest_gap_between_steps", round(max(gaps), 3), "s")
    report.add("control_plane_generations", job.generation, "generations", 1)
    report.add("control_plane_steps_missing", len(set(range(1, max(rows) + 1)) - set(rows)), "steps", 0)
    report.samples["control_plane"] = [
        {"under_control": _rounded(controlled), "answered": _rounded(answered), "steps_while_away": away}
    ]
    usual = job.metrics.latest.get("step_seconds")
    if usual is not None:
        report.add("control_plane_step_usually", round(usual, 4), "s")
    service.give_up(job_id, JOB_SECONDS)


def _longest_gap(service: OwnService, job_id: str, world: int, seconds: float) -> float:
    """The longest time between two commits within `seconds`, out of shared memory."""
    until = time.monotonic() + seconds
    newest, since, longest = service.committed(job_id, world), time.monotonic(), 0.0
    while (now := time.monotonic()) < until:
        step = service.committed(job_id, world)
        if step > newest:
            newest, since = step, now
        longest = max(longest, now - since)
        time.sleep(POLL_SECONDS / 4)
    return longest


def _baselines(report: Report, options: argparse.Namespace, choice: random.Random) -> None:
    workers, skipped = math.prod(FOURS["tensor_data"]), {}
    why = baselines.why_no_ray_train(options.ray_train_python)
    commands: dict[str, Any] = {"torchrun": baselines.torchrun}
    if why is None:
        commands["ray_train"] = baselines.ray_train(options.ray_train_python)
        commands["ray_train_engine"] = baselines.ray_train(options.ray_train_python, engine=True)
    else:
        skipped["ray_train"] = f"{why}; pip install 'ray[train]', and give that Python with --ray-train-python"
    for name, command in commands.items():
        try:
            baseline = baselines.measure(command, workers, options.baseline_kills, choice)
        except baselines.BaselineFailed as error:
            skipped[name] = str(error)
            continue
        baseline.report(report, name, workers)
        ours = report.figures.get("kill_to_next_step_tensor_data_median")
        if ours is not None:
            times = statistics.median(baseline.seconds) / float(ours.value)
            report.add(f"{name}_times_slower_than_manta", round(times, 2), "ratio")
    report.settings["skipped"] = skipped


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    sys.exit(main())
