"""The check of the planner on a GPU, rehearsed on a CPU: predictions come first, results are kept as they come."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import planned_gpu_steps
from benchmarks.support.drawn_gpu_jobs import ON_GPU, draw_jobs
from service.machines import calibrated
from workers.accounting.flops import parameter_count
from workers.calibration.gpu import step_document
from workers.calibration.measurements import Measurements
from workers.spec.reading import parse_job_spec


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs it with eager jobs; returns the report and the predictions."""
    tiny = planned_gpu_steps.calibration.TINY
    steps = (step_document("gpt", 1, 32, 2, 16, 1, 1, 64),)
    monkeypatch.setattr(planned_gpu_steps.calibration, "TINY", type(tiny)(**{**vars(tiny), "steps": steps}))

    def run(*more: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        out, predictions = tmp_path / "report.json", tmp_path / "predictions.json"
        options = ["--device", "cpu", "--steps", "2", "--jobs", "3", "--predictions", str(predictions)]
        assert planned_gpu_steps.main([*options, "--out", str(out), *more]) == 0
        return json.loads(out.read_text()), json.loads(predictions.read_text())

    return run


def test_jobs_are_compared_with_what_was_stored_before(rehearse) -> None:
    report, predictions = rehearse()
    jobs = report["samples"]["jobs"]
    assert sorted(row["number"] for row in jobs) == [0, 1, 2] and report["settings"]["left_out"] == {}
    assert all(row["predicted"] == predictions[row["number"]] and row["seconds"] > 0 for row in jobs)
    assert report["figures"]["jobs_run"]["value"] == 3 and report["settings"]["rehearsal"]
    assert report["figures"]["step_error_median"]["target"] == planned_gpu_steps.TIME_TARGET
    kinds = {row["kind"] for row in report["samples"]["calibration"]}
    assert kinds == {"product", "attention", "element", "copy", "step"}


def test_a_run_that_is_cut_off_keeps_what_it_has(rehearse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(make: Any, steps: int, device: Any) -> tuple[float, int]:
        if (tmp_path / "report.json").exists() and json.loads((tmp_path / "report.json").read_text())["samples"][
            "jobs"
        ]:
            raise KeyboardInterrupt
        return 0.1, 10**9

    monkeypatch.setattr(planned_gpu_steps, "timed", breaks)
    with pytest.raises(KeyboardInterrupt):
        rehearse()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["seconds"] for row in report["samples"]["jobs"]] == [0.1]
    assert report["figures"]["memory_error_median"]["value"] > 0


def test_a_job_that_fails_is_named_and_one_for_which_no_time_is_left(rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: out of memory\nand more")

    monkeypatch.setattr(planned_gpu_steps, "timed", broken)
    report, _ = rehearse()
    assert set(report["settings"]["left_out"].values()) == {"RuntimeError: CUDA error: out of memory"}
    report, _ = rehearse("--seconds", "0")
    assert set(report["settings"]["left_out"].values()) == {"no time was left"}


def test_stored_measurements_are_taken(rehearse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = planned_gpu_steps.calibration.TINY
    measurements = planned_gpu_steps.calibration.measure_gpu(torch.device("cpu"), shapes, print)
    file = tmp_path / "measurements.json"
    file.write_text(json.dumps(dataclasses.asdict(measurements)))
    monkeypatch.setattr(planned_gpu_steps.calibration, "measure_gpu", None)
    report, _ = rehearse("--measurements", str(file), "--seconds", "0")
    known = Measurements.from_json(json.loads(file.read_text()))
    as_gpu = dataclasses.replace(known, device="NVIDIA H100", gpu_memory_bytes=80 * 2**30)
    assert report["settings"]["constants"] == dataclasses.asdict(calibrated(as_gpu).gpu)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planned_gpu_steps.torch.cuda, "is_available", lambda: False)
    assert planned_gpu_steps.main([]) == 1
    assert "needs a GPU and found none" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_jobs_fit_and_are_of_all_kinds(seed: int) -> None:
    jobs = draw_jobs(seed, 24)
    specs = [parse_job_spec(job) for job in jobs]
    assert all(ON_GPU.parameters[0] <= parameter_count(spec) <= ON_GPU.parameters[1] for spec in specs)
    assert {spec.model.family for spec in specs} == {"gpt", "llama", "qwen"}
    assert {spec.layout.recompute for spec in specs} == {"none", "selective", "full"}
    assert sum(spec.train.compile for spec in specs) == 4
    assert jobs == draw_jobs(seed, 24) and jobs != draw_jobs(seed + 2, 24)
