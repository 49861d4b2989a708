"""What only SQLite does: files, copies beside them, one writer at a time."""

import contextlib
import os
import sqlite3

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError

from manta.service.store import Store, events, job_numbers, job_rows, jobs, leases, pauses_and_retries
from manta.service.store.database import may_pass
from manta.service.store.errors import DatabaseLost, JobNotFound, OutcomeUnknown, StoreUnusable
from manta.service.store.job_rows import JobFilter


def test_sqlite_runs_in_wal_mode_with_foreign_keys(store, tmp_path):
    assert sqlite3.connect(tmp_path / "manta.db").execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with pytest.raises(IntegrityError, match="FOREIGN KEY"):
        store.write(lambda session: events.append(session, "job_000000000000", "x", "about no job"))


def test_write_transaction_locks_the_database_from_its_beginning(store, tmp_path):
    """A read that turned into a write would be refused instead, where another process wrote meanwhile."""
    other = contextlib.closing(sqlite3.connect(tmp_path / "manta.db", timeout=0, isolation_level=None))
    with other as connection, store.database.writer.begin() as writing:
        writing.execute(text("SELECT count(*) FROM jobs"))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            connection.execute("BEGIN IMMEDIATE")


def test_job_is_there_after_the_database_is_reopened(tmp_path, make_spec):
    url = f"sqlite:///{tmp_path}/deeper/manta.db"
    first = Store(url)
    first.migrate()
    job, _ = first.write(lambda session: jobs.create(session, make_spec()))
    first.close()
    second = Store(url)
    with second.read() as session:
        assert jobs.get(session, job.id).state == "QUEUED"
        with pytest.raises(JobNotFound):
            jobs.get(session, "job_000000000000")
    second.close()


OFTEN = {
    "owners": leases.overview,
    "queue": jobs.unfinished,
    "sweep": lambda session: pauses_and_retries.holding_memory(session, ["job_000000000000"]),
    "monitoring": lambda session: job_numbers._listed(session, 0.0, None),
}


def plans_of(store, reading, query, table="jobs"):
    """How SQLite looks for what a query wants of a table; `reading`: what gives what the query asks."""
    asked = []

    def note(_connection, _cursor, statement, parameters, *_):
        asked.append((statement, parameters))

    event.listen(store.database.readers, "before_cursor_execute", note)
    with reading() as reader:
        query(reader)
    event.remove(store.database.readers, "before_cursor_execute", note)
    with store.read_rows() as connection:
        about_jobs = [(each, values) for each, values in asked if f"FROM {table}" in each]
        plans = [connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {each}", values).all() for each, values in about_jobs]
    return [row[-1] for plan in plans for row in plan]


@pytest.mark.parametrize("query", OFTEN.values(), ids=OFTEN)
def test_frequent_queries_do_not_scan_finished_jobs(store, query):
    """Whose rows hold their specs, and of which there are more and more."""
    steps = plans_of(store, store.read, query)
    assert steps and not [step for step in steps if step.startswith("SCAN jobs")]


FEWEST = {
    "name": (JobFilter(name="x"), "name"),
    "name of a project": (JobFilter(name="x", bound="a-project"), "name"),
    "name and state": (JobFilter(name="x", states=("SUCCEEDED",)), "name"),
    "name and states": (JobFilter(name="x", states=("QUEUED", "FAILED"), bound="a-project"), "name"),
    "name and owner": (JobFilter(name="x", owner="ada"), "name"),
    "owner": (JobFilter(owner="ada", bound="a-project"), "owner"),
    "owner and state": (JobFilter(owner="ada", states=("SUCCEEDED",)), "owner"),
    "owner and states": (JobFilter(owner="ada", states=("RUNNING", "FAILED"), bound="a-project"), "owner"),
}


@pytest.mark.parametrize(("wanted", "column"), FEWEST.values(), ids=FEWEST)
def test_list_of_jobs_uses_the_index_of_its_rarest_filter(store, wanted, column):
    """Most are over, and in one project."""
    steps = plans_of(store, store.read_rows, lambda rows: job_rows.page(rows, wanted))
    assert steps == [f"SEARCH jobs USING INDEX ix_jobs_{column}_id ({column}=?)"]


def test_jobs_of_an_owner_that_are_not_over_are_found_among_those_that_are_not(store):
    wanted = JobFilter(owner="ada", states=("QUEUED", "RUNNING"))
    steps = plans_of(store, store.read_rows, lambda rows: job_rows.page(rows, wanted))
    assert "(state=?)" in steps[0]


ABOUT_EVENTS = {
    "which jobs have news": (lambda session: events.newest_of_jobs(session, 0), "id>"),
    "news of a project": (lambda session: events.page_of_all(session, bound="a-project"), "rowid>? AND rowid<"),
    "monitoring": (lambda session: job_numbers._recent_events(session, [], 0.0), "rowid>"),
    "news of a job": (lambda session: events.page_of_all(session, "job_000000000000", bound="a-project"), "id>"),
}


@pytest.mark.parametrize(("query", "where"), ABOUT_EVENTS.values(), ids=ABOUT_EVENTS)
def test_frequent_queries_search_only_the_newest_events(store, query, where):
    """And not through those of all jobs, nor of all jobs of the project."""
    about_events = plans_of(store, store.read, query, "events \nWHERE")[0]
    assert about_events.startswith("SEARCH events") and where in about_events


@pytest.mark.parametrize("content", [b"this is no database, but long enough to be looked at" * 100, None])
def test_file_that_is_not_a_database_is_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "odd.db"
    path.mkdir() if content is None else path.write_bytes(content)
    store = Store(f"sqlite:///{path}")
    with pytest.raises(StoreUnusable, match=r"cannot use the database sqlite:.*odd\.db: "):
        store.migrate()
    store.close()


def test_error_of_a_damaged_database_counts_as_one_that_may_pass(store, submit, tmp_path):
    submit()
    store.close()
    os.truncate(tmp_path / "manta.db", 3 * 4096)
    damaged = Store(f"sqlite:///{tmp_path}/manta.db")
    with damaged.read() as session, pytest.raises(OperationalError, match="malformed") as caught:
        jobs.unfinished(session)
    assert may_pass(caught.value)
    damaged.close()


def test_a_database_is_copied_before_it_is_migrated(store, submit, tmp_path):
    job = submit()
    store.migrate()
    assert not list(tmp_path.glob("manta.db.*")), "there was nothing to do"
    store.migrate("0006")
    (tmp_path / "manta.db.0006").write_text("of an attempt before")
    store.migrate()
    with contextlib.closing(sqlite3.connect(tmp_path / "manta.db.0006")) as copy:
        assert copy.execute("SELECT version_num FROM alembic_version").fetchone() == ("0006",)
        assert copy.execute("SELECT id, state FROM jobs").fetchall() == [(job.id, "QUEUED")]
    assert store.query(jobs.get, job.id).submitted is None


def test_new_sqlite_database_does_not_shut_out_the_release_before(tmp_path):
    new = Store(f"sqlite:///{tmp_path}/new.db")
    assert not new.shuts_out_release_before
    new.close()


def test_database_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnusable, match="file"):
        Store(f"sqlite:///{tmp_path}/file/manta.db")


