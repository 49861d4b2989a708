"""The demo: where its ranks are, what fails, what it shows at the end."""

import copy
import io
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from manta.api import schemas
from manta.api.demo import __main__ as demo
from manta.api.demo.__main__ import (
    SPEC,
    Comparison,
    Killed,
    NotRecovered,
    Outcome,
    RankKiller,
    ReplayFailed,
    outcome_of,
    replay,
    show,
    slots_where_gpus_are_scarce,
)
from manta.api.schemas import Cluster, Rank, Recovery
from manta.service.cluster import ray_head
from manta.service.cluster.placement import unit_of
from manta.workers.errors import MantaError
from manta.workers.spec.reading import parse_job_spec, read_document
from tests.api.conftest import DOCUMENT


@pytest.mark.parametrize(("steps", "every", "saved"), [(20, 5, 15), (21, 5, 20), (24, 5, 20), (5, 5, 0), (4, 5, 0)])
def test_demo_comparison_begins_at_the_last_checkpoint_before_the_end(steps, every, saved):
    """That of the last step is saved when nothing can be killed any more."""
    document = copy.deepcopy(DOCUMENT)
    document["train"]["steps"], document["checkpoint"] = steps, {"every_steps": every}
    assert demo.last_intermediate_checkpoint(parse_job_spec(document)) == saved


@pytest.mark.parametrize(("error", "status"), [(MantaError("no room"), 1), (KeyboardInterrupt(), 130)])
def test_demo_that_fails_reports_it_and_stops_its_service(monkeypatch, error, status):
    stopped = []
    monkeypatch.setattr(demo, "_demo", Mock(side_effect=error))
    monkeypatch.setattr(demo, "stop_service", stopped.append)
    assert (demo.main(), stopped) == (status, [demo.HOME])


def cluster(gpus):
    node = {"id": "n1", "address": "127.0.0.1", "alive": True, "free": 0}
    place = {"accelerator": "gpu", "total": gpus} if gpus else {"accelerator": "cpu", "total": 16}
    return Cluster.model_validate({"nodes": [{**node, **place}]})


@pytest.mark.parametrize("gpus", range(1, 8))
def test_demo_runs_on_cpu_slots_when_the_cluster_has_too_few_gpus(gpus):
    document = read_document(SPEC)
    changed, note = slots_where_gpus_are_scarce(document, parse_job_spec(document), cluster(gpus))
    spec = parse_job_spec(changed)
    assert unit_of(spec.resources.accelerator, cluster_has_gpus=True) == "manta_slot"
    assert f"{gpus} GPU" in note and "8 ranks" in note and "CPU slots" in note
    assert {**changed, "resources": None} == {**document, "resources": None}


@pytest.mark.parametrize("gpus", [0, 8, 16])
def test_demo_leaves_its_spec_unchanged_with_no_or_enough_gpus(gpus):
    document = read_document(SPEC)
    assert slots_where_gpus_are_scarce(document, parse_job_spec(document), cluster(gpus)) == (document, None)


@pytest.mark.parametrize("gpus", [0, 1, 7])
def test_ray_head_offers_cpu_slots_beside_gpus(gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_head, "count_gpus", lambda: gpus)
    command = ray_head.RayHead(tmp_path)._command()
    resources = next(part for part in command if part.startswith("--resources=")).partition("=")[2]
    assert json.loads(resources) == {"manta_slot": 16}


LAID_OUT = {"parallel": {"tensor": 2, "pipeline": 1, "data": 2}}
ROWS = {step: {"loss": 5.0 - step / 7, "grad_norm": 1.0 / step} for step in range(1, 31)}


class Job:
    """Stands for a client; knows the metrics and checkpoints of one job."""

    def __init__(self, folder, rows):
        self._rows = rows
        self.checkpoint = folder / "home" / "step-00000010-generation-1"
        self.checkpoint.mkdir(parents=True)
        (self.checkpoint / "data").write_text("state")

    def checkpoints(self, job_id):
        return SimpleNamespace(items=[SimpleNamespace(step=10, path=str(self.checkpoint))])

    def metrics(self, job_id, names, after_step, max_points):
        steps = [step for step in self._rows if step > after_step]
        return SimpleNamespace(steps=steps, series={name: [self._rows[step][name] for step in steps] for name in names})


@pytest.fixture
def engine(monkeypatch):
    """Stands for the engine: writes the rows that it is given, and remembers how it was called."""
    made = SimpleNamespace(rows=ROWS, returncode=0, stderr="", command=[])

    def run(command, **_):
        made.command = command
        folder = Path(command[command.index("--checkpoints") + 1])
        assert [each.name for each in folder.iterdir()] == ["step-00000010-generation-1"]
        metrics = Path(command[command.index("--metrics") + 1])
        last = int(command[command.index("--stop-after-step") + 1])
        with metrics.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": s, **made.rows[s]}) + "\n" for s in range(11, last + 1))
        return subprocess.CompletedProcess(command, made.returncode, "", made.stderr)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return made


