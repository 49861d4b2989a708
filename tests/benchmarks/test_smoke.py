"""The benchmarks run, at a size that says nothing about time."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from s3_server import S3Server, environment_of, reached_at

from benchmarks import (
    api,
    bubbles,
    context,
    control_plane,
    dashboard,
    experts,
    nanogpt,
    planned_layouts,
    step,
    traces,
)
from benchmarks.support.report import deliver
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import parse_location
from tests.api.ui.browser import needs_chromium


def test_nanogpt_benchmark_loss_follows_the_plain_loop(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it goes back. " * 100)
    report = nanogpt.measure(argparse.Namespace(seed=1, text=text, steps=3))
    assert report.figures["validation_loss_difference"].value < 1e-4
    assert report.figures["validation_loss_engine"].met is None, "the target is for a full run"
    assert report.settings["job"]["data"]["paths"] == ["text.txt"]


def test_balance_of_experts_is_measured_in_every_way(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it goes back. " * 100)
    report = experts.measure_balance(argparse.Namespace(seed=1, seeds=1, text=text, steps=2))
    loads = [figure.value for name, figure in report.figures.items() if name.endswith("_load")]
    assert len(loads) == len(experts.BALANCES) and all(1.0 <= load <= 4.0 for load in loads)


def test_nanogpt_benchmark_names_a_missing_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = argparse.Namespace(seed=1, text=tmp_path / "nowhere.txt", steps=3, json=True, out=None)
    assert deliver(nanogpt.measure, options) == 1
    assert f"no text to train on at {tmp_path / 'nowhere.txt'}" in capsys.readouterr().err


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A stored calibration."""
    core = {"product_fp32": 5e10, "product_16bit": 5e10, "attention_width": 30.0, "memory": 2e10}
    core |= {"operation_seconds": 1e-5, "link": 2e9, "message_seconds": 3e-5, "all_busy": 0.9}
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"name": "abacus", "device": "Abacus", "cores": 2, "core": core}))
    return file


@pytest.mark.soak
def test_layout_benchmark_stores_predictions_before_its_runs(tmp_path: Path, machine: Path) -> None:
    predictions = tmp_path / "predictions.json"
    options = argparse.Namespace(seed=1, jobs=2, turns=2, steps=1, machine=machine, predictions=predictions)
    report = planned_layouts.measure(options)
    stored = [each["seconds"] for each in json.loads(predictions.read_text())]
    assert [row["predicted_seconds"] for row in report.samples["layouts"]] == stored
    assert report.figures["memory_error_max"].value < 0.1


@pytest.mark.soak
@needs_chromium
def test_dashboard_benchmark_opens_its_pages() -> None:
    options = argparse.Namespace(seed=1, jobs=20, longest=3000, viewers=1, turns=1, seconds=1, repeats=1, only="pages")
    report = dashboard.measure(options)
    for name in ("list_drawn", "million_steps_drawn", "zoom_drawn"):
        assert report.figures[name].value > 0


@pytest.mark.soak
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_dashboard_benchmark_viewers_follow_a_job() -> None:
    options = argparse.Namespace(seed=1, jobs=0, longest=0, viewers=2, turns=1, seconds=3, repeats=1, only="viewers")
    report = dashboard.measure(options)
    assert report.figures["step_watched_median"].value > 0 and report.figures["service_cores_watched"].value > 0


@pytest.mark.soak
def test_bubble_benchmark_times_every_schedule_at_or_above_its_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubbles, "MICRO_BATCHES", (4,))
    report = bubbles.measure(argparse.Namespace(seed=1, repetitions=1, wait=0.002))
    for kind in ("gpipe", "1f1b", "interleaved", "zbh1", "zbv"):
        assert report.figures[f"{kind}_m4_step"].value >= report.figures[f"{kind}_m4_simulated"].value


@pytest.mark.soak
def test_context_benchmark_compares_every_order_and_method() -> None:
    report = context.measure(argparse.Namespace(seed=1, steps=1, turns=1, length=16))
    assert all(report.figures[f"{kind}_to_{other}_busiest_rank"].value > 0 for kind, other in context.RATIOS)


@pytest.mark.soak
def test_step_benchmark_times_the_engine_beside_plain_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "SIZES", {"tiny": step.Size(1, 32, 2, 8, 2, 256)})
    monkeypatch.setattr(step, "SHARDED_SIZE", step.SIZES["tiny"])
    report = step.measure(argparse.Namespace(seed=1, starts=1, rounds=1, seconds=0.01, only=None))
    for name in (
        "tiny_engine_to_plain",
        "tiny_engine_to_transformers",
        "host_time_parallel_to_plain",
        "zero_3_to_1_m8",
    ):
        assert report.figures[name].value > 0


@pytest.mark.soak  # of a real one: tests/e2e/test_service.py
def test_control_plane_kill_benchmark_lets_jobs_end() -> None:
    options = {"jobs": 3, "steps": 4, "kills": 1, "steady_seconds": 0.0, "control_planes": 1, "database": "sqlite"}
    report = control_plane.measure(argparse.Namespace(seed=1, **options))
    assert all(figure.met is not False for figure in report.figures.values()), report.to_table()
    assert report.samples["states"] == [{"SUCCEEDED": 3}]


@pytest.mark.soak
def test_api_benchmark_times_requests_beside_a_filled_database() -> None:
    options = {"jobs": 120, "points": 4000, "longest": 2100, "seconds": 0.05, "streams": 3, "database": None}
    report = api.measure(argparse.Namespace(seed=1, **options))
    for name in ("read_job", "read_job_again", "list_50", "list_50_again", "series", "submit", "streams"):
        assert report.figures[f"{name}_multiple"].value > 0
    assert report.figures["memory_of_the_service"].met is not None


@pytest.mark.soak
def test_checkpoint_store_benchmark_times_steps_beside_uploads(tmp_path: Path) -> None:
    server = S3Server()
    server.make_bucket("bucket")
    out = tmp_path / "report.json"
    small = ["--layers", "1", "--vocabulary-size", "256", "--repetitions", "1", "--alone-steps", "2"]
    command = [sys.executable, "-m", "benchmarks.checkpoint_store", "--store", "s3://bucket/of/mine", *small]
    try:
        subprocess.run([*command, "--out", out], env={**os.environ, **environment_of(server.url)}, check=True)
        with reached_at(server.url):
            assert not files_of(parse_location("s3://bucket")).is_there(parse_location("s3://bucket/of")), (
                "it removes what it stored"
            )
    finally:
        server.close()
    figures = json.loads(out.read_text())["figures"]
    assert figures["upload_to_plain_upload"]["value"] > 0
    assert figures["checkpoint"]["value"] > 80e6
    assert figures["local_training_thread_waits"]["value"] >= 0


@pytest.mark.soak
def test_trace_benchmark_bubble_matches_that_of_timers() -> None:
    report = traces.measure(argparse.Namespace(seed=1, steps=15))
    assert report.figures["bubble_difference"].met
    assert report.figures["slices_of_a_step"].value > 100
