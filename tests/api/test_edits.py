"""PATCH /v1/jobs/{id}: name and priority, and nobody's change is undone by somebody who did not know of it."""

import pytest

from manta.api.client import ApiError, Client
from manta.api.parameters import versions_in


def patch(service, job, body, **headers):
    return service.http.patch(
        f"/v1/jobs/{job['id']}", json=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def test_edit_changes_the_given_fields_and_keeps_the_rest(service, job):
    service.control.asked.clear()
    response = patch(service, job, {"priority": 5})
    assert response.status_code == 200
    changed = response.json()
    assert (changed["name"], changed["spec"]["priority"]) == ("small", 5)
    assert service.control.asked == [("submitted", job["id"])], "it may have another place in the queue"
    assert patch(service, job, {"name": "better"}).json()["name"] == "better"
    assert patch(service, job, {}).json()["spec"]["name"] == "better"


def test_edit_merges_labels_and_null_removes_one(service):
    job = service.submit(labels={"team": "vision", "run": "1"})
    assert patch(service, job, {"labels": {"run": None, "new": ""}}).json()["labels"] == {"team": "vision", "new": ""}
    again = patch(service, job, {"labels": {}}).json()
    assert again["spec"]["labels"] == again["labels"] == {"team": "vision", "new": ""}
    event = service.http.get(f"/v1/jobs/{job['id']}/events").json()["items"][-1]
    assert (event["type"], event["data"]["labels"]["to"]) == ("edited", {"team": "vision", "new": ""})


def test_edit_beyond_64_labels_is_refused_and_changes_nothing(service):
    job = service.submit(labels={f"a{number}": "" for number in range(60)})
    refused = patch(service, job, {"name": "other", "labels": {f"b{number}": "" for number in range(5)}})
    assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "labels")
    assert "would have 65 labels, and may have 64" in refused.json()["detail"]
    assert service.http.get(f"/v1/jobs/{job['id']}").json()["etag"] == job["etag"]


@pytest.mark.parametrize("states", [("STARTING", "RUNNING"), ("CANCELLED",)])
def test_job_in_any_state_can_be_renamed(service, job, states):
    service.move(job["id"], *states)
    assert patch(service, job, {"name": "better"}).json()["name"] == "better"


def test_edit_accepts_merge_patch_content(service, job):
    response = service.http.patch(
        f"/v1/jobs/{job['id']}",
        content=b'{"priority": 1}',
        headers={"Content-Type": "application/merge-patch+json"},
    )
    assert response.json()["spec"]["priority"] == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"priority": "5"}, "priority"), ({"priority": 1001}, "priority"), ({"priority": None}, "priority"),
        ({"name": ""}, "name"), ({"name": "a/b"}, "name"), ({"name": None}, "name"), ({"steps": 5}, "steps"),
        ({"labels": {"a": 5}}, "labels.a"), ({"labels": {"-a": "b"}}, "labels.-a"),
        ({"labels": {"a": "b c"}}, "labels.a"), ({"labels": None}, "labels"), ([], ""),
    ],
)  # fmt: skip
def test_invalid_edit_names_the_field(service, body, field):
    response = patch(service, service.submit(), body)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_parameter")
    assert [error["path"] for error in response.json()["errors"]] == [field]


def test_edit_of_an_unknown_job_is_not_found(service):
    response = patch(service, {"id": "job_000000000000"}, {"priority": 1})
    assert (response.status_code, response.json()["code"]) == (404, "job_not_found")


def test_etag_of_a_job_changes_only_with_its_editable_fields(service, job):
    path = f"/v1/jobs/{job['id']}"
    etag = service.http.get(path).headers["ETag"]
    assert etag == job["etag"] == service.http.get("/v1/jobs").json()["items"][0]["etag"]
    service.move(job["id"], "STARTING")
    assert service.http.get(path).headers["ETag"] == etag, "the job went on, and nobody changed it"
    changed = patch(service, job, {"priority": 1})
    assert changed.headers["ETag"] == changed.json()["etag"] == service.http.get(path).headers["ETag"] != etag


def test_edit_with_a_stale_etag_is_refused(service, job):
    assert patch(service, job, {"priority": 1}, If_Match=job["etag"]).status_code == 200
    refused = patch(service, job, {"priority": 2}, If_Match=job["etag"])
    assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
    assert "read it again" in refused.json()["detail"]
    assert patch(service, job, {"priority": 2}, If_Match="*").status_code == 200
    newest = service.http.get(f"/v1/jobs/{job['id']}").headers["ETag"]
    assert patch(service, job, {"priority": 3}, If_Match=f'"other", {newest}').json()["spec"]["priority"] == 3


@pytest.mark.parametrize(
    ("header", "versions"),
    [(None, None), ("*", None), ('"a"', {"a"}), ('"a" , "b"', {"a", "b"}), ('W/"a"', set()), ("a", set()), ("", set())],
)
def test_if_match_header_is_parsed_into_etags(header, versions):
    assert versions_in(header) == versions


def test_client_changes_a_job(service, job):
    with Client(service.url) as client:
        changed = client.edit(job["id"], name="better", priority=2, etag=client.job(job["id"]).etag)
        assert (changed.name, changed.spec["priority"]) == ("better", 2)
        with pytest.raises(ApiError) as refused:
            client.edit(job["id"], priority=3, etag=job["etag"])
        assert refused.value.problem.status == 412