def test_replay_with_equal_losses_reports_the_same_bits(tmp_path, engine):
    result = replay(Job(tmp_path, ROWS), LAID_OUT, "job", 10, 20, tmp_path / "replay")
    assert result.holds
    assert str(result) == "steps 11 to 20 trained again from the checkpoint of step 10 without the kill: same bits"
    assert "--nproc-per-node=4" in engine.command


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("step", [11, 17, 20])
def test_replay_reports_any_step_whose_loss_or_norm_differs_in_one_bit(tmp_path, engine, name, step):
    engine.rows = {**ROWS, step: {**ROWS[step], name: ROWS[step][name] * (1 + 2**-52)}}
    result = replay(Job(tmp_path, ROWS), LAID_OUT, "job", 10, 20, tmp_path / "replay")
    assert not result.holds
    assert result.differing == (step,)
    assert f"[{step}] have OTHER BITS" in str(result)


def test_replay_counts_a_missing_step_as_different(tmp_path, engine):
    rows = {step: row for step, row in ROWS.items() if step != 15}
    assert replay(Job(tmp_path, rows), LAID_OUT, "job", 10, 20, tmp_path / "replay").differing == (15,)


def test_replay_counts_a_step_not_trained_again_as_different(tmp_path, engine, monkeypatch):
    run = demo.subprocess.run

    def ends_early(command, **about):
        at = command.index("--stop-after-step") + 1
        return run([*command[:at], "18", *command[at + 1 :]], **about)

    monkeypatch.setattr(demo.subprocess, "run", ends_early)
    assert replay(Job(tmp_path, ROWS), LAID_OUT, "job", 10, 20, tmp_path / "replay").differing == (19, 20)


def test_replay_without_its_checkpoint_fails_with_the_missing_step(tmp_path, engine):
    job = Job(tmp_path, ROWS)
    with pytest.raises(ReplayFailed, match="the checkpoint of step 12 is not there"):
        replay(job, LAID_OUT, "job", 12, 20, tmp_path / "replay")


def test_replay_failure_quotes_the_error_of_the_engine(tmp_path, engine):
    engine.returncode, engine.stderr = 1, "Traceback ...\nMantaError: no room"
    with pytest.raises(ReplayFailed, match="failed: MantaError: no room"):
        replay(Job(tmp_path, ROWS), LAID_OUT, "job", 10, 20, tmp_path / "replay")


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
            schemas.Checkpoint(
                id=str(step), step=step, state=state, path=f"{demo.ROOT}/saved/{step}", bytes=1, created_at=NOW
            )
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
    show(console, client or Client(), schemas.Job(**{**values, **changes}), outcome, same_bits)
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


@pytest.fixture
def process():
    """A process that may be killed."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait()


def make_rank(number, pid):
    return Rank.model_validate(
        {"rank": number, "tensor": number % 2, "pipeline": 0, "data": number // 2, "context": 0, "node": "n",
         "pid": pid, "device": "cpu", "generation": 1, "state": "running"}
    )  # fmt: skip


def make_recovery(rank, at, total, kept=3, redone=1):
    return Recovery.model_validate(
        {"generation": 2, "time": at, "kind": "killed", "rank": rank, "node": "n", "cause": "was killed",
         "forked": [rank], "kept": kept, "source": "snapshot", "resume_step": 6, "steps_redone": redone,
         "wait_seconds": 0.0, "seconds": {}, "total_seconds": total}
    )  # fmt: skip


class Ranks:
    """Stands for a client; knows the ranks of one job."""

    def __init__(self, *ranks):
        self.asked, self._ranks = 0, list(ranks)

    def ranks(self, job_id):
        self.asked += 1
        return SimpleNamespace(items=self._ranks)


def test_rank_killer_kills_one_rank_once_when_its_step_is_reached(process):
    out = io.StringIO()
    client = Ranks(*(make_rank(number, process.pid if number == 3 else -1) for number in range(4)))
    killer = RankKiller(client, "job", 5, Console(file=out))
    for step in (0, 4):
        killer.poll(SimpleNamespace(step=step, steps=10))
    assert process.poll() is None and client.asked == 0
    killer.poll(SimpleNamespace(step=6, steps=10))
    assert process.wait(10) == -9
    assert (killer.killed.rank.rank, killer.killed.step, killer.killed.ranks) == (3, 6, 4)
    killer.poll(SimpleNamespace(step=7, steps=10))
    assert client.asked == 1, "only once"
    assert f"kill -9 {process.pid}: rank 3 (tensor 1, pipeline 0, data 1), after step 6" in out.getvalue()


def test_rank_killer_kills_nothing_while_the_rank_has_no_process(process):
    killer = RankKiller(Ranks(make_rank(0, None)), "job", 5, Console(file=io.StringIO()))
    killer.poll(SimpleNamespace(step=6, steps=10))
    assert killer.killed is None


def test_demo_failure_cost_is_the_time_from_the_kill_to_the_end_of_its_recovery():
    at = time.time()
    killed = Killed(make_rank(3, 1), 4, 6, at)
    cost = outcome_of([make_recovery(1, at - 9, 1.0), make_recovery(3, at + 0.25, 0.5)], killed)
    assert cost.seconds == pytest.approx(0.75, abs=1e-4)
    assert (cost.kept, cost.steps_redone) == (3, 1)


def test_demo_kill_without_a_finished_recovery_raises_not_recovered():
    killed = Killed(make_rank(3, 1), 4, 6, time.time())
    with pytest.raises(NotRecovered, match="rank 3 was killed"):
        outcome_of([make_recovery(1, killed.at, 1.0), make_recovery(3, killed.at, None)], killed)
