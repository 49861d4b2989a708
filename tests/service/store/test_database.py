"""The database has one writer, consistent readers, an address, types of its own, and migrations that go both ways."""

import asyncio
import math
import threading
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from manta.service.revisions import newest_revision
from manta.service.states import JobState
from manta.service.store import Store, events, installation_tables, job_rows, jobs
from manta.service.store.database import OLDEST_READER, WriteQueue
from manta.service.store.errors import StoreOfNewerRelease, StoreUnusable
from manta.service.store.location import InvalidDatabaseUrl, file_of, parse_url, shown, sqlite_url, url_in
from manta.service.store.tables import Base
from manta.service.store.types import Document, storable

TABLES = {
    "api_keys", "audit", "browser_tokens", "checkpoints", "compatibility", "control_planes", "deleted_jobs", "events",
    "exports", "generations", "installation", "job_labels", "jobs", "leases", "metric_bins", "metrics", "projects",
    "rank_numbers", "ranks", "recoveries", "state_changes", "step_trace_parts", "step_traces",
}  # fmt: skip


def tables_of(store):
    return set(inspect(store.engine).get_table_names()) - {"alembic_version"}


def test_migrations_make_exactly_the_tables_that_the_code_declares_at_the_newest_revision(store):
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []
        assert context.get_current_revision() == newest_revision()
    assert tables_of(store) == TABLES


def test_migrations_go_down_and_up_again(store):
    store.migrate("base")
    assert tables_of(store) == set()
    store.migrate()
    assert tables_of(store) == TABLES


@pytest.mark.parametrize("revision", ["0005", "0007", "0017"])
def test_database_of_a_revision_between_releases_is_refused_and_stays_as_it_is(store, revision):
    is_at(store, revision)
    with pytest.raises(StoreUnusable, match=rf"its revision {revision} is that of no release \(restore a backup"):
        store.migrate()
    assert store.revision == revision


def test_jobs_are_there_after_a_second_migration_and_after_an_upgrade(store, submit):
    job = submit()
    store.migrate()
    assert store.query(jobs.get, job.id).name == "small"
    store.migrate("0006")
    store.migrate()
    with store.read() as session:
        row = jobs.get(session, job.id)
        assert (row.name, row.project, row.owner, row.submitted) == ("small", "default", None, None)
        assert [event.type for event in events.page(session, job.id).items] == ["submitted"]


def namespace(store, ray_is_new=False):
    return store.write(lambda session: installation_tables.ray_namespace(session, ray_is_new))


def test_each_database_has_a_namespace_of_its_own_that_survives_a_migration(store, tmp_path):
    first_name = namespace(store)
    store.migrate()
    assert namespace(store) == namespace(store, ray_is_new=True) == first_name
    other = Store(f"sqlite:///{tmp_path}/other.db")
    other.migrate()
    assert first_name.startswith("manta-") and namespace(other) != first_name
    other.close()


def test_home_of_jobs_stays_that_of_the_first_control_plane(store):
    for home in ("/first", "/second"):
        assert store.write(lambda session, home=home: installation_tables.home_of_jobs(session, home)) == "/first"


def test_failed_write_operation_is_rolled_back(store, submit):
    job = submit()

    def half(session):
        jobs.transition(session, job.id, JobState.STARTING)
        raise KeyError("halfway")

    with pytest.raises(KeyError, match="halfway"):
        store.write(half)
    assert store.query(jobs.get, job.id).state == "QUEUED"


def test_all_database_writes_run_in_one_background_thread(store):
    names = {store.write(lambda session: threading.current_thread().name) for _ in range(3)}

    async def ask():
        return await store.write_async(lambda session: threading.current_thread().name)

    names.add(asyncio.run(ask()))
    assert len(names) == 1
    assert threading.current_thread().name not in names


def test_a_write_inside_a_write_is_an_error_instead_of_a_deadlock(store):
    with pytest.raises(RuntimeError, match="wait for itself"):
        store.write(lambda session: store.write(lambda inner: None))


async def test_write_async_does_not_block_the_event_loop(store):
    release = threading.Event()
    writing = asyncio.create_task(store.write_async(lambda session: release.wait(60)))
    await asyncio.sleep(0)
    assert not writing.done()
    release.set()  # reached only if the loop was not blocked by the write
    assert await writing is True


def test_database_read_session_does_not_see_later_writes(store, submit):
    submit()
    with store.read() as session:
        before = len(job_rows.page(session).items)
        submit()
        assert len(job_rows.page(session).items) == before == 1


def test_database_rows_stay_readable_after_their_session(store, submit):
    job = submit()
    assert job.spec["train"]["steps"] == job.steps == 10
    read = store.query(jobs.get, job.id)
    assert (read.id, read.metrics, read.report_cursor) == (job.id, {}, {})


def is_at(store, revision, oldest_reader=None):
    with store.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{revision}'")
        if oldest_reader is not None:
            connection.exec_driver_sql(f"UPDATE compatibility SET oldest_reader = '{oldest_reader}'")


def test_a_database_of_a_newer_release_that_changed_more_than_we_can_ignore_is_left_alone(store):
    is_at(store, "9999", "9998")
    with pytest.raises(StoreOfNewerRelease, match=f"revision 9999, and this one knows them up to {newest_revision()}"):
        store.migrate()
    store.write(lambda session: session.execute(text("DROP TABLE compatibility")))
    with pytest.raises(StoreOfNewerRelease, match="start that release or a later one"):
        store.migrate()


