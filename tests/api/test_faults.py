"""Faults over HTTP: refused unless they are allowed, checked before they reach a job."""

from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from manta.api.cli.main import app
from manta.api.client import Client
from manta.service.control.faults import FaultNotConfirmed
from manta.workers.protocol.json_codec import to_json


@pytest.fixture
def address(service):
    """Where the faults of a running job are made."""
    return f"/v1/jobs/{service.submit()['id']}/faults"


def test_fault_injection_is_refused_unless_the_service_allows_faults(service, address):
    response = service.http.post(address, json={"kind": "kill", "rank": 0})
    assert (response.status_code, response.json()["code"]) == (403, "faults_not_allowed")
    assert "--allow-faults" in response.json()["detail"]
    assert service.control.faults == []


def test_fault_reaches_the_control_plane_with_all_its_fields(service, address):
    service.control.allow_faults = True
    wanted = {"kind": "hang", "rank": 3, "at_step": 7, "phase": "reduction", "hold_gil": True}
    response = service.http.post(address, json=wanted)
    assert response.status_code == 202
    (fault,) = service.control.faults
    assert to_json(fault) == {**wanted, "id": response.json()["id"], "seconds": 0.0, "delay": 0.0}
    assert "hang of rank 3 in step 7 (reduction)" in response.json()["message"]


INVALID, IMPOSSIBLE = (422, "invalid_parameter"), (409, "fault_not_possible")


@pytest.mark.parametrize(("wrong", "refused", "said"), [
    ({"kind": "eat"}, INVALID, "kill"), ({"rank": -1}, INVALID, "at least"), ({"phase": "lunch"}, INVALID, "data"),
    ({"step": 3}, INVALID, "step"), ({"seconds": 2.0}, INVALID, "slow and partition only"),
    ({"kind": "slow"}, INVALID, "slow needs seconds"), ({"kind": "stop", "hold_gil": True}, INVALID, "hang only"),
    ({"rank": 4}, IMPOSSIBLE, "0 to 3"), ({"at_step": 11}, IMPOSSIBLE, "2 of 10 steps"),
])  # fmt: skip
def test_fault_that_is_invalid_or_can_never_strike_is_refused_with_a_reason(service, address, wrong, refused, said):
    service.control.allow_faults = True
    response = service.http.post(address, json={"kind": "kill", "rank": 0, **wrong})
    assert (response.status_code, response.json()["code"]) == refused
    assert said in response.json()["detail"]
    assert service.control.faults == []


def test_fault_that_was_sent_and_not_confirmed_is_accepted_and_says_so(service, address, monkeypatch):
    service.control.allow_faults = True
    assert service.http.post(address, json={"kind": "kill", "rank": 1}).json()["confirmed"] is True
    monkeypatch.setattr(service.control, "tell", Mock(side_effect=FaultNotConfirmed(1)))
    response = service.http.post(address, json={"kind": "kill", "rank": 1})
    assert (response.status_code, response.json()["confirmed"]) == (202, False)
    assert "kill of rank 1" in response.json()["message"] and "not confirmed it yet" in response.json()["message"]


def test_faults_of_a_job_that_is_not_there(service):
    response = service.http.post("/v1/jobs/job_000000000000/faults", json={"kind": "kill", "rank": 0})
    assert (response.status_code, response.json()["code"]) == (404, "job_not_found")


def test_the_client_and_the_command_make_faults(service):
    service.control.allow_faults = True
    job = service.submit()["id"]
    with Client(service.url) as client:
        client.inject(job, "slow", 1, 5, seconds=0.5)
    environment = {"MANTA_URL": service.url}
    command = ["inject", job, "--fault", "kill", "--rank", "2", "--phase", "recovery"]
    done = CliRunner().invoke(app, command, env=environment)
    assert (done.exit_code, "kill of rank 2 at recovery" in done.output) == (0, True), done.output
    assert [(f.kind, f.rank, f.at_step, f.phase, f.seconds) for f in service.control.faults] == [
        ("slow", 1, 5, "data", 0.5),
        ("kill", 2, 0, "recovery", 0.0),
    ]
    done = CliRunner().invoke(app, ["inject", job, "--fault", "eat", "--rank", "2"], env=environment)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
