"""Traces and budgets over HTTP and in the command."""

import json
import time
from typing import get_args

import pytest
from perfetto_reader import read_trace
from simulated_traces import STEP, recordings_of, timeline_of
from typer.testing import CliRunner

from benchmarks.support.timeline import PassTimes
from manta.api.cli.main import command_line
from manta.api.client import Client
from manta.api.routes.traces import planner_cluster
from manta.api.schemas.traces import BudgetPart
from manta.service.step_traces.budget import PARTS
from manta.service.store import generations, jobs, metrics, ranks, step_traces
from manta.workers.config import ParallelConfig
from manta.workers.spec.reading import parse_job_spec
from tests.api.conftest import DOCUMENT
from tests.api.support.problems import problem_of

PIPELINE = {"parallel": {"tensor": 1, "pipeline": 2, "data": 1}, "train": {"steps": 100, "global_batch_size": 4}}
TIMELINE = timeline_of("1f1b", 2, 1, 4, PassTimes(1.0, 1.0, 1.0))
MEASURED = ("data", "forward", "backward", "recompute", "tensor_communication", "pipeline_communication")
MEASURED += ("data_communication", "bubble", "optimizer", "other")


@pytest.fixture
def job(service):
    """A job of two stages that runs."""
    made = service.submit(**PIPELINE)["id"]
    service.move(made, "STARTING", "RUNNING")
    service.store.write(lambda s: generations.begin(s, made, "test", False))
    rows = [
        {
            "rank": rank, "tensor": 0, "pipeline": rank, "data": 0, "generation": 1, "state": "running",
            "node": f"n{rank}",
        }
        for rank in range(2)
    ]  # fmt: skip
    service.store.write(lambda s: ranks.replace(s, made, rows))
    return made


def record(service, job, number=1, of=(0, 1), timeline=TIMELINE):
    """Ranks record the simulated step."""
    recordings = recordings_of("1f1b", 1, timeline)
    for rank in of:
        packed = recordings[rank].pack()
        service.store.write(
            lambda s, rank=rank, packed=packed: step_traces.record_recorded(s, job, number, 1, STEP, rank, packed)
        )


def test_trace_is_requested_listed_and_read(service, job):
    asked = service.http.post(f"/v1/jobs/{job}/traces", json={"steps": 2, "step": 7})
    assert asked.status_code == 202
    assert service.control.asked[-1] == ("trace", job)
    about = asked.json()
    assert (about["id"], about["state"], about["steps"], about["bubble"]) == ("trace_1", "requested", 2, None)
    whole = service.http.get(f"/v1/jobs/{job}/traces/trace_1").json()
    assert (whole["ranks"], whole["planned"], whole["budget"]) == ([], None, None)
    record(service, job)
    (listed,) = service.http.get(f"/v1/jobs/{job}/traces").json()["items"]
    assert (listed["state"], listed["first_step"], listed["schedule"]) == ("complete", STEP, "1f1b")
    assert listed["bubble"]["mean"] == pytest.approx(0.2) and "ranks" not in listed and "planned" not in listed
    whole = service.http.get(f"/v1/jobs/{job}/traces/trace_1").json()
    assert {name: whole[name] for name in listed} == listed | {"budget": whole["budget"]}
    assert [(rank["rank"], rank["pipeline"], rank["node"]) for rank in whole["ranks"]] == [(0, 0, "n0"), (1, 1, "n1")]
    assert whole["ranks"][0]["slices"][0] == {
        "kind": "forward", "name": "forward 0", "start": 0.0, "end": 1.0, "step": STEP, "stage": 0, "micro_batch": 0,
        "bytes": None, "axis": None, "wait": None,
    }  # fmt: skip
    assert whole["budget"]["measured_from"] == "trace_1"
    assert whole["planned"]["step_seconds"] > 0, "the planner knows CPUs"
    file = service.http.get(f"/v1/jobs/{job}/traces/trace_1/perfetto")
    assert "trace_1.pftrace" in file.headers["Content-Disposition"]
    assert [len(track.slices) for track in read_trace(file.content)] == [
        0,
        *(1 + len(rank["slices"]) for rank in whole["ranks"]),
    ]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"steps": 0}, "at least"),
        ({"steps": 21}, "at most"),
        ({"steps": "3"}, "integer"),
        ({"step": -1}, "at least"),
        ({"ranks": [1]}, "ranks"),
    ],
)
def test_invalid_trace_request_is_refused_with_a_reason(service, job, wanted, said):
    response = service.http.post(f"/v1/jobs/{job}/traces", json=wanted)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_parameter")
    assert said in response.json()["detail"]


