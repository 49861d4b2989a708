"""Projects, keys, browsers' tokens and the audit, as the database has them."""

import time

import pytest
from sqlalchemy import text

from manta.service.identity import Scope
from manta.service.store import audit, job_rows, jobs, keys, projects
from manta.service.store.audit import AuditRecord
from manta.service.store.errors import InvalidCursor, KeyNotFound, LinkInvalid, ProjectExists, ProjectNotFound
from manta.service.store.job_rows import JobFilter
from manta.service.store.paging import Cursors

RECORD = AuditRecord("cancel_job", "job_000000000000", "127.0.0.1", 202)


def make(store, digest="d", project="default", **more):
    return store.write(lambda session: keys.create(session, digest, "a", Scope.READ, project, **more))


def test_job_stored_by_a_release_without_projects_is_of_the_default_project(store, submit):
    job = submit()
    columns = "name, state, spec, step, steps, generation, restarts, priority, metrics, report_cursor, created_at"
    copy = f"INSERT INTO jobs (id, {columns}, updated_at) SELECT 'job_zzzzzzzzzzzz', {columns}, 0 FROM jobs"
    store.write(lambda session: session.execute(text(copy)))
    with store.read() as session:
        assert jobs.project_of(session, "job_zzzzzzzzzzzz") == jobs.project_of(session, job.id) == "default"
        assert len(job_rows.page(session, JobFilter(bound="default")).items) == 2
        assert job_rows.page(session, JobFilter(bound="other")).items == []


def test_idempotency_key_of_a_project_cannot_be_one_of_the_default_project():
    assert jobs.bound_key("default", "a") == "a", "as releases before have stored it"
    assert jobs.bound_key("theirs", None) is None
    bound = jobs.bound_key("x" * 63, "k" * 200)
    assert "\n" in bound and len(bound) <= 200, "no header holds a line break, and the column takes it"
    assert jobs.bound_key("theirs", "a") != jobs.bound_key("ours", "a")


def test_second_project_of_the_same_name_is_refused(store):
    store.write(lambda session: projects.create(session, "theirs"))
    with pytest.raises(ProjectExists, match="choose another name"):
        store.write(lambda session: projects.create(session, "theirs"))
    with pytest.raises(ProjectNotFound):
        make(store, project="nowhere")


@pytest.mark.parametrize("name", ["", "\0", "A", "x" * 1000])
def test_project_with_an_impossible_name_is_not_found(store, name):
    with store.read() as session, pytest.raises(ProjectNotFound):
        projects.get(session, name)


def test_key_is_revoked_by_its_project_or_by_the_installation(store):
    store.write(lambda session: projects.create(session, "theirs"))
    key, everywhere = make(store, "1", "theirs"), make(store, "2", "theirs", installation=True)
    for bound, key_id in (("default", key.id), ("theirs", everywhere.id), (None, "key_000000000000"), (None, "\0")):
        with pytest.raises(KeyNotFound):
            store.write(lambda session, bound=bound, key_id=key_id: keys.revoke(session, bound, key_id))
    first = store.write(lambda session: keys.revoke(session, "theirs", key.id)).revoked_at
    assert store.write(lambda session: keys.revoke(session, None, key.id)).revoked_at == first


def test_key_is_good_until_it_expires(store):
    key = make(store, expires_at=100.0)
    assert keys.is_valid(key, 99.9) and not keys.is_valid(key, 100.0)


def test_key_that_was_revoked_is_not_good_and_leaves_others_as_they_are(store):
    gone, kept = make(store, "gone"), make(store, "kept")
    store.write(lambda session: keys.revoke(session, None, gone.id))
    with store.read() as session:
        records = [keys.by_digest(session, digest) for digest in ("gone", "kept", "never made")]
    assert [each and (each.id, keys.is_valid(each, time.time())) for each in records] == [
        (gone.id, False), (kept.id, True), None
    ]  # fmt: skip


def test_project_sees_itself_its_own_keys_and_none_of_the_installation(store):
    store.write(lambda session: projects.create(session, "theirs"))
    make(store, "1"), make(store, "2", "theirs", installation=True)
    theirs = make(store, "3", "theirs")
    page = store.query(keys.page, "theirs", limit=1)
    own = store.query(projects.page, "theirs", limit=1)
    assert ([key.id for key in page.items], page.next_cursor) == ([theirs.id], None)
    assert ([project.name for project in own.items], own.next_cursor) == (["theirs"], None)


def test_pages_of_keys_and_projects_continue_where_the_last_one_ended(store):
    made = [make(store, str(number)).id for number in range(3)]
    store.write(lambda session: [projects.create(session, name) for name in ("a", "b")])
    with store.read() as session:
        for page_of, expected in (
            (lambda cursor: keys.page(session, None, 2, cursor), made[::-1]),
            (lambda cursor: projects.page(session, None, 2, cursor), ["a", "b", "default"]),
        ):
            first = page_of(None)
            rest = page_of(first.next_cursor)
            names = [getattr(item, "id", None) or item.name for item in first.items + rest.items]
            assert (names, rest.next_cursor) == (expected, None)


@pytest.mark.parametrize("held", ["", "\0", "key", "A"])
def test_forged_cursor_of_keys_or_projects_is_refused(store, held):
    with store.read() as session:
        with pytest.raises(InvalidCursor):
            keys.page(session, None, cursor=Cursors("keys").encode(held))
        with pytest.raises(InvalidCursor):
            projects.page(session, None, cursor=Cursors("projects").encode("" if held == "key" else held))


