"""DELETE /v1/jobs/{id}: only what is over, all that it has, and an answer that says what that was."""

from unittest.mock import Mock

import pytest

from manta.api.client import ApiError, Client
from manta.service.cluster.errors import ClusterUnavailable
from manta.service.logs.pages import log_file, log_folder
from tests.api.support.problems import problem_of


@pytest.fixture
def job(service):
    """A job that is over."""
    made = service.submit()
    folder = log_folder(service.control.home, made["id"])
    folder.mkdir(parents=True)
    log_file(folder, 0).write_text("{}\n")
    service.move(made["id"], "STARTING", "RUNNING")
    service.report(made["id"], [{"step": 1, "loss": 1.0}])
    service.move(made["id"], "FAILED")
    return made


def test_deleted_job_is_gone_and_the_answer_counts_what_was_removed(service, job):
    other = service.submit()
    response = service.http.delete(f"/v1/jobs/{job['id']}")
    assert response.status_code == 200
    answer = response.json()
    assert (answer["id"], answer["checkpoints"], answer["logs"], answer["bytes"]) == (job["id"], 0, 1, 3)
    assert (answer["rows"]["jobs"], answer["rows"]["metrics"], answer["rows"]["generations"]) == (1, 1, 1)
    assert ("release_job", job["id"]) in service.control.asked
    assert service.http.get(f"/v1/jobs/{job['id']}").status_code == 404
    assert service.http.delete(f"/v1/jobs/{job['id']}").json()["code"] == "job_not_found"
    assert [each["id"] for each in service.http.get("/v1/jobs").json()["items"]] == [other["id"]]


def test_idempotency_key_of_a_deleted_job_creates_a_new_job(service, document):
    submit = lambda: service.http.post("/v1/jobs", json=document, headers={"Idempotency-Key": "k"})  # noqa: E731
    first = submit().json()["id"]
    service.move(first, "CANCELLED")
    assert (submit().status_code, submit().json()["id"]) == (200, first)
    assert service.http.delete(f"/v1/jobs/{first}").status_code == 200
    again = submit()
    assert again.status_code == 201 and again.json()["id"] != first


@pytest.mark.parametrize("states", [(), ("STARTING",), ("STARTING", "RUNNING", "CANCELLING")])
def test_deletion_of_an_unfinished_job_is_refused_with_advice_to_cancel(service, states):
    job = service.submit()
    service.move(job["id"], *states)
    response = service.http.delete(f"/v1/jobs/{job['id']}")
    assert (response.status_code, response.json()["code"]) == (409, "job_not_final")
    assert f"manta cancel {job['id']}" in response.json()["detail"]
    assert ("release_job", job["id"]) not in service.control.asked


def test_deletion_that_cannot_remove_files_names_them_and_marks_the_job_as_begun(service, job):
    folder = log_folder(service.control.home, job["id"]).parent
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")
    response = service.http.delete(f"/v1/jobs/{job['id']}")
    assert (response.status_code, response.json()["code"]) == (409, "files_not_removed")
    assert str(folder) in response.json()["detail"]
    assert service.http.get(f"/v1/jobs/{job['id']}").json()["deletion_began_at"] is not None
    assert problem_of(service.http.post(f"/v1/jobs/{job['id']}/retry")) == (409, "job_being_deleted")
    folder.unlink()
    assert service.http.delete(f"/v1/jobs/{job['id']}").status_code == 200


def test_cluster_that_does_not_answer_keeps_the_job(service, job, monkeypatch):
    monkeypatch.setattr(service.control, "delete", Mock(side_effect=ClusterUnavailable(TimeoutError("no answer"))))
    assert problem_of(service.http.delete(f"/v1/jobs/{job['id']}")) == (503, "cluster_unavailable")
    monkeypatch.undo()
    assert service.http.delete(f"/v1/jobs/{job['id']}").status_code == 200


def test_client_deletes(service, job):
    with Client(service.url) as client:
        assert client.delete(job["id"]).rows["jobs"] == 1
        with pytest.raises(ApiError, match="no job"):
            client.delete(job["id"])
