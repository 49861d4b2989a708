"""The benchmarks run, at a size that says nothing about time."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server, environment_of, reached_at

from benchmarks import (
    api,
    auto_layout,
    bubbles,
    checkpoint_plan,
    control_plane,
    dashboard,
    elastic_sums,
    forward_chunks,
    layouts,
    metrics,
    nanogpt,
    perplexity,
    planned_layouts,
    refined_plans,
    snapshots,
    step,
    tokenize,
    traces,
    uneven_stages,
)
from benchmarks.support.report import Report, deliver
from service.machines import Calibrated
from service.planner.hardware import ASSUMED_CORE
from tests.api.ui.browser import needs_chromium
from workers.storage.files import files_of
from workers.storage.places import place_of


def test_nanogpt_follows_the_plain_loop(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it goes back. " * 100)
    report = nanogpt.measure(argparse.Namespace(seed=1, text=text, steps=3))
    assert report.figures["validation_loss_difference"].value < 1e-4
    assert report.figures["validation_loss_engine"].met is None, "the target is for a full run"
    assert report.settings["job"]["data"]["paths"] == ["text.txt"]


def test_nanogpt_says_which_text_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = argparse.Namespace(seed=1, text=tmp_path / "nowhere.txt", steps=3, json=True, out=None)
    assert deliver(nanogpt.measure, options) == 1
    assert f"no text to train on at {tmp_path / 'nowhere.txt'}" in capsys.readouterr().err


@pytest.mark.soak
def test_the_planners_layout_trains_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_layout, "BY_HAND", {"free": ({"tensor": 2},)})
    machine = Calibrated("here", "a core", 2, ASSUMED_CORE)
    (tmp_path / "machine.json").write_text(json.dumps(machine.to_json()))
    predictions = tmp_path / "predictions.json"
    options = argparse.Namespace(seed=1, turns=1, steps=1, machine=tmp_path / "machine.json", predictions=predictions)
    report = auto_layout.measure(options)
    rows = report.samples["free"]
    assert [row["predicted_seconds"] for row in rows[:-1]] == json.loads(predictions.read_text())["free"]
    assert rows[0]["parallel"] == rows[-1]["parallel"] and rows[1]["parallel"]["tensor"] == 2
    assert all(len(row["turns"]) == 1 and row["seconds"] > 0 for row in rows)
    assert report.figures["free_is_at_least_as_fast"].met is not None


def test_a_layout_that_was_chosen_by_hand_too_is_not_slower_than_itself() -> None:
    def row(data: int, *turns: float) -> dict[str, Any]:
        said = {"parallel": {"data": data}, "threads": 1, "predicted_seconds": 1.0}
        return said | {"turns": list(turns), "seconds": statistics.median(turns)}

    report = Report("auto_layout", 1)
    auto_layout.compare(report, "free", [row(2, 1.0, 1.2), row(2, 0.9, 0.9), row(4, 1.1, 1.1), row(2, 1.0, 1.2)])
    assert report.figures["free_auto_seconds"].value == 1.0 and report.figures["free_auto_to_best"].value == 1.0
    assert report.figures["free_auto_to_best_other"].value == pytest.approx(1 / 1.1, rel=1e-3)
    auto_layout.compare(report, "forced", [row(2, 1.0, 1.0), row(1, 0.9, 0.9), row(4, 1.1, 1.1), row(2, 1.0, 1.02)])
    assert not report.figures["forced_same_layout_by_hand"].value
    assert report.figures["forced_is_at_least_as_fast"].met is False, "1.11 of the best, and 1% of noise"


@pytest.mark.soak
def test_layouts_agree_for_a_step() -> None:
    report = layouts.measure(argparse.Namespace(seed=1, steps=1), [(1, 1, 1), (1, 1, 2)])
    assert report.figures["loss_distance_1x1x2"].met and report.figures["grad_norm_distance_1x1x2"].met
    assert report.figures["same_bits_twice_1x1x1"].met and report.figures["same_bits_twice_1x1x2"].met


def test_a_checkpoint_of_many_ranks_is_planned_and_read() -> None:
    shape = {"layers": 8, "hidden_size": 64, "heads": 4, "sequence_length": 16, "vocabulary_size": 256}
    report = checkpoint_plan.measure(argparse.Namespace(seed=1), shape, {"tensor": 2, "pipeline": 4, "data": 3})
    assert report.settings["messages"] == 24
    assert report.figures["rectangles_in_the_same_rows"].value > 0
    assert report.figures["join_memory"].met


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A stored calibration."""
    core = {"product_fp32": 5e10, "product_16bit": 5e10, "attention_width": 30.0, "memory": 2e10}
    core |= {"operation_seconds": 1e-5, "link": 2e9, "message_seconds": 3e-5, "all_busy": 0.9}
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"name": "abacus", "device": "Abacus", "cores": 2, "core": core}))
    return file