def move_away(file):
    file.rename(f"{file}.away")


def put_another_there(file):
    move_away(file)
    file.write_bytes(b"another one" * 1000)


@pytest.mark.parametrize("name", ["manta.db", "manta.db-wal", "manta.db-shm"])
@pytest.mark.parametrize("lose", [move_away, put_another_there])
def test_open_database_with_a_lost_file_refuses_all_use_until_it_is_back(store, submit, tmp_path, caplog, lose, name):
    job, file = submit(), tmp_path / name
    lose(file)
    there = {each.name: each.read_bytes() for each in tmp_path.glob("manta.db*")}
    for use in (submit, store.ping, lambda: store.read_once().__enter__(), store.engine.connect().begin):
        with pytest.raises(DatabaseLost, match=f"{file} is "):
            use()
    assert len([each for each in caplog.records if f"{file} is " in each.message]) == 1, "the log says it once"
    assert {each.name: each.read_bytes() for each in tmp_path.glob("manta.db*")} == there
    (tmp_path / f"{name}.away").replace(file)
    later = submit()
    with store.read() as session:
        assert {each.id for each in jobs.unfinished(session)} == {job.id, later.id}


def test_new_connection_makes_no_file_in_place_of_a_lost_database(store, submit, tmp_path):
    submit()
    move_away(tmp_path / "manta.db")
    store.database.readers.dispose()
    with pytest.raises(DatabaseLost):
        store.ping()
    assert not (tmp_path / "manta.db").exists()


@pytest.mark.parametrize("refilled", [False, True])
def test_emptied_database_is_refused_and_not_written_even_on_closing(tmp_path, make_spec, refilled):
    file = tmp_path / "new.db"
    store = Store(f"sqlite:///{file}")
    store.migrate()  # all of it is in the log, which SQLite would write into the file when it is closed
    store.write(lambda session: jobs.create(session, make_spec()))
    os.truncate(file, 0)
    with pytest.raises(DatabaseLost, match="was emptied"):
        store.write(lambda session: jobs.create(session, make_spec()))
    if refilled:  # in its place, as cp does: what SQLite knows of it and has in its log is of the one before
        file.write_bytes(b"a backup" * 1000)
    before = file.read_bytes()
    with pytest.raises(DatabaseLost):
        store.ping()
    store.close()
    assert file.read_bytes() == before


def test_write_during_which_the_database_is_lost_does_not_report_success(store, submit, tmp_path):
    job, file = submit(), tmp_path / "manta.db"
    with pytest.raises(DatabaseLost):
        store.write(lambda session: (setattr(jobs.get(session, job.id), "message", "lost"), move_away(file)))
    (tmp_path / "manta.db.away").rename(file)
    assert store.query(jobs.get, job.id).message != "lost"
    event.listen(store.engine, "commit", lambda _: move_away(file))
    with pytest.raises(OutcomeUnknown):
        store.write(lambda session: jobs.get(session, job.id))


def test_jobs_in_a_removed_write_ahead_log_are_in_the_database_after_it_is_closed(store, submit, tmp_path):
    job = submit()
    (tmp_path / "manta.db-wal").unlink()
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "manta.db")) as after:
        assert after.execute("SELECT id FROM jobs").fetchall() == [(job.id,)]


def test_log_removed_by_sqlite_itself_does_not_count_as_lost(store, submit, tmp_path):
    submit()
    store.database.close()
    assert not (tmp_path / "manta.db-wal").exists()
    submit()