def test_trace_past_the_last_step_is_a_conflict_and_a_missing_trace_not_found(service, job):
    assert problem_of(service.http.post(f"/v1/jobs/{job}/traces", json={"step": 101})) == (409, "trace_not_possible")
    for path in ("traces/trace_1", "traces/trace_1/perfetto"):
        assert problem_of(service.http.get(f"/v1/jobs/{job}/{path}")) == (404, "trace_not_found")
    service.http.post(f"/v1/jobs/{job}/traces", json={})
    assert problem_of(service.http.get(f"/v1/jobs/{job}/traces/trace_1/perfetto")) == (404, "trace_not_found")
    assert problem_of(service.http.get(f"/v1/jobs/{job}/traces/1")) == (422, "invalid_parameter")


def test_budget_is_made_from_a_trace_phases_or_the_ledger(service, job):
    address = f"/v1/jobs/{job}/budget"
    assert problem_of(service.http.get(address)) == (409, "nothing_measured")
    row = {"step_seconds": 1.0, "mfu_full": 0.25, "mfu_causal": 0.2, "seconds": {"wall": 1.0, "data_wait": 0.1}}
    rows = [{"step": step, "time": time.time(), **row} for step in range(1, 10)]
    service.store.write(lambda s: metrics.record(s, job, 1, 0, 1, rows))
    known = service.http.get(address).json()
    assert (known["measured_from"], known["step_seconds"]) == ("phases", pytest.approx(1.0))
    assert not known["divided"] and "no parts measured; run manta trace" in manta(service, "budget", job).output
    parts = {part["name"]: part["seconds"] for part in known["parts"]}
    assert (parts["arithmetic"], parts["loader"]) == (pytest.approx(0.2), pytest.approx(0.1))
    measured = {f"{name}_seconds": 0.1 for name in MEASURED}
    service.store.write(lambda s: metrics.record(s, job, 1, 0, 2, [{"step": 10, **row, **measured}]))
    known = service.http.get(address).json()
    parts = {part["name"]: part["seconds"] for part in known["parts"]}
    assert (parts["loader"], parts["bubble"], parts["optimizer"]) == pytest.approx((0.1, 0.1, 0.1))
    assert known["divided"] and known["planned"][0]["label"] == "ideal compute"
    assert len(known["planned"]) == len(known["parts"])
    assert problem_of(service.http.get(address, params={"from": "trace"})) == (409, "nothing_measured")
    service.http.post(f"/v1/jobs/{job}/traces", json={})
    record(service, job)
    assert service.http.get(address).json()["measured_from"] == "trace_1"
    assert service.http.get(address, params={"from": "phases"}).json()["measured_from"] == "phases"
    assert service.http.get(address, params={"from": "dreams"}).status_code == 422


def test_every_part_of_a_step_may_be_in_an_answer():
    assert get_args(BudgetPart.model_fields["name"].annotation) == PARTS


def test_a_budget_without_parts_has_the_waits_of_the_newest_generation(service, job):
    for generation, steps, waits in (
        (1, range(1, 5), {"data_wait": 0.4, "snapshot_stall": 0.1, "checkpoint_stall": 0.2}),
        (2, range(5, 9), {"data_wait": 0.05, "snapshot_stall": 0.02, "checkpoint_stall": 0.01}),
        (3, (), {}),
    ):
        if generation > 1:
            service.store.write(lambda s: generations.begin(s, job, "test", True))
        row = {"time": time.time(), "step_seconds": 1.0, "seconds": {"wall": 1.0, **waits}}
        rows = [{"step": step, **row} for step in steps]
        service.store.write(lambda s, number=generation, rows=rows: metrics.record(s, job, number, 0, 1, rows))
    known = service.http.get(f"/v1/jobs/{job}/budget").json()
    parts = {part["name"]: part["seconds"] for part in known["parts"]}
    assert (parts["loader"], parts["snapshot"]) == pytest.approx((0.05, 0.03))


def test_job_on_cpu_is_planned_for_slots_on_a_gpu_cluster(service, job, monkeypatch):
    node = {"id": "n1", "alive": True, "accelerator": "gpu", "total": 8, "gpu_type": "H100", "slots_total": 4}
    monkeypatch.setattr(service.control, "cluster", lambda: {"nodes": [node]})
    clusters = planner_cluster(service.control)
    for accelerator, count, has_gpus in (("cpu", 4, False), ("gpu", 8, True)):
        cluster = clusters(parse_job_spec({**DOCUMENT, "resources": {"accelerator": accelerator}}))
        assert (cluster.gpus_per_node, cluster.machine.has_gpus) == (count, has_gpus)


