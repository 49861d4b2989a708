"""A job database becomes a file and comes back, also on another kind of database, and nothing starts by itself then."""

import math
import os
import sqlite3
import time
from contextlib import closing
from unittest.mock import Mock

import pytest
from sqlalchemy import create_engine, select

from manta.service.states import JobState
from manta.service.store import (
    Store,
    backup_file,
    events,
    generations,
    health,
    job_rows,
    jobs,
    metrics,
    pauses_and_retries,
)
from manta.service.store.backup_file import (
    EVENT_IDS_SKIPPED,
    DatabaseInUse,
    DatabaseNotEmpty,
    NotABackup,
    back_up,
    restore,
)
from manta.service.store.errors import StoreOfNewerRelease, StoreUnusable
from manta.service.store.installation_tables import ControlPlaneRow, Lease
from manta.service.store.tables import Base, Job

NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A server may take its time to end connections that were closed."""
    monkeypatch.setattr(backup_file, "CLOSING_SECONDS", 60.0)


@pytest.fixture
def elsewhere(kind_of_database, postgres_or_none, tmp_path):
    """The URL of an empty database of the other kind."""
    if kind_of_database == "postgresql":
        yield f"sqlite:///{tmp_path}/elsewhere/manta.db"
        return
    name = postgres_or_none.make_empty()
    yield postgres_or_none.url(name)
    postgres_or_none.drop(name)


@pytest.fixture
def postgres_or_none(request):
    """The server, which both directions need."""
    return request.getfixturevalue("postgres")


@pytest.fixture
def jobs_of_all_kinds(store, submit):
    """One that runs, with everything that is hard to keep; one in the queue; one that is over."""
    running, queued, over = submit(), submit(), submit()

    def fill(session):
        jobs.transition(session, running.id, JobState.STARTING)
        generation = generations.begin(session, running.id, "submitted", False)
        rows = [{"step": 1, "loss": math.nan, "odd": math.inf}, {"step": 2, "loss": 2.5}]
        metrics.record(session, running.id, generation, 0, 1, rows)
        jobs.transition(session, running.id, JobState.RUNNING)
        events.append(session, running.id, "told", "a\0b \u00e9", data={"nested": [1, {"x": math.nan}]})
        jobs.request_cancel(session, over.id)

    store.write(fill)
    return running, queued, over


def everything(store):
    """All rows of all tables, without what differs between two databases of the same content."""
    with store.read() as session:
        return {
            table.name: sorted(repr(tuple(row)) for row in session.execute(select(table)))
            for table in Base.metadata.sorted_tables
        }


def opened(url):
    return closing(Store(url))


def test_backup_has_every_row_and_is_private(store, jobs_of_all_kinds, tmp_path):
    back_up(store, tmp_path / "backup.db")
    with opened(f"sqlite:///{tmp_path}/backup.db") as copy:
        assert everything(copy) == everything(store)
        assert health.problems(copy) == []
    assert (tmp_path / "backup.db").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".backup*"))


def test_database_backup_is_a_single_file_without_a_write_ahead_log(store, jobs_of_all_kinds, tmp_path):
    """A log beside it would be forgotten by whoever carries it away."""
    (tmp_path / "kept").mkdir()
    back_up(store, tmp_path / "kept" / "backup.db")
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["backup.db"]
    assert journal_of(tmp_path / "kept" / "backup.db") == "delete"


def journal_of(file):
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("PRAGMA journal_mode").fetchone()[0]


def test_failed_database_backup_leaves_no_file(store, tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    for name in ("copy_to", "_copy_rows"):
        monkeypatch.setattr(backup_file, name, Mock(side_effect=sqlite3.OperationalError("database or disk is full")))
    with pytest.raises(StoreUnusable, match="disk is full"):
        back_up(store, tmp_path / "kept" / "backup.db")
    assert not list((tmp_path / "kept").iterdir())


def test_backup_overwrites_no_existing_file(store, tmp_path):
    (tmp_path / "backup.db").write_text("something else")
    with pytest.raises(FileExistsError, match=r"backup\.db is there already"):
        back_up(store, tmp_path / "backup.db")


@pytest.fixture
def far_from_utc(monkeypatch):
    """The machine's clock shows another zone's time."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()
        yield
    time.tzset()


def test_a_backup_is_restored_into_another_kind_of_database(
    store, jobs_of_all_kinds, tmp_path, elsewhere, monkeypatch, far_from_utc
):
    running, queued, over = jobs_of_all_kinds
    monkeypatch.setattr(backup_file, "BATCH_ROWS", 2)  # there are more than that
    back_up(store, tmp_path / "backup.db")
    os.utime(tmp_path / "backup.db", (NOW, NOW - 86_400))
    assert restore(elsewhere, tmp_path / "backup.db", replace=False, now=NOW) == 2
    with opened(elsewhere) as other:
        assert health.problems(other) == []
        before, after = everything(store), everything(other)
        assert {name for name in before if before[name] != after[name]} == {"events", "jobs", "state_changes"}
        with other.read() as session:
            states = jobs.states(session, [running.id, queued.id, over.id])
            assert states == {running.id: "RUNNING", queued.id: "PAUSED", over.id: "CANCELLED"}
            assert jobs.get(session, queued.id).reason == "restored"
            assert math.isnan(metrics.series(session, running.id).series["loss"][0])
            last = events.page(session, running.id).items[-1]
            assert (last.type, last.time, last.generation, last.step) == (
                "restored",
                NOW,
                1,
                jobs.get(session, running.id).step,
            )
            assert "from a backup of 2027-01-14 08:00 UTC;" in last.message, "when it was made, not when it was read"
            assert "restored" not in [event.type for event in events.page(session, over.id).items], "it is over"
        other.write(
            lambda session: pauses_and_retries.request_resume(session, queued.id)
        )  # the next number of a change of state
        assert other.write(lambda session: events.append(session, over.id, "told", "later")) > EVENT_IDS_SKIPPED