def test_dashboard_link_opens_one_session_that_expires_with_its_key(store):
    key = make(store, expires_at=time.time() + 60)
    store.write(lambda session: keys.add_link(session, key.id, "link"))
    opened, begun = store.write(lambda session: keys.open_link(session, "link", "session"))
    assert (opened.id, begun.expires_at) == (key.id, key.expires_at)
    for digest in ("link", "session", "other"):
        with pytest.raises(LinkInvalid, match="manta link"):
            store.write(lambda session, digest=digest: keys.open_link(session, digest, "next"))
    assert store.query(keys.key_of_session, "session")[0].id == key.id
    assert store.query(keys.key_of_session, "link") is None


def test_expired_links_are_removed_when_the_next_link_is_made(store, monkeypatch):
    key = make(store)
    monkeypatch.setattr(keys, "LINK_SECONDS", -1.0)
    store.write(lambda session: keys.add_link(session, key.id, "old"))
    monkeypatch.undo()
    store.write(lambda session: keys.add_link(session, key.id, "new"))
    with store.read() as session:
        assert session.execute(text("SELECT digest FROM browser_tokens")).scalars().all() == ["new"]


def test_audit_entries_are_kept_per_project_and_name_the_key_or_local_user(store):
    who = keys.identity_of(make(store))
    store.write(lambda session: audit.append(session, who, RECORD))
    store.write(lambda session: audit.append_local(session, "root", "default", RECORD))
    with store.read() as session:
        local, first = audit.page(session, "default").items
        assert audit.page(session, "theirs").items == []
        assert [entry.id for entry in audit.page(session, None, key_id=who.key_id).items] == [first.id]
    assert (first.key_id, first.operation, first.target) == (who.key_id, "cancel_job", "job_000000000000")
    assert (local.key_id, local.key_name, local.user) == (None, "on the machine", "root")


def test_expired_link_opens_no_session(store, monkeypatch):
    key, now = make(store), 5000.0
    monkeypatch.setattr(keys.time, "time", lambda: now)
    until = store.write(lambda session: keys.add_link(session, key.id, "link")).expires_at
    assert until == now + keys.LINK_SECONDS
    now = until
    with pytest.raises(LinkInvalid):
        store.write(lambda session: keys.open_link(session, "link", "session"))
    now = until - 1.0
    _, begun = store.write(lambda session: keys.open_link(session, "link", "session"))
    assert begun.expires_at == now + keys.SESSION_SECONDS, "its key does not expire"


def test_ending_a_session_leaves_other_sessions_and_links(store):
    key = make(store)
    for number in "12":
        store.write(lambda session, n=number: keys.add_link(session, key.id, f"link {n}"))
        store.write(lambda session, n=number: keys.open_link(session, f"link {n}", f"session {n}"))
    store.write(lambda session: keys.add_link(session, key.id, "link 3"))
    store.write(lambda session: keys.end_session(session, "session 1"))
    store.write(lambda session: keys.end_session(session, "link 3"))
    assert store.query(keys.key_of_session, "session 1") is None
    assert store.query(keys.key_of_session, "session 2") is not None
    assert store.write(lambda session: keys.open_link(session, "link 3", "session 3"))[0].id == key.id


def test_audit_is_read_in_pages_and_by_target(store):
    ours, theirs = make(store), None
    store.write(lambda session: projects.create(session, "theirs"))
    theirs = make(store, "e", "theirs")
    for key, target in ((ours, "a"), (theirs, "b"), (ours, "b"), (theirs, "a"), (ours, "a")):
        record = AuditRecord("cancel_job", target, None, 202)
        store.write(lambda session, key=key, record=record: audit.append(session, keys.identity_of(key), record))
    first = store.query(audit.page, "default", limit=2)
    rest = store.query(audit.page, "default", limit=2, cursor=first.next_cursor)
    about = store.query(audit.page, None, target="b").items
    assert [entry.id for entry in first.items] == [5, 3] and [entry.id for entry in rest.items] == [1]
    assert [entry.target for entry in first.items + rest.items] == ["a", "b", "a"]
    assert rest.next_cursor is None
    assert [entry.project for entry in about] == ["default", "theirs"]


def test_audit_entry_of_the_service_itself_has_no_key_or_user(store):
    store.write(lambda session: audit.append_of_service(session, "default", RECORD))
    (entry,) = store.query(audit.page, "default").items
    assert (entry.key_id, entry.key_name, entry.user, entry.project) == (None, "the service", None, "default")


def test_administration_needs_a_valid_admin_key_of_the_installation(store):
    def may(now=1000.0):
        return store.query(keys.may_administrate, now)

    def add(digest, scope, installation, **more):
        return store.write(lambda session: keys.create(session, digest, "a", scope, installation=installation, **more))

    assert not may()
    add("project", Scope.ADMIN, False)
    add("reader", Scope.READ, True)
    add("expired", Scope.ADMIN, True, expires_at=1000.0)
    assert not may() and may(999.0)
    key = add("good", Scope.ADMIN, True)
    assert may()
    store.write(lambda session: keys.revoke(session, None, key.id))
    assert not may()