def test_a_budget_is_of_the_newest_whole_trace_in_the_layout_that_the_job_runs_in(service, job):
    slower = timeline_of("1f1b", 2, 1, 4, PassTimes(2.0, 2.0, 2.0))
    for number, of, timeline in ((1, (0, 1), TIMELINE), (2, (0, 1), slower), (3, (0,), TIMELINE)):
        service.http.post(f"/v1/jobs/{job}/traces", json={})
        record(service, job, number, of, timeline)

    def measured():
        answer = service.http.get(f"/v1/jobs/{job}/budget", params={"from": "trace"}).json()
        return answer.get("measured_from"), answer.get("step_seconds")

    assert measured() == ("trace_2", pytest.approx(slower.makespan, rel=0.1))
    service.store.write(lambda s: jobs.set_layout(s, job, ParallelConfig(pipeline=2, data=2)))
    assert measured() == (None, None)


def manta(service, *command):
    return CliRunner().invoke(command_line(), [*command, "--url", service.url])


def before_following(monkeypatch, act):
    """`act` happens before a client follows the events of its job."""
    follow = Client.follow_events
    monkeypatch.setattr(Client, "follow_events", lambda self, job_id: (act(), follow(self, job_id))[1])


def test_trace_commands_list_traces_and_print_budgets(service, job, monkeypatch):
    assert "no traces" in manta(service, "traces", job).output
    service.http.post(f"/v1/jobs/{job}/traces", json={})
    record(service, job)
    assert "trace_1  complete  7" in manta(service, "traces", job).output
    shown = manta(service, "budget", job)
    assert shown.exit_code == 0
    assert "from trace_1" in shown.output and "bubble" in shown.output and "zero-bubble" in shown.output


@pytest.mark.parametrize("ending", ["json", "pftrace"])
def test_trace_command_waits_for_its_trace_and_writes_it_as_json_or_perfetto(
    service, job, tmp_path, monkeypatch, ending
):
    before_following(monkeypatch, lambda: record(service, job))
    file = tmp_path / f"trace.{ending}"
    done = manta(service, "trace", job, "--output", str(file))
    assert done.exit_code == 0, done.output
    assert "trace_1 is complete: step 7 of 2 ranks" in done.output and "bubble 20.0%" in done.output
    if ending == "json":
        assert json.loads(file.read_text())["id"] == "trace_1"
    else:
        assert len(read_trace(file.read_bytes())) == 3


def test_trace_command_says_why_there_is_no_trace(service, job, tmp_path, monkeypatch):
    wrong = manta(service, "trace", job, "--output", str(tmp_path / "trace.svg"))
    assert wrong.exit_code == 2 and "must end in .json or .pftrace" in wrong.output
    assert manta(service, "traces", job).output.startswith("no traces")
    before_following(monkeypatch, lambda: service.move(job, "SUCCEEDED"))
    failed = manta(service, "trace", job)
    assert failed.exit_code == 1
    assert "trace_1 has failed: it did not begin: the job is SUCCEEDED" in failed.output


def test_trace_command_interrupted_while_waiting_says_that_recording_continues(service, job, monkeypatch):
    service.http.post(f"/v1/jobs/{job}/traces", json={})
    record(service, job)
    follow = Client.follow_events

    def interrupted(self, job_id):
        for event in follow(self, job_id):
            yield event
            if event.type == "trace_complete":  # that of the first one
                raise KeyboardInterrupt

    monkeypatch.setattr(Client, "follow_events", interrupted)
    left = manta(service, "trace", job)
    assert left.exit_code == 130
    assert f"trace_2 of {job} is still being recorded; `manta traces {job}` shows it" in left.output


def test_trace_command_writes_profiles_beside_the_trace(service, job, tmp_path, monkeypatch):
    assert "--profile-rank needs --output" in manta(service, "trace", job, "--profile-rank", "1").output

    def record_with_a_profile():
        service.store.write(lambda s: step_traces.record_profiled(s, job, 1, 1, STEP, 1, b"zipped"))
        record(service, job)

    before_following(monkeypatch, record_with_a_profile)
    done = manta(service, "trace", job, "--output", str(tmp_path / "trace.json"), "--profile-rank", "1")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "trace.rank-1.json.gz").read_bytes() == b"zipped"
