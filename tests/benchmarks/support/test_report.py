"""The envelope: what a report holds, what it prints, what counts as met."""

from __future__ import annotations

import argparse
import json
import re
import socket
from pathlib import Path

import pytest

from benchmarks.support.report import ROOT, Figure, Report, deliver, parser, percentile
from manta.workers.errors import DataError


def _report(options: argparse.Namespace) -> Report:
    report = Report("sample", options.seed, settings={"steps": 3})
    report.add("time", 1.5, "s", 2.0)
    report.add_spread("latency", [0.1, 0.3, 0.2], "s", 0.25)
    report.add("same_bits", True, "bool", True)
    return report


def test_benchmark_report_prints_and_stores_only_json_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "results" / "sample.json"
    options = parser("sample", "A sample.").parse_args(["--json", "--seed", "7", "--out", str(out)])
    assert deliver(_report, options) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert document["seed"] == 7
    assert document["figures"]["time"] == {"value": 1.5, "unit": "s", "target": 2.0, "met": True}
    assert document["figures"]["latency_median"] == {"value": 0.2, "unit": "s"}
    assert document["figures"]["latency_max"] == {"value": 0.3, "unit": "s", "target": 0.25, "met": False}
    assert set(document["machine"]) == {"cpu", "architecture", "cores", "memory_bytes"}
    assert set(document["versions"]) == {"python", "torch", "ray", "manta"}
    assert document["machine"]["cores"] >= 1 and document["machine"]["memory_bytes"] > 2**20
    assert len(document["load_average_at_start"]) == 3


def test_benchmark_table_names_every_figure_and_missed_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert deliver(_report, parser("sample", None).parse_args([])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("time" in line and "1.5 s" in line and line.endswith("met") for line in lines)
    assert any("latency_max" in line and line.endswith("target 0.25: MISSED") for line in lines)


def test_benchmark_that_cannot_run_prints_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: argparse.Namespace) -> Report:
        raise DataError("no text to train on at nowhere.txt")

    assert deliver(fail, parser("sample", None).parse_args(["--json"])) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "no text to train on at nowhere.txt\n"


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure(2.0, "s", 2.0), True),
        (Figure(float("nan"), "s", 2.0), False),
        (Figure(1, "steps", 0), False),
        (Figure(False, "bool", True), False),
        (Figure(False, "bool", False), True),
        (Figure(2.0, "s"), None),
    ],
)
def test_figure_is_met_if_it_reaches_its_target(figure: Figure, met: bool | None) -> None:
    assert figure.met is met


def test_percentile_returns_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.95) == 95 and percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100 and percentile([3.0], 0.5) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_stored_benchmark_results_name_no_machine_or_folder() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        text = path.read_text(encoding="utf-8")
        assert json.loads(text)["benchmark"] == path.stem
        # As a word: a machine may be called "dev" or "ci", which are parts of others.
        assert not re.search(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w.-])", text)
        assert '"/' not in text and "/home/" not in text and "/tmp/" not in text, f"{path.name} holds a path"
