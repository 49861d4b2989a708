"""Submitting, listing, reading and cancelling jobs over HTTP, by the contract's status codes."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from tokenizer_files import byte_level

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control.options import ModelPackages
from manta.service.store import jobs
from manta.workers.config import ParallelConfig
from manta.workers.data.roots import DataRoots

JOB_KEYS = {
    "id", "project", "name", "state", "reason", "message", "spec", "step", "steps", "eta_seconds", "parallel",
    "generation", "restarts", "metrics", "goodput", "queue", "created_at", "started_at", "finished_at",
    "memory_kept_until", "deletion_began_at", "etag", "labels", "owner", "running_seconds",
}  # fmt: skip
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def test_a_submitted_job_is_queued_stored_and_announced(service, job):
    assert set(job) == {*JOB_KEYS, "notes"}
    assert (job["state"], job["step"], job["steps"], job["generation"]) == ("QUEUED", 0, 10, 0)
    assert job["queue"] == {"position": 1, "waiting_for": None, "expected_start_seconds": None}
    assert job["metrics"]["latest"]["loss"] is None
    assert (job["goodput"], job["eta_seconds"], job["started_at"]) == (None, None, None)
    assert TIME.fullmatch(job["created_at"])
    assert job["parallel"]["world_size"] == 4
    assert job["parallel"]["sequence_parallel"] is True
    assert service.control.asked == [("submitted", job["id"])]
    assert service.http.get(f"/v1/jobs/{job['id']}").json()["id"] == job["id"]


def test_a_dry_run_shows_the_layout_and_stores_nothing(service, document):
    response = service.http.post("/v1/jobs?dry_run=true", json=document)
    assert response.status_code == 200
    answer = response.json()
    assert answer["spec"]["train"]["optimizer"]["beta2"] == 0.95
    assert (answer["layout"]["world_size"], answer["layout"]["micro_batches"]) == (4, 4)
    places = [(rank["rank"], rank["pipeline"], rank["tensor"]) for rank in answer["layout"]["ranks"]]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert answer["plan"]["parallel"]["tensor"] == 2 and answer["plan"]["step_seconds"] > 0
    assert "default efficiency" in answer["plan_note"]
    assert service.http.get("/v1/jobs").json()["items"] == []
    assert service.control.asked == []


def test_a_dry_run_whose_layout_has_no_plan_says_why(service, document):
    document["parallel"] = {"tensor": 2, "pipeline": 2, "data": 8}
    document["train"]["global_batch_size"] = 8
    answer = service.http.post("/v1/jobs?dry_run=true", json=document).json()
    assert answer["layout"]["world_size"] == 32
    assert answer["plan"] is None and "needs 32 slots" in answer["plan_note"]


def test_dry_run_of_a_gpu_job_on_a_cluster_without_gpus_explains_the_missing_plan(service, document):
    document["resources"] = {"accelerator": "gpu"}
    answer = service.http.post("/v1/jobs?dry_run=true", json=document).json()
    assert answer["plan"] is None
    assert answer["plan_note"].startswith("nothing is planned: the job needs GPUs, and this cluster has")


def test_dry_run_reports_missing_data(service, document, tmp_path, monkeypatch):
    def said():
        return service.http.post("/v1/jobs?dry_run=true", json=document).json()["data_problem"]

    assert said() is None
    file = tmp_path / "words.txt"
    document["data"] = {"source": "text", "paths": [str(file)]}
    assert said() == f"no such file or directory: {file}"
    file.write_text("words " * 100)
    assert said() is None
    silent = ClusterUnavailable(TimeoutError("no answer"))
    monkeypatch.setattr(service.control, "problem_of_data", Mock(side_effect=silent))
    assert said() is None, "what nobody says is not known"


def test_a_dry_run_of_a_huge_layout_does_not_list_its_ranks(service, document):
    document["parallel"] = {"data": 10**5}
    document["train"]["global_batch_size"] = 10**5
    layout = service.http.post("/v1/jobs?dry_run=true", json=document).json()["layout"]
    assert (layout["world_size"], layout["ranks"]) == (10**5, None)


def test_resubmission_with_the_same_key_and_body_returns_the_same_job(service, document):
    keyed = {"Idempotency-Key": "once"}
    first = service.http.post("/v1/jobs", json=document, headers=keyed)
    reordered = dict(reversed(document.items()))
    again = service.http.post("/v1/jobs", json=reordered, headers=keyed)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    assert len(service.control.asked) == 1
    conflict = service.http.post("/v1/jobs", json={**document, "name": "other"}, headers=keyed)
    assert (conflict.status_code, conflict.json()["code"]) == (409, "idempotency_conflict")


def test_resubmission_returns_the_same_job_after_the_cluster_has_changed(service, document, monkeypatch):
    keyed, auto = {"Idempotency-Key": "once"}, {**document, "parallel": "auto"}
    first = service.http.post("/v1/jobs", json=auto, headers=keyed)
    monkeypatch.setattr(service.control, "cluster", lambda: {"nodes": [], "totals": {}})
    assert service.http.post("/v1/jobs", json=auto).status_code == 422
    again = service.http.post("/v1/jobs", json=auto, headers=keyed)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    fresh = service.http.post("/v1/jobs?dry_run=true", json=document, headers=keyed)
    assert fresh.status_code == 200 and "layout" in fresh.json(), "a dry run makes no job, and is none"


def test_concurrent_requests_with_one_key_make_one_job(service, document):
    def post(_):
        return service.http.post("/v1/jobs", json=document, headers={"Idempotency-Key": "race"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1


def test_pages_are_newest_first(service):
    ids = [service.submit(name=f"job {n}")["id"] for n in range(5)]
    seen, cursor = [], None
    while True:
        page = service.http.get("/v1/jobs", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        seen += [job["id"] for job in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ids[::-1]
    named = service.http.get("/v1/jobs", params={"name": "job 3"}).json()["items"]
    assert [job["id"] for job in named] == [ids[3]]


@pytest.mark.parametrize("state", ["QUEUED", "RESIZING", "PAUSING", "PAUSED", "SUCCEEDED"])
def test_job_list_can_be_filtered_by_every_documented_state(service, state):
    service.submit()
    response = service.http.get("/v1/jobs", params={"state": state})
    assert response.status_code == 200
    assert len(response.json()["items"]) == (1 if state == "QUEUED" else 0)


RUNNING = ("STARTING", "RUNNING")
PAUSING = (*RUNNING, "PAUSING")


@pytest.mark.parametrize(("states", "action", "state", "announced"), [
    ((), "cancel", "CANCELLED", "cancel"),
    (RUNNING, "cancel", "CANCELLING", "cancel"),
    ((*RUNNING, "CANCELLING"), "cancel", "CANCELLING", "cancel"),
    (("PAUSED",), "cancel", "CANCELLED", "cancel"),
    (RUNNING, "pause", "PAUSING", "pause"),
    (PAUSING, "pause", "PAUSING", "pause"),
    ((*PAUSING, "PAUSED"), "pause", "PAUSED", "pause"),
    ((*PAUSING, "PAUSED"), "resume", "QUEUED", "submitted"),
    (("STARTING", "FAILED"), "retry", "QUEUED", "submitted"),
])  # fmt: skip
def test_action_changes_the_state_of_a_job_and_is_announced(service, states, action, state, announced):
    job = service.submit()["id"]
    service.move(job, *states)
    service.control.asked.clear()
    response = service.http.post(f"/v1/jobs/{job}/{action}")
    assert (response.status_code, response.json()["state"]) == (202, state)
    assert service.control.asked == [(announced, job)], "nobody else would look at the queue"
    assert service.http.get("/v1/jobs", params={"state": state}).json()["items"][0]["id"] == job
    finished_at = response.json()["finished_at"]
    assert TIME.fullmatch(finished_at) if state == "CANCELLED" else finished_at is None


@pytest.mark.parametrize(("states", "action", "why"), [
    (("STARTING", "SUCCEEDED"), "cancel", "SUCCEEDED"),
    (("CANCELLED",), "pause", "CANCELLED"),
    (("CANCELLED",), "resume", "CANCELLED"),
    (PAUSING, "resume", "only while it is PAUSED: wait until it is PAUSED, then resume it"),
    *((states, "retry", "retry works only while it is FAILED")
      for states in ((), RUNNING, ("STARTING", "SUCCEEDED"), ("CANCELLED",))),
])  # fmt: skip
def test_action_in_the_wrong_state_is_a_conflict_that_says_why(service, states, action, why):
    job = service.submit()["id"]
    service.move(job, *states)
    asked = list(service.control.asked)
    response = service.http.post(f"/v1/jobs/{job}/{action}")
    assert (response.status_code, response.json()["code"]) == (409, "illegal_transition")
    assert why in response.json()["detail"] and service.control.asked == asked


def test_a_paused_job_is_not_deleted(service, job):
    service.http.post(f"/v1/jobs/{job['id']}/pause")
    assert service.http.delete(f"/v1/jobs/{job['id']}").json()["code"] == "job_not_final"


def test_a_running_job_shows_its_numbers(service, job):
    service.move(job["id"], "STARTING", "RUNNING")
    service.report(job["id"], [{"step": n, "loss": 3.0, "step_seconds": 0.5} for n in (1, 2, 3, 4)])
    shown = service.http.get(f"/v1/jobs/{job['id']}").json()
    assert (shown["step"], shown["eta_seconds"]) == (4, 3.0)
    assert 0 < shown["goodput"] <= 1
    assert shown["metrics"]["latest"]["loss"] == 3.0
    assert shown["queue"] == {"position": None, "waiting_for": None, "expected_start_seconds": None}


def test_non_finite_numbers_are_words_in_json(service, job):
    service.move(job["id"], "STARTING", "RUNNING")
    rows = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf"), "grad_norm": float("-inf")}]
    service.report(job["id"], rows)
    latest = service.http.get(f"/v1/jobs/{job['id']}").json()["metrics"]["latest"]
    assert (latest["loss"], latest["grad_norm"]) == ("inf", "-inf")
    series = service.http.get(f"/v1/jobs/{job['id']}/metrics").json()["series"]
    assert (series["loss"], series["grad_norm"]) == (["nan", "inf"], [None, "-inf"])


def test_queued_job_shows_what_it_waits_for(service, job):
    lacks = {"needed": 4, "available": 1}
    service.store.write(lambda session: jobs.set_waiting(session, job["id"], lacks, "insufficient_slots", "4 of 1"))
    shown = service.http.get(f"/v1/jobs/{job['id']}").json()
    assert (shown["reason"], shown["queue"]) == (
        "insufficient_slots",
        {"position": 1, "waiting_for": lacks, "expected_start_seconds": None},
    )


def test_resized_job_shows_the_layout_it_runs_in(service, job):
    layout = ParallelConfig.model_validate(job["spec"]["parallel"]).model_copy(update={"data": 3})
    service.store.write(lambda session: jobs.set_layout(session, job["id"], layout))
    shown = service.http.get(f"/v1/jobs/{job['id']}").json()
    assert (shown["parallel"]["data"], shown["parallel"]["world_size"]) == (3, layout.world_size)
    assert shown["spec"] == job["spec"], "which says what was submitted"


def test_resize_is_noted_and_announced(service, document):
    document["elastic"] = {"min_data": 1, "max_data": 3}
    job = service.http.post("/v1/jobs", json=document).json()
    answer = service.http.post(f"/v1/jobs/{job['id']}/resize", json={"data": 3})
    assert answer.status_code == 202
    assert answer.json()["parallel"] == job["parallel"], "it changes once there is room"
    assert service.control.asked[-1] == ("resize", job["id"])
    (event,) = [each for each in events_of(service, job["id"]) if each["type"] == "resize_requested"]
    assert event["data"] == {"data": 3}


def events_of(service, job_id):
    return service.http.get(f"/v1/jobs/{job_id}/events").json()["items"]


def test_invalid_resize_is_refused(service, job):
    def answer(body, job_id=job["id"]):
        response = service.http.post(f"/v1/jobs/{job_id}/resize", json=body)
        return response.status_code, response.json()["code"]

    assert answer({"data": 5}) == (422, "size_out_of_bounds")
    assert answer({"data": 0}) == (422, "invalid_parameter")
    assert answer({"data": "2"}) == (422, "invalid_parameter")
    assert answer({"dada": 2}) == (422, "invalid_parameter")
    assert answer({"data": 1}, "job_unknown") == (404, "job_not_found")
    service.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert answer({"data": 1}) == (409, "illegal_transition")


def test_custom_model_of_an_unlisted_package_is_refused(service, document):
    theirs = {**document["model"], "family": "custom", "entrypoint": "theirs:build"}
    answer = service.http.post("/v1/jobs", json={**document, "model": theirs})
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["path"]) == (422, "model.entrypoint")
    service.control.model_packages = ModelPackages(("theirs",))
    assert service.http.post("/v1/jobs", json={**document, "model": theirs}).status_code == 201


def test_submission_with_data_outside_the_data_roots_is_refused(service, document, tmp_path):
    service.control.data_roots = DataRoots((tmp_path / "data",))
    document = {**document, "data": {"source": "text", "paths": ["/etc/passwd"]}}
    for query in ("", "?dry_run=true"):
        answer = service.http.post(f"/v1/jobs{query}", json=document)
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["path"]) == (422, "data.paths.0")
        assert "is not below any of the folders that jobs may read" in error["rule"]
    assert service.control.asked == []


def test_tokenizer_vocabulary_is_read_at_submission_and_stored_in_the_spec(service, document, tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    data = {"source": "jsonl", "paths": [str(tmp_path / "a.jsonl")], "tokenizer": str(tmp_path / "tokenizer.json")}
    answer = service.http.post("/v1/jobs", json={**document, "data": data})
    assert answer.status_code == 201
    assert answer.json()["spec"]["data"]["tokenizer_vocabulary"] == 400
    small = {**document, "data": data, "model": {**document["model"], "vocabulary_size": 300}}
    (error,) = service.http.post("/v1/jobs?dry_run=true", json=small).json()["errors"]
    assert (error["path"], error["suggestion"]) == ("model.vocabulary_size", "400")


def test_a_tokenizer_that_is_a_pipe_or_of_40_gb_is_a_problem_of_its_key(service, document, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 40 * 2**30)
    for name, why in (("pipe", "a pipe, not a regular file"), ("large", "it has 42949672960 bytes or more")):
        data = {"source": "python-stdlib", "tokenizer": str(tmp_path / name)}
        answer = service.http.post("/v1/jobs?dry_run=true", json={**document, "data": data})
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["path"]) == (422, "data.tokenizer")
        assert f"no tokenizer can be read from {tmp_path / name} ({why}" in error["rule"]


def test_tokenizer_outside_the_data_roots_is_refused_unread(service, document, tmp_path):
    (tmp_path / "data").mkdir()
    byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "data" / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    service.control.data_roots = DataRoots((tmp_path / "data",))
    for name in ("tokenizer.json", "gone.json", "data/tokenizer.json", "data"):
        data = {"source": "python-stdlib", "tokenizer": str(tmp_path / name)}
        answer = service.http.post("/v1/jobs", json={**document, "data": data})
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["path"]) == (422, "data.tokenizer")
        assert "is not below any of the folders that jobs may read" in error["rule"]


def test_a_job_that_begins_with_weights_is_stored_with_their_whole_shape(service, document, tmp_path):
    config = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    document["model"] = {"from": str(tmp_path / "llama"), "sequence_length": 16}
    dry = service.http.post("/v1/jobs?dry_run=true", json=document).json()["spec"]["model"]
    assert (dry["from"], dry["family"], dry["layers"], dry["sequence_length"]) == (
        str(tmp_path / "llama"), "llama", 4, 16,
    )  # fmt: skip
    answer = service.http.post("/v1/jobs", json=document)
    assert answer.status_code == 201 and answer.json()["spec"]["model"] == dry
    written = service.http.get(f"/v1/jobs/{answer.json()['id']}/spec").json()["written"]
    assert written["model"] == document["model"], "only what the user wrote"

    document["model"]["layers"] = 5
    refused = service.http.post("/v1/jobs", json=document)
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert (error["path"], error["suggestion"]) == ("model.layers", "4")
    service.control.data_roots = DataRoots((tmp_path / "elsewhere",))
    (error,) = service.http.post("/v1/jobs", json=document).json()["errors"]
    assert error["path"] == "model.from" and "MANTA_DATA_ROOTS" in error["rule"]
    assert "llama: num_hidden" not in error["rule"], "nothing is told of what lies elsewhere"
