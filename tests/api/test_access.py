"""Who may do what: for every operation that the API describes. One that is not in the table here fails."""

import asyncio
import time
from datetime import datetime
from types import SimpleNamespace

import pytest
from fastapi import Request
from fastapi.testclient import TestClient
from sqlalchemy import text
from starlette.datastructures import URL

from manta.api.app import create_app
from manta.api.security import access
from manta.api.security.permissions import is_anonymous, shown
from manta.service.identity import Identity, Scope, digest_of, new_browser_token, new_key
from manta.service.logs.pages import log_file, log_folder
from manta.service.planner.hardware import Cluster, CpuNode
from manta.service.planner.job_plan import planned
from manta.service.store import checkpoints, events, exports, generations, jobs, keys, plans, step_traces
from manta.service.store.errors import JobNotFound
from manta.service.store.tables import Base
from manta.workers.checkpoint.catalog import checkpoint_path
from manta.workers.paths import Paths
from manta.workers.spec.reading import parse_job_spec
from manta.workers.timing.recording import Recording, TracedStep
from tests.api.conftest import DOCUMENT, FakeControl
from tests.api.support.described_api import description_at
from tests.api.support.keys import ADMIN, add_admin, add_key, add_keys, bearer
from tests.api.support.problems import problem_of
from tests.api.test_openapi import OPERATIONS

ANONYMOUS = {"get_health": 200, "get_readiness": 200, "open_link": 404}
"""What answers without a key, and how."""
NEEDS = {
    **dict.fromkeys(
        ("list_jobs", "count_jobs", "list_sparklines",
         "get_job", "get_job_spec", "get_metrics", "list_job_events", "list_events", "list_logs", "list_ranks",
         "get_rank_history", "get_expert_tokens", "get_waits", "get_rank_stack",
         "list_checkpoints", "list_exports", "get_export",
         "get_ledger", "get_job_plan",
         "get_job_plan_picture", "list_recoveries", "list_traces", "get_trace", "get_trace_for_perfetto",
         "get_profile", "get_budget", "get_cluster", "list_projects", "create_link", "get_me",
         "end_session", "get_prometheus_metrics", "make_plans", "list_machines"), ("read",),
    ),
    **dict.fromkeys(
        ("submit_job", "edit_job", "delete_job", "cancel_job", "pause_job", "resume_job", "retry_job", "resize_job",
         "delete_checkpoint", "export_checkpoint", "request_trace"),
        ("submit",),
    ),
    **dict.fromkeys(("inject_fault", "create_key", "list_keys", "revoke_key", "list_audit"), ("admin",)),
    **dict.fromkeys(("check_cluster", "drain_node", "undrain_node", "create_project"), ("admin", "installation")),
}  # fmt: skip
BODIES = {
    "export_checkpoint": {"to": "somewhere"}, "submit_job": DOCUMENT, "edit_job": {"priority": 7},
    "resize_job": {"data": 1}, "inject_fault": {"kind": "kill", "rank": 0}, "request_trace": {"steps": 1},
    "drain_node": {"deadline_seconds": 1}, "make_plans": {"model": DOCUMENT["model"], "cluster": {"current": True}},
    "create_project": {"name": "another"}, "create_key": {"name": "a key", "scope": "read"},
}  # fmt: skip
QUERIES = {"list_sparklines": "?jobs={job_id}"}
"""Parameters that an operation cannot do without."""
STATES = {
    "edit_job": ("STARTING",), "cancel_job": ("STARTING", "RUNNING"), "pause_job": ("STARTING", "RUNNING"),
    "resume_job": ("PAUSED",), "inject_fault": ("STARTING", "RUNNING"), "retry_job": ("STARTING", "FAILED"),
    "resize_job": ("STARTING", "RUNNING"), "delete_job": ("CANCELLED",),
}  # fmt: skip
"""In which the job is for an operation to work; else it runs."""
CHANGE_NOTHING = ("make_plans",)
"""Though their method says otherwise."""
MARK = "nobody else may see this"
UNKNOWN_JOB = "job_000000000000"