@pytest.mark.soak
def test_predictions_are_stored_before_the_runs(tmp_path: Path, machine: Path) -> None:
    predictions = tmp_path / "predictions.json"
    options = argparse.Namespace(seed=1, jobs=2, turns=2, steps=1, machine=machine, predictions=predictions)
    report = planned_layouts.measure(options)
    stored = [each["seconds"] for each in json.loads(predictions.read_text())]
    assert [row["predicted_seconds"] for row in report.samples["layouts"]] == stored
    assert report.figures["memory_error_max"].value < 0.1


@pytest.mark.soak
def test_every_list_of_layers_is_timed_and_has_the_same_losses(machine: Path) -> None:
    model = {"layers": 4, "hidden_size": 32, "heads": 2, "sequence_length": 16, "vocabulary_size": 30_000}
    report = uneven_stages.measure(argparse.Namespace(seed=1, steps=4, schedule="zb-h1", machine=machine), model)
    assert report.figures["same_losses"].met
    assert set(report.samples) == {"2_2", "3_1"} and report.figures["first_stage_of_chosen"].value == 3


@pytest.mark.soak
def test_jobs_are_predicted_before_and_after_other_jobs_have_run(tmp_path: Path) -> None:
    predictions = tmp_path / "predictions.json"
    options = argparse.Namespace(seed=1, seen=1, held_out=2, predictions=predictions)
    report = refined_plans.measure(options)
    stored = json.loads(predictions.read_text())
    for when in ("before", "after"):
        assert [row[when] for row in report.samples["held_out"]] == stored[when]
    assert all(row["seconds"] > 0 for row in report.samples["seen"] + report.samples["held_out"])
    assert stored["before"] == stored["after"], "one job moves nothing"


@pytest.mark.soak
def test_elastic_sums_give_the_same_bits() -> None:
    options = argparse.Namespace(seed=1, steps=2, rounds=1, micro_batch_size=1, micro_batches=5)
    model = {"layers": 1, "hidden_size": 32, "heads": 2, "sequence_length": 16}
    report = elastic_sums.measure(options, model)
    assert report.figures["same_bits_elastic"].met
    assert (report.figures["gradient_buffers_1"].value, report.figures["gradient_buffers_2"].value) == (2, 1)


@pytest.mark.soak
def test_forward_in_chunks_gives_the_same_losses() -> None:
    options = argparse.Namespace(seed=1, steps=2, rounds=1)
    model = {"layers": 1, "hidden_size": 32, "heads": 2, "sequence_length": 16}
    report = forward_chunks.measure(options, model)
    assert all(each.met for name, each in report.figures.items() if name.startswith("loss_distance"))
    assert len(report.figures) == 14


@pytest.mark.soak
def test_layouts_and_transformers_train_the_same_llama(tmp_path: Path) -> None:
    words = random.Random(1).choices([f"word{number}" for number in range(300)], k=4000)
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(" ".join(words[:3000] if name == "train.txt" else words[3000:]))
    report = perplexity.measure(
        argparse.Namespace(seed=1, steps=3, train=tmp_path / "train.txt", test=tmp_path / "test.txt")
    )
    assert report.figures["fp64_most_apart"].met
    for name in ("fp32_most_apart", "fp32_most_from_transformers", "exported_from_own"):
        assert report.figures[name].value < 1e-5


@pytest.mark.soak
def test_every_row_reaches_the_reader() -> None:
    report = metrics.measure(argparse.Namespace(seed=1, warm_up=1, steps=12))
    assert report.figures["rows_read"].value == report.figures["rows_sent"].value == 11


@pytest.mark.soak
@needs_chromium
def test_pages_of_the_dashboard_are_opened() -> None:
    options = argparse.Namespace(seed=1, jobs=20, longest=3000, viewers=1, turns=1, seconds=1, repeats=1, only="pages")
    report = dashboard.measure(options)
    for name in ("list_drawn", "million_steps_drawn", "zoom_drawn"):
        assert report.figures[name].value > 0


