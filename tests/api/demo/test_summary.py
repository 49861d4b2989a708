"""The table at the demo's end."""

import io
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from manta.api import schemas
from manta.api.demo.failure import Comparison, Killed, Outcome
from manta.api.demo.summary import show

NOW = datetime(2026, 1, 2, tzinfo=UTC)
RANK = schemas.Rank(rank=5, tensor=1, pipeline=0, data=1, context=0, node="n", device="cpu", pid=42, generation=1,
                    state="running")  # fmt: skip
OUTCOME = Outcome(Killed(RANK, 8, 12, 0.0), 0.789, 7, 2)


class Client:
    """What the service says about the job."""

    def __init__(self, device="cpu", state="complete"):
        self._device, self._state = device, state

    def metrics(self, job_id):
        series = {"loss": [5.5, None, 4.25], "tokens_per_second": [100.0, None, 3000.0, 2000.0],
                  "mfu_full": [0.5, 0.25, 0.125], "mfu_causal": [0.4, 0.2, 0.1]}  # fmt: skip
        return schemas.MetricSeries(steps=[1, 2, 3], series=series)

    def ranks(self, job_id):
        return SimpleNamespace(items=[RANK, RANK.model_copy(update={"device": self._device})])

    def checkpoints(self, job_id):
        newest, older = (
            schemas.Checkpoint(id=str(step), step=step, state=state, path=f"/srv/saved/{step}", bytes=1, created_at=NOW)
            for step, state in ((20, self._state), (10, "complete"))
        )
        return SimpleNamespace(items=[newest, older])


def said(client=None, outcome=OUTCOME, same_bits=None, **changes):
    values = {
        "id": "job_1", "name": "demo", "state": "SUCCEEDED", "reason": None, "message": None, "spec": {}, "step": 20,
        "steps": 20, "eta_seconds": None, "parallel": {"tensor": 2, "pipeline": 4, "data": 1}, "generation": 2,
        "restarts": 1, "goodput": 0.875, "queue": schemas.Queue(), "created_at": NOW, "started_at": NOW,
        "finished_at": NOW, "metrics": schemas.LatestMetrics(latest={"validation_loss": 4.125}),
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    show(console, client or Client(), schemas.Job(**{**values, **changes}), outcome, same_bits, Path("/srv"))
    lines = console.file.getvalue().splitlines()
    return {line.split("│")[1].strip(): line.split("│")[2].strip() for line in lines if "│" in line}, lines


def test_demo_summary_shows_the_job_and_the_cost_of_its_failure():
    rows, lines = said(same_bits=Comparison(11, 20, ()))
    assert lines[0].strip() == "demo: SUCCEEDED"
    assert rows.pop("open the dashboard").startswith("MANTA_HOME=.demo ")
    assert rows.pop("the curve") == str(Comparison(11, 20, ()))
    assert rows == {
        "layout": "tensor 2 x pipeline 4 x data 1", "loss, first step": "5.5000", "loss, last step": "4.2500",
        "validation loss": "4.1250", "tokens/s, median": "2,000", "MFU, attention in full, median": "25.0%",
        "MFU, causal half, median": "20.0%", "goodput": "87.5%",
        "MFU is measured against": "a matrix product on one core of this machine for each rank",
        "killed": "process 42, rank 5 (tensor 1, pipeline 0, data 1), with kill -9 after step 12",
        "next committed step": "0.79 s after the kill", "kept process and weights": "7 of 8 ranks",
        "steps done again": "2", "checkpoint": "saved/20",
    }  # fmt: skip


def test_demo_summary_of_a_failed_job_says_what_is_missing():
    rows, lines = said(Client(device="cuda:0", state="saving"), None, state="FAILED", message="boom")
    assert rows["killed"] == "nothing: the job ended before" and "the curve" not in rows
    assert rows["MFU is measured against"] == "the device's peak"
    assert rows["checkpoint"] == "saved/10", "one that is not complete is none"
    assert lines[-1] == "boom"


@pytest.mark.parametrize(("reason", "line"), [("user_error", "user_error"), (None, "no reason given")])
def test_demo_summary_of_a_failure_without_a_message_shows_its_reason(reason, line):
    assert said(state="FAILED", reason=reason)[1][-1] == line