class Theirs:
    """A project with a job, and keys of another one."""

    def __init__(self, service, operation):
        self.service, self.operation = service, operation
        self.own = add_keys(service.store, "theirs")
        self.foreign = add_keys(service.store, "ours")
        service.control.allow_faults = True
        self.job = self._submit()
        self.checkpoint, self.export = self._save()
        service.move(self.job, *STATES.get(operation.id, ("STARTING", "RUNNING")))
        if operation.id in ("get_trace", "get_trace_for_perfetto", "get_profile", "get_budget"):
            self._trace()
        if operation.id == "get_job_plan_picture":
            self._plan()
        with service.store.read() as session:
            self.key = next(key.id for key in keys.page(session, "theirs").items if key.scope == "read")
        service.http.headers.pop("Authorization")

    def _trace(self):
        """The job has recorded a step."""
        recording = Recording((TracedStep(5, 0.0, 1.0),), ()).pack()
        for write in (
            lambda session: generations.begin(session, self.job, "test", False),
            lambda session: step_traces.request(session, self.job, 1),
            lambda session: step_traces.record_profiled(session, self.job, 1, 1, 5, 0, b"a profile"),
            *(
                lambda session, rank=rank: step_traces.record_recorded(session, self.job, 1, 1, 5, rank, recording)
                for rank in range(4)
            ),
        ):
            self.service.store.write(write)

    def _plan(self):
        """The job is planned."""
        spec = parse_job_spec(DOCUMENT)
        of_step = planned(spec, Cluster(CpuNode(4, 2.0**33).machine(4), 1, 4))
        kept = {"parallel": spec.layout.model_dump(mode="json"), "planned": of_step, "problem": None}
        self.service.store.write(lambda session: generations.begin(session, self.job, "test", False))
        self.service.store.write(lambda session: plans.store(session, self.job, 1, kept))

    def _submit(self):
        store = self.service.store
        spec = parse_job_spec({**DOCUMENT, "name": MARK})
        job = store.write(lambda session: jobs.create(session, spec, project="theirs"))[0].id
        store.write(lambda session: events.append(session, job, "told", MARK))
        folder = log_folder(self.service.control.home, job)
        folder.mkdir(parents=True)
        log_file(folder, 0).write_text(f'{{"time": 1, "rank": 0, "generation": 1, "text": "{MARK}"}}\n')
        return job

    def _save(self):
        """A checkpoint that nobody needs, and an export of another one; their ids."""
        folder = Paths.of(self.service.control.home).checkpoint_folder(self.job)

        def save(session):
            older, newer = (
                checkpoints.begin(session, self.job, 0, step, str(checkpoint_path(folder, step, 0))) for step in (5, 10)
            )
            for row in (older, newer):
                checkpoints.complete(session, row.id, 1)
            exported = exports.begin(session, self.job, newer.id, "/out", "hf", None)
            exports.end(session, exported.id, None)
            return older.id, exported.id

        return self.service.store.write(save)

    def ask(self, key=None, job=None, **headers):
        """The operation, about their job, key or node."""
        places = {
            "job_id": job or self.job, "rank": 0, "checkpoint_id": self.checkpoint, "export_id": self.export,
            "key_id": self.key, "node_id": "abcd", "token": "nothing", "trace_id": "trace_1",
        }  # fmt: skip
        shown = {} if key is None else bearer(key)
        path = self.operation.path.format(**places)
        path += QUERIES.get(self.operation.id, "").format(**places)
        return self.service.http.request(
            self.operation.method, path, json=BODIES.get(self.operation.id), headers={**shown, **headers}
        )

    def everything(self):
        """All that is stored, but for the audit."""
        with self.service.store.read() as session:
            rows = {
                table.name: session.execute(text(f"SELECT * FROM {table.name}")).all()
                for table in Base.metadata.sorted_tables
                if table.name not in ("audit", "alembic_version")
            }
        return rows, list(self.service.control.asked), list(self.service.control.faults)

    def audited(self):
        """Project, operation, target, status and code of each line of the audit."""
        with self.service.store.read() as session:
            columns = "project, operation, target, status, code"
            return [tuple(row) for row in session.execute(text(f"SELECT {columns} FROM audit ORDER BY id"))]


@pytest.fixture
def operations(service):
    return {operation.id: operation for operation in description_at(service.url).operations}


@pytest.fixture
def theirs(service, operations, operation_id):
    return Theirs(service, operations[operation_id])


def test_openapi_security_matches_the_scope_each_operation_needs(service):
    said = {each.id: each.document["security"] for each in description_at(service.url).operations}
    assert said == {
        **{name: [{"key": list(need)}, {"session": list(need)}] for name, need in NEEDS.items()},
        **{name: [] for name in ANONYMOUS},
    }


