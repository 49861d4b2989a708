"""Steps of jobs on one GPU, drawn by a seed, as the planner predicts them before and after a calibration of this GPU,
compared with what the engine takes.

Predictions are all in a file before the first run; the runs then come in an order of their own. Nothing is fitted on
them: the calibration measures single kernels, and steps of models so small that their host is what takes time. The
report is rewritten after each run (`--out`), so that one that is cut off keeps what it has.

`--device cpu` rehearses every line with tiny shapes; those figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.planned_layouts import MEMORY_TARGET, ORDER_TARGET, TIME_TARGET
from benchmarks.support import drawn_gpu_jobs
from benchmarks.support.drawn_gpu_jobs import draw_jobs
from benchmarks.support.gpu.contestants import manta, timed
from benchmarks.support.published.rows import rank_correlation
from benchmarks.support.report import Report, deliver, parser
from service.planner.fitting_gpu import fit_gpu, machine_measured, product_time, step_seconds
from service.planner.hardware import MACHINES, Cluster, Machine, measured
from service.planner.memory import memory_of
from service.planner.operations import attention_seconds, memory_seconds
from service.planner.software import engine_on
from service.planner.step_time import StepModel
from workers.accounting.device_bytes import device_bytes
from workers.accounting.flops import parameter_count, step_flops
from workers.calibration import gpu as calibration
from workers.calibration.measurements import Measurements
from workers.errors import MantaError
from workers.spec.reading import parse_job_spec

JOBS, STEPS, SECONDS = 12, 8, 170.0
REHEARSED = "h100-80gb"
"""What a CPU is taken for in a rehearsal."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser("planned_gpu_steps", __doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with tiny models")
    options.add_argument("--jobs", type=int, default=JOBS, help=f"jobs (default: {JOBS})")
    options.add_argument("--steps", type=int, default=STEPS, help=f"measured steps of each (default: {STEPS})")
    options.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"after which no job is begun (default: {SECONDS:.0f})"
    )
    options.add_argument("--measurements", type=Path, metavar="FILE", help="of `python -m workers.calibration`")
    options.add_argument(
        "--predictions", type=Path, metavar="FILE", help="where predictions are stored before the runs"
    )
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Calibrate, predict, run, compare. Raises MantaError where there is no GPU."""
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MantaError("this benchmark needs a GPU and found none (--device cpu tries the program)")
    report, began = Report("planned_gpu_steps", options.seed), time.perf_counter()
    measurements = _measurements(options.measurements, device)
    if options.measurements is None:
        report.add("calibration_seconds", round(time.perf_counter() - began, 1), "s", 60.0)
    name = machine_measured(measurements) if device.type == "cuda" else REHEARSED
    assumed = MACHINES[name]
    machine = measured(assumed, fit_gpu(measurements, assumed))
    report.settings = {
        "device": measurements.device,
        "rehearsal": device.type == "cpu",
        "torch": torch.__version__,
        "machine": name,
        "constants": dataclasses.asdict(machine.gpu),  # type: ignore[arg-type]
        "steps": options.steps,
        "left_out": {},
    }
    report.samples = {"calibration": calibration_rows(measurements, machine), "jobs": []}
    jobs = draw_jobs(
        options.seed, options.jobs, drawn_gpu_jobs.ON_GPU if device.type == "cuda" else drawn_gpu_jobs.TINY
    )
    with tempfile.TemporaryDirectory() as folder:
        file = options.predictions or Path(folder) / "predictions.json"
        file.write_text(json.dumps([predict(job, assumed, machine) for job in jobs], indent=1) + "\n", encoding="utf-8")
        predictions = json.loads(file.read_text(encoding="utf-8"))
    _write(report, options.out)
    order = list(range(len(jobs)))
    random.Random(options.seed + 1).shuffle(order)
    for at in order:
        if time.perf_counter() - began > options.seconds:
            report.settings["left_out"][f"job {at}"] = "no time was left"
            continue
        _run(report, at, jobs[at], predictions[at], options.steps, device)
        compare(report)
        _write(report, options.out)
    return report


def _write(report: Report, file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")


def _measurements(file: Path | None, device: torch.device) -> Measurements:
    if file is not None:
        return Measurements.from_json(json.loads(file.read_text(encoding="utf-8")))
    shapes = calibration.ON_GPU if device.type == "cuda" else calibration.TINY
    return calibration.measure_gpu(device, shapes, lambda part: print(f"measuring: {part}", file=sys.stderr))


def calibration_rows(measurements: Measurements, machine: Machine) -> list[dict[str, Any]]:
    """Each row of the calibration with what the fitted constants make of it."""
    rows: list[dict[str, Any]] = []

    def note(kind: str, row: Any, fitted: float) -> None:
        rows.append(
            {"kind": kind, **dataclasses.asdict(row), "predicted": fitted, "ratio": round(fitted / row.seconds, 3)}
        )

    for product in measurements.products:
        note("product", product, product_time(product, machine))
    for each in measurements.attention:
        passes = attention_seconds(machine, each.batch * each.heads, each.sequence, each.head_size)
        note("attention", each, sum(passes))
        rows[-1]["predicted_forward"] = passes[0]
    for element in measurements.elements:
        kernel = machine.gpu.kernel_seconds if machine.gpu is not None else 0.0
        note("element", element, memory_seconds(machine, element.moved) + kernel)
    for step in measurements.steps:
        note("step", step, step_seconds(step, machine))
    rows.extend({"kind": "copy", **dataclasses.asdict(each)} for each in measurements.copies)
    return rows


def predict(document: dict[str, Any], assumed: Machine, machine: Machine) -> dict[str, Any]:
    """What is said of a job: seconds of a step, without and with the calibration and with the parts of both passes;
    bytes by the accounting and by the planner."""
    spec = parse_job_spec(document)
    before, after = (StepModel(spec, Cluster(each, 1, 1), engine_on(each)) for each in (assumed, machine))
    parts = after.passes.budgets_of_stage(spec.model.layers, True, True, machine)
    return {
        "seconds_assumed": before.time().seconds,
        "seconds": after.time().seconds,
        "update_seconds": after.optimizer_seconds(),
        "passes": {name: vars(each) for name, each in zip(("forward", "input", "weight"), parts, strict=True)},
        "bytes_accounted": device_bytes(spec)[0].total,
        "bytes": round(memory_of(spec, 0, machine).total),
    }


def _run(
    report: Report, at: int, document: dict[str, Any], predicted: dict[str, Any], steps: int, device: torch.device
) -> None:
    """Train it, and note what that takes; a job that fails is named."""
    spec, began = parse_job_spec(document), time.perf_counter()
    make: Callable[[], Callable[[], object]] = functools.partial(manta, spec, device)
    try:
        seconds, memory = timed(make, steps, device)
    except Exception as error:  # noqa: BLE001 - an untested card may fail in any way
        lines = str(error).strip().splitlines() or [""]
        report.settings["left_out"][f"job {at}"] = f"{type(error).__name__}: {lines[0]}"
        del error
        gc.collect()  # what its frames held
        return
    flops = step_flops(spec)
    report.samples["jobs"].append(
        {
            "number": at,
            "job": {name: document[name] for name in ("model", "train", "parallel")},
            "parameters": parameter_count(spec),
            "predicted": predicted,
            "seconds": seconds,
            "bytes": memory,
            "model_flops_per_second": flops.model_causal / seconds,
            "whole_run_seconds": round(time.perf_counter() - began, 1),
        }
    )
    print(f"job {at}: {seconds:.4f} s, predicted {predicted['seconds']:.4f}", file=sys.stderr, flush=True)


def compare(report: Report) -> None:
    """Note errors and order of the jobs that have run."""
    rows = report.samples["jobs"]
    if not rows:
        return
    made = [row["seconds"] for row in rows]
    report.add("jobs_run", len(rows), "jobs")
    for suffix, key in (("", "seconds"), ("_assumed", "seconds_assumed")):
        said = [row["predicted"][key] for row in rows]
        errors = [abs(a / b - 1) for a, b in zip(said, made, strict=True)]
        report.add(f"step_error_median{suffix}", *_rounded(statistics.median(errors)), None if suffix else TIME_TARGET)
        report.add(f"step_error_max{suffix}", *_rounded(max(errors)))
        if len(rows) > 2:
            order = rank_correlation(said, made)
            report.add(f"step_rank_correlation{suffix}", *_rounded(order))
            if not suffix:
                report.add("step_rank_correlation_is_enough", order >= ORDER_TARGET, "bool", True)
    memory = _memory_errors(rows)
    if memory:
        report.add("memory_error_median", *_rounded(statistics.median(memory)), MEMORY_TARGET)
        report.add("memory_error_max", *_rounded(max(memory)))


def _rounded(value: float) -> tuple[float, str]:
    return round(value, 4), "ratio"


def _memory_errors(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Of those whose memory was counted, which a CPU does not do."""
    return [abs(row["predicted"]["bytes"] / row["bytes"] - 1) for row in rows if row["bytes"]]


if __name__ == "__main__":
    sys.exit(main())
