"""The database has one writer, consistent readers, and migrations that go both ways."""

import asyncio
import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from service.states import JobState
from service.store import (
    Store,
    StoreOfNewerRelease,
    events,
    installation,
    job_rows,
    jobs,
    ledgers,
)
from service.store.database import OLDEST_READER, newest_revision
from service.store.tables import Base
from tests.service.support.older_databases import UNDO_0010

TABLES = {
    "api_keys", "audit", "browser_tokens", "checkpoints", "compatibility", "control_planes", "deleted_jobs", "events",
    "exports", "generations", "installation", "job_labels", "jobs", "leases", "metric_bins", "metrics", "projects",
    "rank_numbers", "ranks", "recoveries", "state_changes", "step_trace_parts", "step_traces",
}  # fmt: skip


def tables_of(store):
    return set(inspect(store.engine).get_table_names()) - {"alembic_version"}


def test_migrations_make_exactly_the_tables_that_the_code_declares(store):
    with store.engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    assert differences == []
    assert tables_of(store) == TABLES


def test_migrations_go_down_and_up_again(store):
    store.migrate("base")
    assert tables_of(store) == set()
    store.migrate()
    assert tables_of(store) == TABLES


def test_the_newest_revision_is_the_one_that_migrations_end_at(store):
    with store.engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == newest_revision()


def test_migrating_twice_keeps_what_is_there(store, submit):
    job = submit()
    store.migrate()
    with store.read() as session:
        assert jobs.get(session, job.id).name == "small"


def test_jobs_of_an_older_manta_keep_their_ledger(store, submit):
    job = submit()
    at = job.created_at
    store.migrate("base")
    store.migrate("0001")

    def old_rows(session):
        columns = (
            "id, name, state, spec, step, steps, generation, restarts, priority, metrics, compute_seconds, "
            "report_cursor, created_at, started_at, updated_at"
        )
        values = f"'{job.id}', 'old', 'RUNNING', '{{}}', 3, 9, 2, 1, 0, '{{}}', 4.0, '{{}}', {at}, {at + 5}, {at}"
        session.execute(text(f"INSERT INTO jobs ({columns}) VALUES ({values})"))
        for state, later in (("STARTING", 5), ("RUNNING", 8)):
            row_values = f"'{job.id}', {at + later}, 'state_changed', 'told', '{{\"to\": \"{state}\"}}'"
            session.connection().exec_driver_sql(
                f"INSERT INTO events (job_id, time, type, message, data) VALUES ({row_values})"
            )
        for number, began in ((1, 5), (2, 20)):
            row = f"'{job.id}', {number}, 'c', 'start', 0, {at + began}, '{{}}'"
            names = "job_id, generation, cause, resume_source, resume_step, started_at, data"
            session.execute(text(f"INSERT INTO generations ({names}) VALUES ({row})"))
        for step, generation, later in ((1, 1, 10), (2, 1, 12), (3, 2, 26)):
            row = f"'{job.id}', {step}, {generation}, {at + later}, {2.0 if generation == 1 else 4.0}, '{{}}'"
            session.execute(
                text(f"INSERT INTO metrics (job_id, step, generation, time, step_seconds, extra) VALUES ({row})")
            )

    store.write(old_rows)
    store.migrate()
    with store.read() as session:
        book = ledgers.of_job(session, job.id, at + 26)
    assert book.seconds["queue"] == pytest.approx(5)
    assert book.seconds["start"] == pytest.approx(3)
    assert book.seconds["compute"] == pytest.approx(4 + 4)
    assert sum(book.seconds.values()) == pytest.approx(26)


def namespace(store, ray_is_new=False):
    return store.write(lambda session: installation.ray_namespace(session, ray_is_new))


def test_each_database_is_an_installation_of_its_own_for_good(store, tmp_path):
    first_name = namespace(store)
    store.migrate()
    assert namespace(store) == namespace(store, ray_is_new=True) == first_name
    other = Store(f"sqlite:///{tmp_path}/other.db")
    other.migrate()
    assert first_name.startswith("manta-") and namespace(other) != first_name
    other.close()