def test_restored_database_gives_new_events_ids_above_all_earlier_ones(store, submit, tmp_path, elsewhere):
    job = submit()
    store.write(lambda session: jobs.request_cancel(session, job.id))
    back_up(store, tmp_path / "backup.db")
    restore(elsewhere, tmp_path / "backup.db", replace=False, now=NOW)
    with opened(elsewhere) as other:
        assert other.write(lambda session: events.append(session, job.id, "told", "later")) > EVENT_IDS_SKIPPED


def test_restored_database_has_no_control_planes_or_owners_and_keeps_its_epochs(store, submit, tmp_path, elsewhere):
    job = submit()
    store.write(lambda s: s.add_all([
        ControlPlaneRow(id="cp_1", place="here", ray="its Ray", lease_until=NOW + 1e6),
        Lease(name=job.id, owner="cp_1", epoch=7),
    ]))  # fmt: skip
    back_up(store, tmp_path / "backup.db")
    restore(elsewhere, tmp_path / "backup.db", replace=False, now=NOW)
    with opened(elsewhere) as other, other.read() as session:
        assert session.scalars(select(ControlPlaneRow)).all() == []
        lease = session.get(Lease, job.id)
        assert (lease.owner, lease.epoch) == (None, 7)
    with opened(f"sqlite:///{tmp_path}/backup.db") as backup, backup.read() as session:
        assert session.get(Lease, job.id).owner == "cp_1", "the backup stays as it is"
        assert session.get(Job, job.id).state == "QUEUED"


def test_restore_into_a_database_in_use_is_refused_and_changes_nothing(
    store, jobs_of_all_kinds, tmp_path, elsewhere, monkeypatch
):
    back_up(store, tmp_path / "backup.db")
    restore(elsewhere, tmp_path / "backup.db", replace=False, now=NOW)
    monkeypatch.setattr(backup_file, "CLOSING_SECONDS", 0.1)
    with opened(elsewhere) as other:
        before = everything(other)
        with pytest.raises(DatabaseInUse, match="is in use"):
            restore(elsewhere, tmp_path / "backup.db", replace=True, now=NOW)
        assert everything(other) == before


def test_restore_waits_for_a_connection_that_is_about_to_close(
    store, submit, tmp_path, elsewhere, kind_of_database, monkeypatch
):
    """PostgreSQL shows one for a moment after its client has closed it."""
    if kind_of_database == "postgresql":
        return  # whose elsewhere is a file
    submit()
    back_up(store, tmp_path / "backup.db")
    other, looks = create_engine(elsewhere).connect(), []
    usual = backup_file._other_connections

    def count(connection):
        looks.append(usual(connection))
        other.close()
        other.engine.dispose()
        return looks[-1]

    monkeypatch.setattr(backup_file, "_other_connections", count)
    restore(elsewhere, tmp_path / "backup.db", replace=False, now=NOW)
    assert looks[0] == 1 and looks[-1] == 0


def test_restore_replaces_existing_jobs_only_if_asked_to(store, jobs_of_all_kinds, tmp_path, elsewhere):
    back_up(store, tmp_path / "backup.db")
    restore(elsewhere, tmp_path / "backup.db", replace=False, now=NOW)
    with pytest.raises(DatabaseNotEmpty, match=r"has jobs \(3\); with --replace"):
        restore(elsewhere, tmp_path / "backup.db", replace=False, now=NOW)
    restore(elsewhere, tmp_path / "backup.db", replace=True, now=NOW + 1)
    with opened(elsewhere) as other, other.read() as session:
        assert len(job_rows.page(session).items) == 3


@pytest.mark.parametrize("content", [None, b"", b"no database at all" * 100, "another"])
def test_restore_from_a_file_that_is_not_a_backup_is_refused(tmp_path, content):
    file = tmp_path / "backup.db"
    if content == "another":
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("CREATE TABLE cats (name TEXT)")
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(NotABackup, match=r"backup\.db"):
        restore(f"sqlite:///{tmp_path}/manta.db", file, replace=False, now=NOW)
    assert not (tmp_path / "manta.db").exists()


def test_a_backup_of_a_newer_release_is_refused(store, tmp_path):
    back_up(store, tmp_path / "backup.db")
    with closing(sqlite3.connect(tmp_path / "backup.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("UPDATE compatibility SET oldest_reader = '9999'")
    with pytest.raises(StoreOfNewerRelease, match="9999"):
        restore(f"sqlite:///{tmp_path}/new/manta.db", tmp_path / "backup.db", replace=False, now=NOW)


def test_restore_replaces_a_database_that_cannot_be_read(store, submit, tmp_path):
    job = submit()
    back_up(store, tmp_path / "backup.db")
    damaged = tmp_path / "damaged" / "manta.db"
    damaged.parent.mkdir()
    (damaged.parent / "manta.db.0006").write_text("a copy for those who want to go back")
    for name in ("manta.db", "manta.db-wal", "manta.db-shm"):
        (damaged.parent / name).write_bytes(b"nothing that anybody can read " * 1000)
    restore(f"sqlite:///{damaged}", tmp_path / "backup.db", replace=False, now=NOW)
    assert sorted(file.name for file in damaged.parent.iterdir()) == ["manta.db", "manta.db.0006"]
    assert damaged.stat().st_mode & 0o777 == 0o600
    assert journal_of(damaged) == "delete"
    with opened(f"sqlite:///{damaged}") as other, other.read() as session:
        assert jobs.get(session, job.id).state == "PAUSED"