@pytest.mark.parametrize("operation_id", ["get_job"])
def test_no_operation_answers_without_a_valid_key(theirs, operations):
    store = theirs.service.store
    expired = add_key(store, "admin", "theirs", expires_at=time.time() - 1)
    revoked = add_key(store, "admin", "theirs")
    store.write(lambda s: keys.revoke(s, None, keys.by_digest(s, digest_of(revoked)).id))
    before = theirs.everything()
    shown = ({}, bearer(new_key()), bearer(expired), bearer(revoked), {"Authorization": f"Basic {theirs.own['admin']}"},
             {"Cookie": f"manta_session_default={theirs.own['admin']}"})  # fmt: skip
    for name in OPERATIONS:
        theirs.operation = operations[name]
        for headers in shown:
            answer = theirs.ask(**headers)
            if name in ANONYMOUS:
                assert answer.status_code == ANONYMOUS[name]
                continue
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), (name, headers)
            assert answer.headers["WWW-Authenticate"].startswith("Bearer"), name
        assert theirs.everything() == before, name
        assert theirs.audited() == [], name


@pytest.mark.parametrize("operation_id", ["get_job"])
def test_project_key_neither_sees_nor_changes_another_project(theirs, operations):
    # Those that read first: the audit of a project has what its keys have asked for.
    for name in sorted(OPERATIONS, key=lambda name: operations[name].method != "GET"):
        theirs.operation = operations[name]
        check_that_another_project_is_kept_out(theirs, name)


def check_that_another_project_is_kept_out(theirs, name):
    operation, before, audited = theirs.operation, theirs.everything(), len(theirs.audited())
    answer = theirs.ask(theirs.foreign["admin"])
    assert MARK not in answer.text, name
    assert theirs.job not in answer.text or answer.status_code == 404, f"{name}: only what was asked is said again"
    if "{job_id}" in operation.path:
        assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found"), name
        unknown = theirs.ask(theirs.foreign["admin"], UNKNOWN_JOB).text
        assert unknown == answer.text.replace(theirs.job, UNKNOWN_JOB), name
    elif "installation" in NEEDS.get(name, ()):
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), name
    elif name == "revoke_key":
        assert (answer.status_code, answer.json()["code"]) == (404, "key_not_found")
    else:
        assert answer.status_code == ANONYMOUS.get(name, answer.status_code) < 500, name
    if name in ("submit_job", "create_key"):
        assert answer.status_code == 201 and answer.json()["project"] == "ours", name
    elif name != "create_link":
        assert theirs.everything() == before, name
    if operation.method != "GET" and name not in CHANGE_NOTHING:
        new = [line[0] for line in theirs.audited()][audited:]
        assert new == ["ours"] * len(new) != [], name


@pytest.mark.parametrize("operation_id", OPERATIONS)
def test_key_scope_allows_its_operations_and_those_of_lower_scopes(theirs, operation_id):
    need = NEEDS.get(operation_id, ["read"])
    installation = "installation" in need
    for scope in Scope:
        if scope.covers(Scope(need[0])) and not installation:
            continue
        before = theirs.everything()
        answer = theirs.ask(theirs.own[scope])
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), scope
        wanted = f"scope {need[0]}{' for the whole installation' if installation else ''};"
        assert wanted in answer.json()["detail"]
        assert theirs.everything() == before
    before = theirs.everything()
    allowed = theirs.ask(ADMIN if installation else theirs.own[Scope(need[0])])
    assert allowed.status_code == ANONYMOUS.get(operation_id, allowed.status_code) < 400 or operation_id == "open_link"
    if theirs.operation.method == "GET":
        assert theirs.everything() == before
    if operation_id in ("get_job", "list_jobs", "list_job_events", "list_events", "list_logs"):
        assert MARK in allowed.text


@pytest.mark.parametrize("operation_id", ["get_job"])
def test_lists_streams_and_counts_show_the_keys_project_only(theirs, service, operation_id):
    ours = service.http.post("/v1/jobs", json=DOCUMENT, headers=bearer(theirs.foreign["submit"])).json()["id"]
    shown = bearer(theirs.foreign["read"])
    service.http.headers.update(shown)
    assert [job["id"] for job in service.http.get("/v1/jobs").json()["items"]] == [ours]
    assert {event["job"] for event in service.http.get("/v1/events").json()["items"]} == {ours}
    assert service.http.get(f"/v1/events?job={theirs.job}").json()["items"] == []
    assert [project["name"] for project in service.http.get("/v1/projects").json()["items"]] == ["ours"]
    numbers = service.http.get("/metrics").text
    assert f'job="{ours}"' in numbers and theirs.job not in numbers
    assert 'manta_jobs{state="RUNNING"} 0.0' in numbers and "http_request" not in numbers
    with service.http.stream("GET", "/v1/events?follow=true") as stream:
        said = next(line for line in stream.iter_lines() if line.startswith("data:"))
    assert ours in said

    placed = [{"job": ours, "rank": 0}, {"job": theirs.job, "rank": 0}]
    node = {**service.control.cluster()["nodes"][0], "ranks": placed}
    service.control.cluster = lambda: {"nodes": [dict(node)], "totals": {"total": 16}}
    assert service.http.get("/v1/cluster").json()["nodes"][0]["ranks"] == placed[:1]
    del service.control.cluster


