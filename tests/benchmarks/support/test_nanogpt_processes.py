"""Whole processes in turns: what is compared, and what is said where it cannot be."""

import argparse
import subprocess
from pathlib import Path

import pytest

from benchmarks import nanogpt
from benchmarks.support import nanogpt_processes
from benchmarks.support.nanogpt_processes import SETTLING, ProcessFailed, Turns, plain_loop, take_turns, their_program


def test_nanogpt_programs_alternate_and_warm_up_before_they_are_timed():
    asked = []

    def program(name, milliseconds):
        def run(cores):
            asked.append((name, cores))
            return [1000.0] * SETTLING + [milliseconds / cores] * 5

        return run

    by_cores = take_turns((program("ours", 60.0), program("theirs", 80.0)), [1, 2], 2)
    assert asked == [
        ("ours", 1), ("theirs", 1), ("ours", 2), ("theirs", 2), ("theirs", 1), ("ours", 1), ("theirs", 2), ("ours", 2)
    ]  # fmt: skip
    assert by_cores == {1: Turns([60.0, 60.0], [80.0, 80.0]), 2: Turns([30.0, 30.0], [40.0, 40.0])}
    assert by_cores[2].ratio == 0.75


def test_nanogpt_ratio_is_the_median_over_pairs_of_turns():
    assert Turns([10.0, 90.0, 30.0], [10.0, 100.0, 60.0]).ratio == 0.9, "a slow turn is slow for both"


def test_nanogpt_program_is_bound_to_the_given_number_of_cores(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        output = "iter 0: loss 4.1, time 12.50ms, mfu -100.00%\nstep 0: train\niter 1: loss 4.0, time 7.00ms"
        return subprocess.CompletedProcess(command, 0, output, "")

    monkeypatch.setattr(nanogpt_processes.os, "sched_getaffinity", lambda process: {3, 5, 7})
    monkeypatch.setattr(nanogpt_processes.subprocess, "run", run)
    assert plain_loop(Path("text"), 2)(2) == [12.5, 7.0]
    assert commands[0][:3] == ["taskset", "--cpu-list", "3,5"]


def test_nanogpt_program_that_fails_raises_its_last_error_line(monkeypatch):
    failed = subprocess.CompletedProcess([], 3, "", "Traceback\nOSError: no text\n")
    monkeypatch.setattr(nanogpt_processes.subprocess, "run", lambda command, **_: failed)
    with pytest.raises(ProcessFailed, match="ended with 3: OSError: no text"):
        plain_loop(Path("text"), 1)(1)


def test_nanogpt_folder_without_the_repository_is_refused(tmp_path):
    with pytest.raises(ProcessFailed, match="holds no copy of nanoGPT's repository"):
        their_program(tmp_path, tmp_path / "text", 1, tmp_path)
    with pytest.raises(SystemExit):
        nanogpt.main(["--nanogpt", str(tmp_path)])


@pytest.mark.soak
def test_nanogpt_benchmark_times_engine_and_plain_loop_in_turns(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it goes back.\n" * 100)
    options = argparse.Namespace(seed=1, text=text, turns=1, nanogpt=None)
    report = nanogpt.measure_processes(options, SETTLING + 3)
    assert report.figures["iteration_engine_1_cores"].value > 0
    assert report.figures["iteration_engine_to_plain_1_cores"].target == 1.0
    assert report.settings["job"]["data"]["paths"] == ["text.txt"]
