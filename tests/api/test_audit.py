"""Who changed what, when, from where, and whether they were let; and no secret anywhere."""

import logging
import time
from datetime import datetime
from unittest.mock import Mock

import httpx
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError

from manta.api.security import auditing
from manta.service.store import audit
from manta.service.store.tables import Base
from tests.api.conftest import DOCUMENT, FakeControl, serving
from tests.api.support.keys import ADMIN, add_admin, add_key, bearer


def listed(service, **filters):
    return service.http.get("/v1/audit", params=filters).json()["items"]


def test_audit_records_who_changed_what_when_and_from_where(service):
    service.http.headers.update(bearer(add_key(service.store, "submit", "theirs", user="ada", name="laptop")))
    job = service.submit()["id"]
    service.http.post(f"/v1/jobs/{job}/cancel")
    service.http.post(f"/v1/jobs/{job}/pause")
    service.http.post("/v1/keys", json={"name": "a", "scope": "admin"})
    service.http.headers.update(bearer(ADMIN))
    entries = listed(service)
    deeds = [(entry["operation"], entry["target"], entry["status"], entry["code"]) for entry in reversed(entries)]
    assert deeds == [
        ("submit_job", job, 201, None),
        ("cancel_job", job, 202, None),
        ("pause_job", job, 409, "illegal_transition"),
        ("create_key", None, 403, "forbidden"),
    ]
    for entry in entries:
        who = {name: entry[name] for name in ("key_name", "user", "project", "address")}
        assert who == {"key_name": "laptop", "user": "ada", "project": "theirs", "address": "127.0.0.1"}
        assert entry["key"].startswith("key_")
        assert abs(time.time() - unix_seconds(entry["time"])) < 60


def unix_seconds(moment):
    """A moment of an answer in Unix seconds."""
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def test_audit_omits_requests_that_change_nothing(service):
    headers = {"Idempotency-Key": "k"}
    for _ in range(2):
        service.http.post("/v1/jobs", json=DOCUMENT, headers=headers)
    service.http.post("/v1/jobs?dry_run=true", json=DOCUMENT)
    service.http.get("/v1/jobs")
    assert [entry["operation"] for entry in listed(service)] == ["submit_job"]


def test_audit_truncates_the_path_of_an_unmatched_request(service):
    service.http.post(f"/v1/{'x' * 500}")
    (entry,) = listed(service)
    assert (entry["operation"], entry["status"]) == ("unmatched", 404)
    room = Base.metadata.tables["audit"].c.target.type.length
    assert entry["target"].startswith("/v1/xxx") and len(entry["target"]) == room


def test_audit_records_requests_refused_by_the_guard(service):
    service.http.post("/v1/jobs", content="x", headers={"Content-Type": "text/plain"})
    service.http.post("/v1/jobs/job_000000000000/cancel", headers={"Origin": "https://evil.example"})
    refusals = [(entry["operation"], entry["target"], entry["code"]) for entry in listed(service)]
    assert refusals == [
        ("unmatched", "/v1/jobs/job_000000000000/cancel", "cross_site"),
        ("unmatched", "/v1/jobs", "unsupported_media_type"),
    ]


def test_audit_is_paged_and_filtered_and_bound_to_the_project(service):
    jobs = [service.submit()["id"] for _ in range(3)]
    page = service.http.get("/v1/audit?limit=2").json()
    assert [entry["target"] for entry in page["items"]] == jobs[:0:-1]
    rest = service.http.get("/v1/audit", params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert ([entry["target"] for entry in rest["items"]], rest["next_cursor"]) == (jobs[:1], None)
    assert [entry["target"] for entry in listed(service, target=jobs[1])] == [jobs[1]]
    assert len(listed(service, key=page["items"][0]["key"])) == 3
    assert listed(service, key="key_000000000000") == []
    service.http.headers.update(bearer(add_key(service.store, "admin", "theirs")))
    assert listed(service) == []


def test_service_that_fails_notes_that_too(service, monkeypatch):
    job = service.submit()["id"]
    monkeypatch.setattr(service.control, "tell", Mock(side_effect=RuntimeError("broken")))
    assert service.http.post(f"/v1/jobs/{job}/cancel", headers={"Connection": "close"}).status_code == 500
    entry = listed(service)[0]
    assert (entry["operation"], entry["status"], entry["code"]) == ("cancel_job", 500, "internal_error")


def full(session, who, record):
    raise OperationalError("INSERT", {}, Exception("database or disk is full"))


def test_failed_audit_write_is_logged_and_keeps_the_answer(service, monkeypatch, caplog):
    job = service.submit()["id"]
    monkeypatch.setattr(audit, "append", full)
    with caplog.at_level(logging.ERROR, logger=auditing.__name__):
        assert service.http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    assert job in caplog.text and "could not be stored" in caplog.text


def test_job_is_stored_with_its_line_of_the_audit_or_not_at_all(service, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(audit, "append", full)
        assert service.http.post("/v1/jobs", json=DOCUMENT).status_code == 503
    assert service.http.get("/v1/jobs").json()["items"] == []
    job = service.submit()["id"]
    assert [(entry["operation"], entry["target"], entry["status"]) for entry in listed(service, target=job)] == [
        ("submit_job", job, 201)
    ]


def test_secrets_of_keys_and_links_appear_in_no_database_log_or_answer(tmp_path, store, caplog):
    """Of all that is written or said while keys and links are made, used, refused and revoked."""
    add_admin(store)
    control = FakeControl(store, tmp_path)
    caplog.set_level(logging.DEBUG)
    for client in ("httpx", "httpcore"):  # the test's own, which knows them
        caplog.set_level(logging.WARNING, client)
    said = []
    with serving(control) as url, httpx.Client(base_url=url, timeout=20) as http:

        def ask(method, path, key=ADMIN, **more):
            answer = http.request(method, path, headers={**bearer(key), "Connection": "close"}, **more)
            said.append(answer.text)
            return answer

        key = ask("POST", "/v1/keys", json={"name": "a", "scope": "submit"}).json()["key"]
        link = ask("POST", "/v1/links", key).json()["path"]
        said.clear()  # those two answers are the only ones
        opened = http.get(link)
        secrets = [ADMIN, key, link.removeprefix("/link/"), opened.headers["Set-Cookie"].split("=")[1].split(";")[0]]
        http.cookies.clear()
        said += [opened.text, http.post(link, headers=bearer(key)).text.replace(link, "")]
        ask("POST", "/v1/jobs", key, json=DOCUMENT)
        ask("POST", "/v1/jobs", key, json={"name": 5})
        ask("POST", "/v1/keys", key, json={"name": "b", "scope": "read"})
        broken = pytest.MonkeyPatch()
        broken.setattr(control, "cluster", lambda: 1 / 0)
        ask("GET", "/v1/cluster", key)
        broken.undo()
        ids = [each["id"] for each in ask("GET", "/v1/keys").json()["items"]]
        for path in ("/v1/audit", "/v1/events", "/v1/jobs", "/metrics", "/openapi.json"):
            ask("GET", path)
        ask("DELETE", f"/v1/keys/{ids[0]}")
        ask("GET", "/v1/jobs", key)
    store.write(lambda session: session.execute(text("SELECT 1")))
    rows = store.query(lambda session: [session.execute(select(table)).all() for table in Base.metadata.sorted_tables])
    store.close()
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    written = files + repr(rows).encode()
    assert b"submit_job" in written, "this is the database"
    for secret in secrets:
        assert len(secret) > 40
        assert secret.encode() not in written
        assert secret not in caplog.text
        assert not any(secret in answer for answer in said)
