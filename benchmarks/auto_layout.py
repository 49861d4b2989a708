"""`parallel: auto` on a copy of the quickstart, free and with 8 ranks forced, compared with ten layouts each that were
chosen by hand: what the planner finds trains at least as fast as the best of these, within noise.

The planner uses a calibration of this machine; its predictions of all layouts are in a file before the first run.
Then all of them train in turns, the planner's own twice in each, so that what lies between these two is noise. Times
are those of a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.calibrated import add_options, calibration, core_of
from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.report import ROOT, Report, deliver, parser
from service.planner.hardware import Cluster, cpu_machine
from service.planner.search import search
from service.planner.software import engine_on
from service.planner.step_time import StepModel, threads_in
from workers.config import JobSpec
from workers.spec.reading import parse_job_spec
from workers.system.cores import usable_cores
from workers.threads import with_threads

TURNS, STEPS, WARM_UP = 5, 10, 3
FORCED = 8
MEMORY = 16e9

Layout = dict[str, Any]

_NO_PIPELINE: tuple[Layout, ...] = ({}, {"data": 2}, {"data": 4}, {"tensor": 2}, {"tensor": 2, "data": 2})
_WITH_PIPELINE: tuple[Layout, ...] = (
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "zb-h1"},
    {"pipeline": 2, "data": 2},
    {"pipeline": 4},
    {"tensor": 2, "pipeline": 2, "data": 2, "recompute": "selective"},
)
BY_HAND = {
    "free": _NO_PIPELINE + _WITH_PIPELINE,
    "forced": (
        {"data": 8},
        {"tensor": 2, "data": 4},
        {"pipeline": 2, "data": 4},
        {"pipeline": 2, "data": 4, "schedule": "zb-h1"},
        {"pipeline": 4, "data": 2},
        {"pipeline": 4, "data": 2, "schedule": "zb-h1"},
        {"tensor": 2, "pipeline": 2, "data": 2},
        {"tensor": 2, "pipeline": 2, "data": 2, "recompute": "selective"},  # the quickstart's own
        {"tensor": 4, "data": 2},
        {"tensor": 2, "pipeline": 4},
    ),
}
"""Ten of any number of ranks, and ten of 8."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("auto_layout", __doc__)
    options.add_argument("--turns", type=int, default=TURNS, help=f"of all layouts (default: {TURNS})")
    options.add_argument("--steps", type=int, default=STEPS, help=f"of each in a turn (default: {STEPS})")
    add_options(options)
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Calibrate, choose, predict, run in turns, compare."""
    report = Report("auto_layout", options.seed)
    cluster = _cluster(options.machine)
    jobs = {kind: _with_choice(kind, cluster) for kind in BY_HAND}
    predicted = {kind: [_predicted(spec, cluster) for spec in specs] for kind, specs in jobs.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = options.predictions or Path(folder) / "predictions.json"
        file.write_text(json.dumps(predicted, indent=1) + "\n", encoding="utf-8")
        taken = _run_all(jobs, options)
        predicted = json.loads(file.read_text(encoding="utf-8"))
    for kind, specs in jobs.items():
        rows = [
            {"parallel": spec.layout.model_dump(mode="json"), "threads": spec.resources.threads}
            | {"predicted_seconds": said, "turns": turns, "seconds": statistics.median(turns)}
            for spec, said, turns in zip(
                [*specs, specs[0]], [*predicted[kind], predicted[kind][0]], taken[kind], strict=True
            )
        ]
        compare(report, kind, rows)
        report.samples[kind] = rows
    report.settings = {"turns": options.turns, "steps": options.steps, "cores": usable_cores()}
    return report


def _cluster(file: Path | None) -> Cluster:
    return Cluster(cpu_machine(FORCED, usable_cores(), MEMORY, core_of(calibration(file))), 1, FORCED)


def quickstart(parallel: Any) -> dict[str, Any]:
    """A copy of the quickstart's document with another layout, and nothing but training in its first steps."""
    document = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8"))
    optimizer = {**document["train"]["optimizer"], "warmup_steps": 0}
    train = {**document["train"], "optimizer": optimizer, "validate_every": 0, "seed": 1234}
    return {name: document[name] for name in ("model", "data")} | {"train": train, "parallel": parallel}


def _with_choice(kind: str, cluster: Cluster) -> list[JobSpec]:
    """What the planner finds, and the ten chosen by hand."""
    job = parse_job_spec(quickstart({})).model_copy(update={"parallel": "auto"})
    ranks = FORCED if kind == "forced" else None
    planned = search(job, cluster, engine_on(cluster.machine), 1, ranks).plans[0].spec
    specs = [planned, *(parse_job_spec(quickstart(layout)) for layout in BY_HAND[kind])]
    return [with_threads(spec, threads_in(spec, cluster)) for spec in specs]


def _predicted(spec: JobSpec, cluster: Cluster) -> float:
    return StepModel(spec, cluster, engine_on(cluster.machine)).time().seconds


def _run_all(jobs: dict[str, list[JobSpec]], options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Median seconds of a step by turn, of each layout and once more of the planner's; each turn in another order."""
    gangs, draw = LocalRanks(), random.Random(options.seed)
    programs = [(kind, at) for kind, specs in jobs.items() for at in range(len(specs) + 1)]
    taken: dict[str, list[list[float]]] = {kind: [[] for _ in range(len(specs) + 1)] for kind, specs in jobs.items()}
    for _ in range(options.turns):
        draw.shuffle(programs)
        for kind, at in programs:
            spec = jobs[kind][at % len(jobs[kind])]
            train = {**spec.model_dump(mode="json")["train"], "steps": WARM_UP + options.steps}
            document = {**spec.model_dump(mode="json"), "train": train}
            seconds = gangs.train(document)[0].step_seconds[WARM_UP:]
            taken[kind][at].append(statistics.median(seconds))
    return taken


def compare(report: Report, kind: str, rows: list[dict[str, Any]]) -> None:
    """The planner's layout, first and last of `rows`, next to the best of the others by their medians. One chosen by
    hand that is the same layout is further turns of it."""
    chosen, *by_hand, again = rows
    same = [row for row in by_hand if all(row[key] == chosen[key] for key in ("parallel", "threads"))]
    others = [row for row in by_hand if row not in same]
    own = [turn for row in (chosen, *same, again) for turn in row["turns"]]
    best = min(others, key=lambda row: row["seconds"])
    if same and statistics.median(own) <= best["seconds"]:
        best = chosen | {"seconds": statistics.median(own)}
    apart = [abs(one / other - 1) for one, other in zip(chosen["turns"], again["turns"], strict=True)]
    noise = statistics.median(apart)
    ratio = statistics.median(own) / best["seconds"]
    report.add(f"{kind}_same_layout_by_hand", bool(same), "bool")
    report.add(
        f"{kind}_auto_to_best_other", round(statistics.median(own) / min(row["seconds"] for row in others), 4), "ratio"
    )
    report.add(f"{kind}_auto_seconds", round(statistics.median(own), 4), "s")
    report.add(f"{kind}_best_by_hand_seconds", round(best["seconds"], 4), "s")
    report.add(f"{kind}_auto_to_best", round(ratio, 4), "ratio")
    report.add(f"{kind}_noise", round(noise, 4), "ratio")
    report.add(f"{kind}_is_at_least_as_fast", ratio <= 1 + noise, "bool", True)
    errors = [abs(row["predicted_seconds"] / row["seconds"] - 1) for row in rows[:-1]]
    report.add(f"{kind}_step_error_median", round(statistics.median(errors), 4), "ratio")


if __name__ == "__main__":
    sys.exit(main())