@pytest.mark.soak
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_viewers_follow_a_job() -> None:
    options = argparse.Namespace(seed=1, jobs=0, longest=0, viewers=2, turns=1, seconds=3, repeats=1, only="viewers")
    report = dashboard.measure(options)
    assert report.figures["step_watched_median"].value > 0 and report.figures["service_cores_watched"].value > 0


@pytest.mark.soak
def test_snapshots_are_copied_summed_and_replicated() -> None:
    report = snapshots.measure(argparse.Namespace(seed=1, megabytes=0.3, wait=0.02, steps=5))
    for name in ("alone_copied", "alone_summed", "replicated"):
        assert report.figures[name].value > 0
    assert report.figures["replicas_arrived"].value >= 2
    assert report.figures["checkpoint_from_slot_written_in"].value > 0
    assert report.figures["alone_training_thread_a_step_median"].target == snapshots.TARGET_MS


@pytest.mark.soak
def test_all_schedules_are_timed_and_take_at_least_what_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubbles, "MICRO_BATCHES", (4,))
    report = bubbles.measure(argparse.Namespace(seed=1, repetitions=1, wait=0.002))
    for kind in ("gpipe", "1f1b", "interleaved", "zbh1", "zbv"):
        assert report.figures[f"{kind}_m4_step"].value >= report.figures[f"{kind}_m4_simulated"].value


@pytest.mark.soak
def test_a_step_is_timed_beside_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "SIZES", {"tiny": step.Size(1, 32, 2, 8, 2, 256)})
    report = step.measure(argparse.Namespace(seed=1, starts=1, rounds=1, seconds=0.01))
    for name in ("tiny_engine_to_plain", "tiny_engine_to_transformers", "host_time_parallel_to_plain"):
        assert report.figures[name].value > 0


@pytest.mark.soak  # of a real one: tests/e2e/test_service.py
def test_jobs_end_though_the_control_plane_is_killed() -> None:
    options = {"jobs": 3, "steps": 4, "kills": 1, "steady_seconds": 0.0, "control_planes": 1, "database": "sqlite"}
    report = control_plane.measure(argparse.Namespace(seed=1, **options))
    assert all(figure.met is not False for figure in report.figures.values()), report.to_table()
    assert report.samples["states"] == [{"SUCCEEDED": 3}]


@pytest.mark.soak
def test_requests_are_timed_beside_a_filled_database() -> None:
    options = {"jobs": 120, "points": 4000, "longest": 2100, "seconds": 0.05, "streams": 3, "database": None}
    report = api.measure(argparse.Namespace(seed=1, **options))
    for name in ("read_job", "read_job_again", "list_50", "list_50_again", "series", "submit", "streams"):
        assert report.figures[f"{name}_multiple"].value > 0
    assert report.figures["memory_of_the_service"].met is not None


@pytest.mark.soak
def test_tokens_are_made_in_turns_with_their_library(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"Paragraph {n}\nof {n * n} words\n\n" for n in range(3000)))
    report = tokenize.measure(argparse.Namespace(seed=1, texts=tmp_path, megabytes=0.2, turns=1, steps=2))
    assert report.figures["same_tokens"].met
    assert report.figures["ours_to_encode_batch"].value > 0
    assert report.figures["reading_tokens_to_step"].value > 0


@pytest.mark.soak
def test_steps_are_timed_beside_uploads_and_plain_ones(tmp_path: Path) -> None:
    server = S3Server()
    server.make_bucket("bucket")
    out = tmp_path / "report.json"
    small = ["--layers", "1", "--vocabulary-size", "256", "--repetitions", "1", "--alone-steps", "2"]
    command = [sys.executable, "-m", "benchmarks.checkpoint_store", "--store", "s3://bucket/of/mine", *small]
    try:
        subprocess.run([*command, "--out", out], env={**os.environ, **environment_of(server.url)}, check=True)
        with reached_at(server.url):
            assert not files_of(place_of("s3://bucket")).is_there(place_of("s3://bucket/of")), (
                "it removes what it stored"
            )
    finally:
        server.close()
    figures = json.loads(out.read_text())["figures"]
    assert figures["upload_to_plain_upload"]["value"] > 0
    assert figures["checkpoint"]["value"] > 80e6
    assert figures["local_training_thread_waits"]["value"] >= 0


@pytest.mark.soak
def test_the_bubble_of_a_trace_is_that_of_timers() -> None:
    report = traces.measure(argparse.Namespace(seed=1, steps=15))
    assert report.figures["bubble_difference"].met
    assert report.figures["slices_of_a_step"].value > 100