@pytest.mark.parametrize("operation_id", ["get_job"])
def test_key_of_the_installation_sees_all_projects_and_submits_into_its_own(theirs, service):
    service.http.headers.update(bearer(ADMIN))
    assert service.http.get(f"/v1/jobs/{theirs.job}").json()["project"] == "theirs"
    assert service.submit()["project"] == "default"
    assert len(service.http.get("/v1/jobs").json()["items"]) == 2
    assert "http_request" in service.http.get("/metrics").text
    names = [project["name"] for project in service.http.get("/v1/projects").json()["items"]]
    assert names == ["default", "ours", "theirs"]


@pytest.mark.parametrize("operation_id", ["submit_job"])
def test_idempotency_keys_of_projects_are_apart(theirs, service):
    def submit(key, **changes):
        headers = {**bearer(key), "Idempotency-Key": "the same"}
        return service.http.post("/v1/jobs", json={**DOCUMENT, **changes}, headers=headers)

    first = submit(theirs.own["submit"])
    other = submit(theirs.foreign["submit"], name="different")
    default = submit(ADMIN, name="third")
    assert [answer.status_code for answer in (first, other, default)] == [201] * 3
    assert submit(theirs.own["submit"]).json()["id"] == first.json()["id"]
    assert submit(theirs.foreign["submit"]).status_code == 409


@pytest.mark.parametrize("operation_id", ["inject_fault"])
def test_fault_that_hits_a_whole_node_is_for_keys_of_the_installation(theirs, service):
    path, body = f"/v1/jobs/{theirs.job}/faults", {"kind": "node", "rank": 0}
    refused = service.http.post(path, json=body, headers=bearer(theirs.own["admin"]))
    assert (refused.status_code, "whole installation" in refused.json()["detail"]) == (403, True)
    assert service.http.post(path, json=body, headers=bearer(ADMIN)).status_code == 202


@pytest.mark.parametrize("operation_id", ["create_key"])
def test_admin_key_of_a_project_cannot_create_keys_beyond_its_project(theirs, service):
    def make(**wanted):
        body = {"name": "a", "scope": "admin", **wanted}
        return service.http.post("/v1/keys", json=body, headers=bearer(theirs.own["admin"]))

    assert make(installation=True).status_code == 403
    missing, foreign = make(project="nowhere"), make(project="ours")
    assert (foreign.status_code, foreign.json()["code"]) == (404, "project_not_found")
    assert foreign.text.replace("ours", "nowhere") == missing.text
    assert make(project="theirs").status_code == 201
    listed = service.http.get("/v1/keys", headers=bearer(theirs.own["admin"])).json()["items"]
    assert {key["project"] for key in listed} == {"theirs"} and not any(key["installation"] for key in listed)


@pytest.mark.parametrize("operation_id", ["create_key"])
def test_created_key_works_until_revoked_and_is_shown_only_once(theirs, service):
    admin = bearer(theirs.own["admin"])
    wanted = {"name": "of ada", "scope": "read", "user": "ada", "expires_in_days": 2}
    made = service.http.post("/v1/keys", json=wanted, headers=admin)
    assert made.headers["Cache-Control"] == "no-store"
    key = made.json().pop("key")
    assert service.http.get(f"/v1/jobs/{theirs.job}", headers=bearer(key)).status_code == 200
    listed = service.http.get("/v1/keys", headers=admin)
    (shown,) = [each for each in listed.json()["items"] if each["name"] == "of ada"]
    assert shown["user"] == "ada" and key not in listed.text
    lasts = datetime.fromisoformat(shown["expires_at"]) - datetime.fromisoformat(shown["created_at"])
    assert lasts.total_seconds() == pytest.approx(2 * 86400, abs=60)
    with service.http.stream("GET", f"/v1/jobs/{theirs.job}/events?follow=true", headers=bearer(key)) as stream:
        lines = stream.iter_lines()
        next(lines)
        gone = service.http.delete(f"/v1/keys/{shown['id']}", headers=admin).json()
        assert gone["revoked_at"] is not None
        list(lines)  # it ends
    assert service.http.get(f"/v1/jobs/{theirs.job}", headers=bearer(key)).status_code == 401
    again = service.http.delete(f"/v1/keys/{shown['id']}", headers=admin).json()
    assert again == gone