def test_a_database_of_a_newer_release_that_only_added_to_it_is_used_as_it_is(store, submit):
    store.write(lambda session: session.execute(text("ALTER TABLE jobs ADD COLUMN newer TEXT")))
    is_at(store, "9999", newest_revision())
    store.migrate()
    job = submit()
    with store.read() as session:
        assert jobs.get(session, job.id).state == "QUEUED"
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"


def test_newest_migration_stores_the_oldest_reader_that_the_code_declares(store):
    with store.read() as session:
        assert session.execute(text("SELECT oldest_reader FROM compatibility")).scalar_one() == OLDEST_READER


@pytest.mark.parametrize(
    ("revision", "shuts_out"),
    [("0005", False), ("0006", True), (OLDEST_READER, False), (None, False), ("9999", False)],
)
def test_a_migration_shuts_out_the_release_before_where_that_cannot_read_the_result(store, revision, shuts_out):
    is_at(store, revision or newest_revision())
    assert store.shuts_out_release_before == shuts_out


def test_many_readers_do_not_keep_the_writer_waiting(store, submit):
    sessions = [store.read() for _ in range(30)]
    for session in sessions:
        session.__enter__().connection()
    assert submit().state == "QUEUED"
    for session in sessions:
        session.__exit__(None, None, None)


@pytest.mark.parametrize(
    "text", ["postgresql://me:secret@there/manta", "postgres://me@there/manta", "postgresql+psycopg://there/manta"]
)
def test_postgresql_url_selects_the_psycopg_driver(text):
    url = parse_url(text)
    assert (url.drivername, url.database, file_of(url)) == ("postgresql+psycopg", "manta", None)


def test_sqlite_url_of_a_file_with_special_characters_reads_back_the_same(tmp_path):
    file = tmp_path / "a b?c#d%41@:" / "manta.db"
    assert file_of(parse_url(sqlite_url(file))) == file


def test_database_is_in_the_home_unless_a_url_is_given():
    assert url_in(Path("/home/me"), None) == "sqlite:////home/me/manta.db"
    assert url_in(Path("/home/me"), "postgresql://there/manta") == "postgresql://there/manta"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("secret", "cannot be read"),
        ("postgresql://me:secret@there:port/manta", "cannot be read"),
        ("mysql://me:secret@there/manta", "begins with 'mysql', a kind of database"),
        ("postgresql+asyncpg://me:secret@there/manta", "begins with 'postgresql+asyncpg'"),
        ("postgresql://me:secret@with@there/manta", "has an @ or # in the user's name or password"),
        ("postgresql://me:secret#1@there/manta", "has an @ or # in the user's name or password"),
        ("postgresql://me:secret@there", "names no database"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///manta.db", "names a file by a relative path"),
    ],
)
def test_bad_database_url_is_refused_without_showing_its_secrets(text, problem):
    with pytest.raises(InvalidDatabaseUrl) as caught:
        parse_url(text)
    assert f"the database's URL {problem}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" not in str(caught.value.__cause__) and caught.value.__suppress_context__ in (True, False)


def test_password_anywhere_in_a_database_url_is_not_shown():
    text = "postgresql://me:secret@there:1/manta?password=secret&sslpassword=secret&host=/run"
    assert shown(parse_url(text)) == "postgresql://me:***@there:1/manta?host=%2Frun"


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"text": "a\0b"}, {"text": "a\\x00b"}),
        ({"a\0": 1}, {"a\\x00": 1}),
        ({"text": "\ud83d"}, {"text": "\\ud83d"}),
        ({"text": "\U0001f600 \\u0000"}, {"text": "\U0001f600 \\u0000"}),
        ({"list": [math.nan, -math.inf, 1e308]}, {"list": ["nan", "-inf", 1e308]}),
        ({"plain": ["ü", 1, 2.5, None, True]}, {"plain": ["ü", 1, 2.5, None, True]}),
    ],
)
def test_documents_come_back_with_all_that_a_database_takes(store, submit, given, stored):
    job = submit()

    def change(session):
        jobs.get(session, job.id).waiting_for = given

    store.write(change)
    assert store.query(jobs.get, job.id).waiting_for == stored
    assert storable(stored) == stored


def test_document_that_needs_no_change_is_stored_without_a_copy(store):
    plain = {"a": [1, "text"]}
    assert Document().process_bind_param(plain, store.engine.dialect) is plain


def test_writes_count_as_waiting_until_they_succeed_or_fail(store: Store):
    before, _ = store.writes.done
    begun, go_on = threading.Event(), threading.Event()

    def slow(session):
        begun.set()
        assert go_on.wait(60)
        raise ValueError

    store.write_later(slow)
    assert begun.wait(60)
    store.fenced(Mock()).write_later(lambda session: None)
    assert store.writes.length == 2
    assert store.writes.oldest_seconds > 0
    counted = store._submit(lambda session: (store.writes.length, store.writes.done[0]))
    go_on.set()
    assert counted.result(60) == (1, before + 2)


def test_time_of_a_write_begins_when_it_is_asked_for():
    clock, first, second = Mock(return_value=0.0), Future(), Future()
    writes = WriteQueue(clock)
    writes.add(first)
    clock.return_value = 2
    writes.add(second)
    clock.return_value = 3
    assert writes.oldest_seconds == 3
    first.set_result(None)
    assert (writes.oldest_seconds, writes.done) == (1, (1, 3))
    second.set_exception(ValueError())
    assert writes.done == (2, 4)
