"""The progress line says where a job is, also while nothing is known yet."""

import io

import pytest
from rich.console import Console

from manta.api.cli import progress
from manta.api.cli.progress import duration, follow, progress_line
from manta.api.schemas import Job


def make_job(**changes):
    base = {
        "id": "job_000000000001", "name": "small", "state": "RUNNING", "reason": None, "message": None, "spec": {},
        "step": 50, "steps": 200, "eta_seconds": 75.2, "parallel": {}, "generation": 1, "restarts": 0,
        "metrics": {"latest": {"loss": 2.34567}, "mean": {"tokens_per_second": 12345.6, "mfu_full": 0.1234}},
        "goodput": 0.9, "queue": {}, "created_at": "2026-01-01T00:00:00Z", "started_at": None, "finished_at": None,
    }  # fmt: skip
    return Job.model_validate({**base, **changes})


class Script:
    """Stands for a client; each look shows the next job."""

    def __init__(self, *jobs):
        self.jobs = list(jobs)

    def job(self, job_id):
        return self.jobs.pop(0)


def test_progress_line_shows_step_loss_throughput_mfu_and_eta():
    line = progress_line(make_job(restarts=2))
    for part in ("50/200", "loss 2.3457", "12,346 tokens/s", "MFU 12.3%", "ETA 1m15s", "restarts 2"):
        assert part in line
    assert line.count("#") == 6


def test_progress_line_shows_dashes_for_unknown_values():
    queued = make_job(state="QUEUED", step=0, eta_seconds=None, metrics={"latest": {}}, message="waits for 4 slots")
    line = progress_line(queued)
    for part in ("0/200", "loss -", "- tokens/s", "MFU -", "ETA -", "waits for 4 slots"):
        assert part in line
    held = make_job(state="RECOVERING", reason="held", message="held: the folder is not there")
    assert progress_line(held).endswith("  held: the folder is not there")


def test_progress_line_shows_a_nan_loss_as_nan():
    assert "loss nan" in progress_line(make_job(metrics={"latest": {"loss": "nan"}}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0s"), (0.4, "<1s"), (59.4, "59s"), (60, "1m00s"), (3599.9, "1h00m"), (7260, "2h01m")],
)
def test_durations_are_printed_in_readable_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_follow_returns_when_the_job_ends_and_shows_its_last_state(terminal):
    script = Script(make_job(state="STARTING", step=0), make_job(), make_job(step=199), make_job(state="FAILED"))
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200)
    assert follow(script, "job_000000000001", console, poll_seconds=0).state == "FAILED"
    assert script.jobs == []
    assert "FAILED" in output.getvalue()
    if not terminal:
        assert [line.split()[0] for line in output.getvalue().splitlines()] == ["STARTING", "RUNNING", "FAILED"]


@pytest.mark.parametrize("terminal", [True, False])
def test_follow_calls_on_progress_for_every_job_state_it_reads(terminal):
    looks = [make_job(step=0), make_job(), make_job(), make_job(state="FAILED")]
    console, seen = Console(file=io.StringIO(), force_terminal=terminal, width=200), []
    follow(Script(*looks), "job_000000000001", console, poll_seconds=0, on_progress=seen.append)
    assert seen == looks


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 4), (1000.0, 2)])
def test_progress_without_a_terminal_is_a_line_at_most_every_few_seconds(monkeypatch, seconds, lines):
    monkeypatch.setattr(progress, "PLAIN_SECONDS", seconds)
    output, jobs = io.StringIO(), [make_job(), make_job(), make_job(), make_job(state="FAILED")]
    follow(Script(*jobs), "job_000000000001", Console(file=output, width=200), poll_seconds=0)
    assert len(output.getvalue().splitlines()) == lines
