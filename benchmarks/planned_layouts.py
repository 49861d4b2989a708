"""Steps and memory of small layouts, drawn by a seed, as the planner predicts them after a calibration of this machine,
compared with what the engine takes.

Predictions are all in a file before the first run; the runs then come in an order of their own, several times over.
Nothing is fitted on them: the calibration measures single operations, steps of one rank, and collectives. Times are
those of a machine that does nothing else; a layout's is the median of its turns, which are minutes apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.calibrated import add_options, calibration, core_of
from benchmarks.support.drawn_layouts import draw_jobs
from benchmarks.support.local_ranks import LocalRanks
from benchmarks.support.published.rows import rank_correlation
from benchmarks.support.report import Report, deliver, parser
from benchmarks.support.tensor_bytes import peak_bytes, tracker_of_bytes
from manta.service.planner.hardware import Cluster, Core, cpu_machine
from manta.service.planner.machines import Calibrated
from manta.service.planner.memory import memory_of
from manta.service.planner.software import engine_on
from manta.service.planner.step_time import StepModel
from manta.workers.calibration.device import random_batch
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.engine import Engine
from manta.workers.spec.reading import parse_job_spec
from manta.workers.system.resources import usable_cores
from manta.workers.system.threads import with_threads

JOBS, TURNS, STEPS, WARM_UP = 30, 3, 5, 2
SLOTS = 8
CPU = cpu_machine(SLOTS, 1, 1e12)
"""What ranks are on."""
TIME_TARGET, ORDER_TARGET, MEMORY_TARGET = 0.12, 0.9, 0.03


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("planned_layouts", __doc__)
    options.add_argument("--jobs", type=int, default=JOBS, help=f"layouts (default: {JOBS})")
    options.add_argument("--turns", type=int, default=TURNS, help=f"runs of each (default: {TURNS})")
    options.add_argument("--steps", type=int, default=STEPS, help=f"measured steps of a run (default: {STEPS})")
    add_options(options)
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Calibrate, predict, run, compare."""
    report = Report("planned_layouts", options.seed)
    began = time.perf_counter()
    calibrated = calibration(options.machine)
    report.add("calibration_seconds", round(time.perf_counter() - began, 1), "s", 120.0)
    jobs = draw_jobs(options.seed, options.jobs)
    with tempfile.TemporaryDirectory() as folder:
        file = options.predictions or Path(folder) / "predictions.json"
        file.write_text(json.dumps([predict(job, calibrated) for job in jobs], indent=1) + "\n", encoding="utf-8")
        runs = _run_all(jobs, options)
        predictions = json.loads(file.read_text(encoding="utf-8"))
    rows = [_row(*each) for each in zip(jobs, predictions, runs, strict=True)]
    compare(report, rows)
    report.settings = {
        "jobs": options.jobs,
        "turns": options.turns,
        "steps": options.steps,
        "machine": calibrated.to_json(),
    }
    report.samples = {"layouts": rows}
    return report


def predict(document: dict[str, Any], calibrated: Calibrated) -> dict[str, Any]:
    """What the planner says of a job: seconds of a step, core seconds that all ranks need together, and bytes of the
    tensors of each pipeline rank."""
    spec = with_threads(parse_job_spec(document), 1)
    seconds, core_seconds = (_step_seconds(spec, core_of(calibrated), cores) for cores in (usable_cores(), 1))
    memory = [round(memory_of(spec, rank, CPU).total) for rank in range(spec.layout.pipeline)]
    return {"seconds": seconds, "core_seconds": core_seconds, "bytes": memory}


def _step_seconds(spec: JobSpec, core: Core, cores: int) -> float:
    """On so many cores; on one that is all ranks' work."""
    machine = cpu_machine(SLOTS, cores, 1e12, core)
    return StepModel(spec, Cluster(machine, 1, SLOTS), engine_on(machine)).time().seconds


def _run_all(jobs: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The runs of each job: all jobs in an order of their own, and then all again."""
    gangs, order = LocalRanks(), list(range(len(jobs)))
    random.Random(options.seed + 1).shuffle(order)
    runs: list[list[dict[str, Any]]] = [[] for _ in jobs]
    for at in options.turns * order:
        ranks = gangs.run(train, jobs[at], options.steps)
        layout = parse_job_spec(jobs[at]).layout
        runs[at].append(
            {
                "seconds": statistics.median(ranks[0]["steps"]),
                "least_seconds": min(ranks[0]["steps"]),
                "core_seconds": sum(rank["core_seconds"] for rank in ranks),
                "bytes": [ranks[stage * layout.tensor]["bytes"] for stage in range(layout.pipeline)],
            }
        )
    return runs


def train(comm: Comm, spec: JobSpec, steps: int) -> dict[str, Any]:
    """Program for ranks: some steps on random tokens, and one whose tensors are counted."""
    tracker = tracker_of_bytes()
    with tracker:
        engine = Engine(spec, comm)
    engine.initialise(spec.train.seed)
    batch = random_batch(spec, comm.device)

    def step() -> float:
        began = time.perf_counter()
        engine.step(batch, spec.train.global_batch_size, 1e-4, 0)
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        step()
    comm.barrier()
    before = time.process_time()
    taken = [step() for _ in range(steps)]
    core_seconds = (time.process_time() - before) / steps
    with tracker:
        step()
    return {"steps": taken, "core_seconds": core_seconds, "bytes": peak_bytes(tracker)}


def _row(document: dict[str, Any], prediction: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A job, its prediction, and what it took."""
    return {
        "job": {name: document[name] for name in ("model", "train", "parallel")},
        "predicted_seconds": prediction["seconds"],
        "seconds": statistics.median(run["seconds"] for run in runs),
        "seconds_of_turns": [run["seconds"] for run in runs],
        "least_seconds": min(run["least_seconds"] for run in runs),
        "core_seconds": statistics.median(run["core_seconds"] for run in runs),
        "predicted_core_seconds": prediction["core_seconds"],
        "predicted_bytes": prediction["bytes"],
        "bytes": runs[0]["bytes"],
    }


def compare(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    """Note errors and order."""
    errors = [abs(row["predicted_seconds"] / row["seconds"] - 1) for row in rows]
    report.add("step_error_median", round(statistics.median(errors), 4), "ratio", TIME_TARGET)
    report.add("step_error_max", round(max(errors), 4), "ratio")
    work = [abs(row["predicted_core_seconds"] / row["core_seconds"] - 1) for row in rows]
    report.add("core_seconds_error_median", round(statistics.median(work), 4), "ratio")
    order = rank_correlation([row["predicted_seconds"] for row in rows], [row["seconds"] for row in rows])
    report.add("step_rank_correlation", round(order, 4), "ratio")
    report.add("step_rank_correlation_is_enough", order >= ORDER_TARGET, "bool", True)
    memory = [
        abs(said / taken - 1) for row in rows for said, taken in zip(row["predicted_bytes"], row["bytes"], strict=True)
    ]
    report.add("memory_error_median", round(statistics.median(memory), 4), "ratio", MEMORY_TARGET)
    report.add("memory_error_max", round(max(memory), 4), "ratio")


if __name__ == "__main__":
    sys.exit(main())