@pytest.mark.parametrize("operation_id", ["create_key"])
def test_key_with_a_priority_limit_cannot_exceed_or_extend_it(theirs, service):
    wanted = {"name": "of a student", "scope": "admin", "highest_priority": -1}
    made = service.http.post("/v1/keys", json=wanted, headers=bearer(theirs.own["admin"])).json()
    of_student = bearer(made["key"])
    assert made["highest_priority"] == service.http.get("/v1/me", headers=of_student).json()["highest_priority"] == -1

    def submit(priority, path="/v1/jobs"):
        return service.http.post(path, json={**DOCUMENT, "priority": priority}, headers=of_student)

    job = submit(-1).json()["id"]
    higher = service.http.patch(f"/v1/jobs/{job}", json={"priority": 0}, headers=of_student)
    more = service.http.post("/v1/keys", json={**wanted, "highest_priority": 0}, headers=of_student)
    for refused in (submit(0), submit(0, "/v1/jobs?dry_run=true"), higher, more):
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["path"]) == (422, "priority")
        assert "allows priorities up to -1" in error["rule"]
    for allowed in ({"name": "mine"}, {"priority": -2}):
        assert service.http.patch(f"/v1/jobs/{job}", json=allowed, headers=of_student).status_code == 200
    another = {"name": "another", "scope": "submit"}
    assert service.http.post("/v1/keys", json=another, headers=of_student).json()["highest_priority"] == -1


def test_only_health_readiness_and_login_links_are_anonymous():
    paths = ("/healthz", "/readyz", "/link/secret", "/healthz/more", "/v1/link/secret", "/linked", "/metrics", "/ui/")
    assert [path for path in paths if is_anonymous(path)] == ["/healthz", "/readyz", "/link/secret"]


def test_secret_of_a_link_is_written_down_nowhere():
    assert [shown(path) for path in ("/link/secret", "/v1/jobs")] == ["/link/...", "/v1/jobs"]


def test_forged_url_of_a_request_grants_no_access():
    """Starlette 0.50 makes `url` of such a Host header without a look at it."""

    class Deceived(Request):
        url = URL("http://127.0.0.1/link/?/v1/keys")

    who = Identity("key_1", "k", None, "default", Scope.READ, installation=False)
    route = SimpleNamespace(name="create_key")
    request = Deceived({"type": "http", "path": "/v1/keys", "headers": [], "route": route})
    access.attach(request.scope, access.RequestOfCaller(who, None))
    with pytest.raises(access.Forbidden):
        asyncio.run(access.authorize(request))


@pytest.mark.parametrize("operation_id", ["open_link"])
def test_link_signs_a_browser_in_once_with_the_rights_of_its_key(theirs, service):
    asked = service.http.post("/v1/links", headers=bearer(theirs.own["read"])).json()
    opened = service.http.get(asked["path"])
    assert opened.status_code == 200 and 'content="0; url=/ui/"' in opened.text
    assert '<link rel="icon"' in opened.text, "else a browser asks for /favicon.ico, which is a 404"
    said = opened.headers["Set-Cookie"]
    assert "HttpOnly" in said and "SameSite=strict" in said and "Secure" not in said
    cookie = {"Cookie": said.partition(";")[0], "Origin": service.url, "Manta-Rest": "1"}
    assert service.http.get(f"/v1/jobs/{theirs.job}", headers=cookie).status_code == 200
    assert service.http.post(f"/v1/jobs/{theirs.job}/cancel", headers=cookie).status_code == 403
    service.http.cookies.clear()
    assert problem_of(service.http.get(asked["path"])) == (404, "link_not_good")
    person = service.http.get(asked["path"], headers={"Accept": "text/html,*/*;q=0.8"}, follow_redirects=False)
    assert (person.status_code, person.headers["Location"]) == (303, "/ui/")
    audited = theirs.audited()
    assert [line[1] for line in audited] == ["create_link", "open_link", "cancel_job"]
    service.store.write(lambda session: keys.revoke(session, None, theirs.key))
    service.http.delete(f"/v1/keys/{theirs.key}", headers=bearer(theirs.own["admin"]))
    assert service.http.get(f"/v1/jobs/{theirs.job}", headers=cookie).status_code == 401


