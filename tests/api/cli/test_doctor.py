"""`manta doctor`: a line for each thing, advice under what is wrong, an exit code for programs."""

import json

import pytest
from typer.testing import CliRunner

from manta.api.cli import doctor as command
from manta.api.cli.main import app
from manta.service.doctor import Finding
from tests.api.support.keys import add_key


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    """Runs the command on made-up findings, in a home without a service or with MANTA_URL."""

    def run(*arguments, seen=(), code=0, **environment):
        monkeypatch.setattr(command, "checks", lambda settings, job: {"all": lambda: seen})
        settings = {"MANTA_HOME": str(tmp_path / "home"), **environment}
        result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env=settings)
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_doctor_prints_a_line_per_finding_with_advice(doctor, tmp_path):
    seen = [Finding("disk", "ok", "room"), Finding("limits", "warning", "few", "raise them")]
    assert doctor(seen=seen).splitlines() == [
        "ok    disk: room",
        "WARN  limits: few",
        "      -> raise them",
        f"-     service: no service is running with home {tmp_path}/home",
        "0 problems, 1 warning",
    ]


def test_doctor_exits_with_1_if_there_is_a_problem(doctor):
    output = doctor(seen=[Finding("torch", "problem", "no", "install it")], code=1)
    assert "FAIL  torch: no" in output and output.endswith("1 problem, 0 warnings\n")


def test_doctor_prints_findings_and_counts_as_json(doctor):
    document = json.loads(doctor("--json", seen=[Finding("disk", "ok", "room")]))
    assert document["items"][0] == {"subject": "disk", "verdict": "ok", "message": "room", "advice": ""}
    assert document["counts"] == {"ok": 1, "warning": 0, "problem": 0, "skipped": 1}


def test_doctor_checks_the_service_and_its_nodes(doctor, service):
    output = doctor(MANTA_URL=service.url)
    assert f"ok    service: {service.url} responds and can run jobs" in output
    assert "nodes: " in output


def test_doctor_names_closed_ports_and_nodes_that_were_left_out(doctor, service):
    assert "ok    ports: 2 nodes reach each other, in 10 tries" in doctor(MANTA_URL=service.url)
    service.control.closed_ports = ["port 7 of node a cannot be reached from node b: open it"]
    service.control.left_out = ["Ray's head forgets: give it a Redis"]
    lines = doctor(MANTA_URL=service.url, code=1).splitlines()
    assert lines[-4:] == [
        "FAIL  ports: port 7 of node a cannot be reached from node b",
        "      -> open it",
        "WARN  cluster: Ray's head forgets: give it a Redis",
        "1 problem, 1 warning",
    ]


def test_doctor_with_a_read_key_skips_the_port_check(doctor, service):
    key = add_key(service.store, "read")
    assert "-     ports: whether the nodes reach each other was not checked" in doctor(
        MANTA_URL=service.url, MANTA_API_KEY=key
    )


def test_a_service_that_does_not_answer_is_a_problem(doctor):
    assert "FAIL  service: " in doctor(MANTA_URL="http://127.0.0.1:9", code=1)


def test_doctor_refuses_an_invalid_or_missing_job_file(doctor, tmp_path):
    (tmp_path / "job.yaml").write_text("model: 3")
    doctor(tmp_path / "job.yaml", code=2)
    assert "none.yaml: No such file or directory" in doctor(tmp_path / "none.yaml", code=2)
