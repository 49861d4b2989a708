"""The file of metrics of a job without the service, and the lines printed beside it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from manta.workers.errors import MantaError
from manta.workers.protocol.reports import Event, Finished, Message, Metrics
from manta.workers.standalone import MetricsFile

ROW = {"step": 2, "loss": float("nan"), "grad_norm": 0.5, "tokens_per_second": 100.0, "mfu_causal": 0.25}


def rows_of(path: Path) -> list[dict]:
    """The rows in the file, line by line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_metrics_file_is_json_line_by_line_and_at_once(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("of a run before")
    rows = ({**ROW, "step": 1}, {**ROW, "validation_loss": 1.5})
    with MetricsFile(path, 9) as sink:
        sink.write([Message(Metrics(rows), 1.0), Message(Event("spike", "too high"), 1.0), Message(Finished(2), 1.0)])
        assert [(row["step"], row["loss"]) for row in rows_of(path)] == [(1, "nan"), (2, "nan")]
        file = sink._file
    assert file.closed
    assert capsys.readouterr().out.splitlines() == [
        "step 1/9  loss nan  grad norm 0.500  100 tokens/s  mfu_causal 25.0%",
        "step 2/9  loss nan  grad norm 0.500  100 tokens/s  mfu_causal 25.0%  validation loss 1.5000",
        "too high",
    ]


@pytest.mark.parametrize(("name", "why"), [("no/metrics.jsonl", "No such file or directory"), (".", "Is a directory")])
def test_unwritable_metrics_file_is_named(tmp_path, name, why):
    path = tmp_path / name
    with pytest.raises(MantaError) as caught, MetricsFile(path, 9):
        pass
    assert str(caught.value) == f"--metrics: {path} cannot be written ({why})"


def test_full_disk_stops_metrics_but_neither_output_nor_training(capsys):
    sentence = "--metrics: /dev/full cannot be written (No space left on device)"
    with pytest.raises(MantaError, match=re.escape(sentence)), MetricsFile(Path("/dev/full"), 9) as sink:
        sink.write([Message(Metrics((ROW,)), 1.0)])
        sink.write([Message(Metrics(({**ROW, "step": 3},)), 1.0)])
    said = capsys.readouterr()
    assert [line.split()[1] for line in said.out.splitlines()] == ["2/9", "3/9"]
    assert said.err == f"{sentence}; training goes on\n"


def test_metrics_are_written_even_if_nobody_reads_the_output(tmp_path, monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    path = tmp_path / "metrics.jsonl"
    with os.fdopen(writes, "w") as pipe, MetricsFile(path, 9) as sink:
        monkeypatch.setattr(sys, "stdout", pipe)
        sink.write([Message(Metrics((ROW,)), 1.0)])
        sink.write([Message(Event("spike", "too high"), 1.0), Message(Metrics(({**ROW, "step": 3},)), 1.0)])
        monkeypatch.undo()
    assert [row["step"] for row in rows_of(path)] == [2, 3]


def test_metrics_are_printed_without_a_metrics_file(capsys):
    with MetricsFile(None, 9) as sink:
        sink.write([Message(Metrics((ROW,)), 1.0)])
    assert "step 2/9" in capsys.readouterr().out
