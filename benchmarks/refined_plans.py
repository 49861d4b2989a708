"""How measured steps of jobs improve plans on a machine that was not calibrated.

A service of the benchmark's own is asked for the plans of some drawn jobs, trains others, and is asked again: what it
says then differs by what those others took (`service/planner/refinement.py`). Both answers are in a file before the
first of the planned jobs runs, and these are seen by no plan that counts. Times are those of a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.planned_layouts import rank_correlation
from benchmarks.support.drawn_layouts import draw_jobs
from benchmarks.support.own_service import JobWentWrong, OwnService, own_service
from benchmarks.support.report import Report, deliver, parser
from service.planner.refinement import MOST_SPREAD

SEEN, HELD_OUT = 12, 12
STEPS = 30
"""Of each job: 25 are measured."""
JOB_SECONDS = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("refined_plans", __doc__)
    options.add_argument("--seen", type=int, default=SEEN, help=f"jobs that refine (default: {SEEN})")
    options.add_argument(
        "--held-out", type=int, default=HELD_OUT, help=f"jobs that are only predicted (default: {HELD_OUT})"
    )
    options.add_argument(
        "--predictions", type=Path, metavar="FILE", help="where predictions are stored before the runs"
    )
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Plan, train what refines, plan again, train what was planned, compare."""
    report = Report("refined_plans", options.seed)
    jobs = [_trains_here(job) for job in draw_jobs(options.seed, options.seen + options.held_out)]
    seen, held_out = jobs[: options.seen], jobs[options.seen :]
    with own_service() as service, tempfile.TemporaryDirectory() as folder:
        file = options.predictions or Path(folder) / "predictions.json"
        before = [planned_seconds(service, job) for job in held_out]
        report.samples["seen"] = [_train(service, job) for job in seen]
        after = [planned_seconds(service, job) for job in held_out]
        file.write_text(json.dumps({"before": before, "after": after}, indent=1) + "\n", encoding="utf-8")
        machines = [each for each in service.client.machines().items if each.refined]
        moved = [{"name": each.name, "by_jobs": each.refined_by_jobs, "times": each.refined} for each in machines]
        report.settings = {"steps": STEPS, "refined": moved}
        rows = [_train(service, job) for job in held_out]
    for row, first, second in zip(rows, before, after, strict=True):
        row.update(before=first, after=second)
    report.samples["held_out"] = rows
    compare(report, rows)
    return report


def _trains_here(document: dict[str, Any]) -> dict[str, Any]:
    """The drawn job on a text that every machine has, for so many steps, its parts timed at every other one."""
    train = document["train"] | {"steps": STEPS, "time_parts_every": 2}
    return document | {
        "data": {"source": "python-stdlib", "tokenizer": "bytes"},
        "train": train,
        "resources": {"threads": 1},
        "checkpoint": {"every_steps": 0},
    }


def planned_seconds(service: OwnService, document: dict[str, Any]) -> float:
    """What the service says now of the job's step on its own cluster. Raises JobWentWrong."""
    asked = {name: document[name] for name in ("model", "data", "train", "parallel", "resources")}
    answer = service.client.plans(asked | {"cluster": {"current": True}})
    if not answer.plans:
        raise JobWentWrong(f"a drawn job has no plan: {answer.rejected[0].reason}")
    return answer.plans[0].step_seconds


def _train(service: OwnService, document: dict[str, Any]) -> dict[str, Any]:
    """The job's steps as the service measured them, and how far their quarters were apart."""
    job = service.succeed(service.client.submit(document).id, JOB_SECONDS)
    measured = service.client.job_plan(job.id).measured
    if measured is None:
        raise JobWentWrong(f"no step of {job.id} was measured")
    sections = {name: document[name] for name in ("model", "train", "parallel")}
    return {"job": sections, "seconds": measured.step_seconds, "spread": measured.spread}


def compare(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    """Note the errors of both answers."""
    seconds = [row["seconds"] for row in rows]
    for when in ("before", "after"):
        errors = [abs(row[when] / row["seconds"] - 1) for row in rows]
        report.add(f"step_error_{when}_median", round(statistics.median(errors), 4), "ratio")
        report.add(f"step_error_{when}_max", round(max(errors), 4), "ratio")
        order = rank_correlation([row[when] for row in rows], seconds)
        report.add(f"step_rank_correlation_{when}", round(order, 4), "ratio")
    disturbed = sum(row["spread"] > MOST_SPREAD for row in rows)
    report.add("held_out_jobs_that_were_disturbed", disturbed, "jobs", 0)
    smaller = report.figures["step_error_after_median"].value < report.figures["step_error_before_median"].value
    report.add("refined_plans_are_nearer", smaller, "bool", True)


if __name__ == "__main__":
    sys.exit(main())