@pytest.mark.parametrize("operation_id", ["end_session"])
def test_browser_signs_out_and_the_key_behind_stays_good(theirs, service):
    def sign_in():
        path = service.http.post("/v1/links", headers=bearer(theirs.own["submit"])).json()["path"]
        said = service.http.get(path).headers["Set-Cookie"]
        service.http.cookies.clear()
        return {"Cookie": said.partition(";")[0], "Origin": service.url, "Manta-Rest": "1"}

    first, second = sign_in(), sign_in()
    me = service.http.get("/v1/me", headers=first).json()
    assert (me["project"], me["scope"], me["installation"], me["browser"]) == ("theirs", "submit", False, True)
    assert service.http.get("/v1/me", headers=bearer(theirs.own["submit"])).json() == {**me, "browser": False}

    signed_out = service.http.delete("/v1/session", headers=first)
    assert signed_out.json() == me
    assert "Max-Age=0" in signed_out.headers["Set-Cookie"] and first["Cookie"].partition("=")[0] in str(
        signed_out.headers["Set-Cookie"]
    )
    assert service.http.get("/v1/me", headers=first).status_code == 401
    assert service.http.get("/v1/me", headers=second).status_code == 200
    with_key = service.http.delete("/v1/session", headers=bearer(theirs.own["submit"]))
    assert with_key.json()["browser"] is False and "Set-Cookie" not in with_key.headers
    assert service.http.get("/v1/me", headers=bearer(theirs.own["submit"])).status_code == 200
    assert service.http.get("/v1/me", headers=second).status_code == 200


def test_session_cookie_is_secure_if_browsers_use_tls(tmp_path, store):
    add_admin(store)
    app = create_app(FakeControl(store, tmp_path), secure_cookies=True)
    http = TestClient(app, "https://127.0.0.1:8400", follow_redirects=False)
    path = http.post("/v1/links", headers=bearer(ADMIN)).json()["path"]
    assert "Secure" in http.get(path).headers["Set-Cookie"]


@pytest.mark.parametrize("operation_id", ["open_link"])
def test_link_of_a_key_that_was_revoked_or_that_waited_too_long_opens_nothing(theirs, service, monkeypatch):
    def link():
        token = new_browser_token()
        service.store.write(lambda session: keys.add_link(session, theirs.key, digest_of(token)))
        return f"/link/{token}"

    monkeypatch.setattr(keys, "LINK_SECONDS", -1.0)
    assert service.http.get(link()).status_code == 404
    monkeypatch.undo()
    service.store.write(lambda session: keys.revoke(session, None, theirs.key))
    assert service.http.get(link()).status_code == 404


@pytest.mark.parametrize("operation_id", ["get_readiness"])
def test_reasons_for_unreadiness_are_shown_only_with_a_key(theirs, service):
    service.control.reasons = ["Ray does not answer (died)"]
    assert "Ray" not in service.http.get("/readyz").text
    assert "Ray does not answer" in theirs.ask(theirs.own["read"]).text


def test_openapi_document_needs_a_key(service):
    assert service.http.get("/openapi.json").status_code == 200
    service.http.headers.pop("Authorization")
    assert service.http.get("/openapi.json").status_code == 401


def test_job_project_lookup_is_cached_and_skipped_for_installation_keys(store, monkeypatch):
    asked = []

    class Looked(access.JobProjects):
        def _read_project(self, job_id):
            asked.append(job_id)
            return {"a": "ours", "b": "theirs", "c": "ours"}[job_id]

    projects_of_jobs = Looked(lambda: store)

    def is_seen(job_id, bound):
        try:
            asyncio.run(projects_of_jobs.check(job_id, bound))
        except JobNotFound:
            return False
        return True

    assert is_seen("a", None) and asked == []
    assert is_seen("a", "ours") and is_seen("a", "ours") and not is_seen("a", "theirs")
    assert asked == ["a"], "also where it is refused"
    monkeypatch.setattr(access, "_MAX_CACHED", 2)
    assert is_seen("b", "theirs") and is_seen("c", "ours") and is_seen("c", "ours") and is_seen("b", "theirs")
    assert asked == ["a", "b", "c"], "the two newest are known"
    assert is_seen("a", "ours")
    assert asked == ["a", "b", "c", "a"], "the oldest was forgotten"