def test_files_of_all_jobs_stay_where_the_first_control_plane_has_them(store):
    for home in ("/first", "/second"):
        assert store.write(lambda session, home=home: installation.home_of_jobs(session, home)) == "/first"


def test_database_of_a_release_before_finds_what_runs_until_ray_is_a_new_one(store, submit):
    job = submit()
    for statement in (
        *UNDO_0010,
        "DROP TABLE installation",
        "DROP TABLE deleted_jobs",
        "DROP TABLE compatibility",
        "ALTER TABLE jobs DROP COLUMN deletion_began_at",
        "ALTER TABLE jobs DROP COLUMN submitted",
        "ALTER TABLE jobs DROP COLUMN not_default",
        "UPDATE alembic_version SET version_num = '0005'",
    ):
        store.write(lambda session, statement=statement: session.execute(text(statement)))
    store.migrate()
    with store.read() as session:
        assert [event.type for event in events.page(session, job.id).items] == ["submitted"]
    assert namespace(store) == "manta"
    own = namespace(store, ray_is_new=True)
    assert own.startswith("manta-") and namespace(store) == own


def test_a_failed_operation_leaves_nothing_behind(store, submit):
    job = submit()

    def half(session):
        jobs.transition(session, job.id, JobState.STARTING)
        raise KeyError("halfway")

    with pytest.raises(KeyError, match="halfway"):
        store.write(half)
    with store.read() as session:
        assert jobs.get(session, job.id).state == "QUEUED"


def test_all_writing_happens_in_one_thread(store):
    names = {store.write(lambda session: threading.current_thread().name) for _ in range(3)}

    async def ask():
        return await store.write_async(lambda session: threading.current_thread().name)

    names.add(asyncio.run(ask()))
    assert len(names) == 1
    assert threading.current_thread().name not in names


def test_a_write_inside_a_write_is_an_error_instead_of_a_deadlock(store):
    with pytest.raises(RuntimeError, match="wait for itself"):
        store.write(lambda session: store.write(lambda inner: None))


def test_write_async_leaves_the_event_loop_free(store):
    release = threading.Event()

    async def main():
        writing = asyncio.create_task(store.write_async(lambda session: release.wait(60)))
        await asyncio.sleep(0)
        assert not writing.done()
        release.set()  # reached only if the loop was not blocked by the write
        return await writing

    assert asyncio.run(main()) is True


def test_a_reader_sees_one_state_while_others_write(store, submit):
    submit()
    with store.read() as session:
        before = len(job_rows.page(session).items)
        submit()
        assert len(job_rows.page(session).items) == before == 1


def test_rows_stay_usable_after_their_session(store, submit):
    job = submit()
    assert job.spec["train"]["steps"] == job.steps == 10
    with store.read() as session:
        read = jobs.get(session, job.id)
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


def test_the_newest_migration_says_what_the_code_takes_it_to_say(store):
    with store.read() as session:
        assert session.execute(text("SELECT oldest_reader FROM compatibility")).scalar_one() == OLDEST_READER


@pytest.mark.parametrize(
    ("revision", "shuts_out"),
    [("0005", False), ("0006", True), ("0007", True), (OLDEST_READER, False), (None, False), ("9999", False)],
)
def test_a_migration_shuts_out_the_release_before_where_that_cannot_read_the_result(store, revision, shuts_out):
    is_at(store, revision or newest_revision())
    assert store.shuts_out_release_before == shuts_out


def test_database_that_is_new_shuts_out_nobody(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/new.db")
    assert not store.shuts_out_release_before
    store.close()


def test_many_readers_do_not_keep_the_writer_waiting(store, submit):
    sessions = [store.read() for _ in range(30)]
    for session in sessions:
        session.__enter__().connection()
    assert submit().state == "QUEUED"
    for session in sessions:
        session.__exit__(None, None, None)
