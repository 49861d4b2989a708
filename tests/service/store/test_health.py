"""What is wrong with a job database is said in sentences."""

import contextlib
import sqlite3

import pytest
from sqlalchemy import text

from manta.service.store import Store, health
from manta.service.store.database import newest_revision
from manta.service.store.errors import StoreUnusable


def run(store, *statements):
    for statement in statements:
        store.write(lambda session, statement=statement: session.execute(text(statement)))


def test_a_database_that_was_just_made_is_sound(store):
    assert health.problems(store) == []


def test_schema_that_differs_from_the_code_is_reported(store):
    run(store, "ALTER TABLE jobs ADD COLUMN odd INTEGER", "DROP TABLE ranks")
    problems = " ".join(health.problems(store))
    assert "remove_column" in problems and "odd" in problems
    assert "add_table" in problems and "ranks" in problems


def test_older_revision_is_reported_with_the_upgrade_command(store):
    run(store, "UPDATE alembic_version SET version_num = '0006'")
    said = f"its revision is 0006, and that of this release {newest_revision()}: `manta db upgrade`"
    assert health.problems(store) == [said]


def test_health_check_reports_a_missing_installation_row(store):
    run(store, "DELETE FROM installation")
    assert health.problems(store) == ["installation has 0 rows, and must have one"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        (b"", "it has neither jobs nor tables"),
        (b"no database at all" * 1000, "not a database"),
    ],
)
def test_file_that_is_not_a_job_database_is_reported(tmp_path, content, said):
    if content is not None:
        (tmp_path / "new.db").write_bytes(content)
    with contextlib.closing(Store(f"sqlite:///{tmp_path}/new.db")) as store, pytest.raises(StoreUnusable, match=said):
        health.problems(store)
    assert (tmp_path / "new.db").exists() == (content is not None)


def test_health_check_of_an_unreachable_database_server_asks_whether_it_is_running():
    url = "postgresql://me@127.0.0.1:1/manta"
    with contextlib.closing(Store(url)) as store, pytest.raises(StoreUnusable, match="is the server running"):
        health.problems(store)


def test_health_check_reports_rows_of_a_job_that_does_not_exist(tmp_path, empty_database):
    file = tmp_path / "manta.db"
    file.write_bytes(empty_database.read_bytes())
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT INTO state_changes (job_id, time, state) VALUES ('job_000000000000', 1.0, 'QUEUED')")
    with contextlib.closing(Store(f"sqlite:///{file}")) as store:
        assert health.problems(store) == ["row 1 of state_changes belongs to nothing in jobs"]
