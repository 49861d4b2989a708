"""`manta db ...`, against databases without a service."""

import contextlib
import json

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from manta.api.cli import main
from manta.api.server import lock_home
from manta.service.store import Store, jobs
from manta.service.store.database import FIRST_RELEASED, newest_revision
from manta.workers.spec.reading import parse_job_spec


@pytest.fixture
def manta(tmp_path, database_url):
    """Runs `manta db ...` with the test's database; what it said."""

    def run(*arguments, code=0, **environment):
        settings = {"MANTA_HOME": str(tmp_path / "home"), "MANTA_DATABASE_URL": database_url, **environment}
        result = CliRunner().invoke(main.app, ["db", *map(str, arguments)], env=settings)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result.output

    return run


def test_db_upgrade_makes_a_missing_database_that_check_and_backup_refuse(manta, tmp_path):
    new = {"MANTA_DATABASE_URL": f"sqlite:///{tmp_path}/new.db"}
    for command in (["check"], ["backup", tmp_path / "backup.db"]):
        assert "there is no such file (`manta up` and `manta db upgrade` make one)" in manta(*command, code=2, **new)
    assert not (tmp_path / "new.db").exists() and not (tmp_path / "backup.db").exists()
    made = f"new.db was brought from revision none and is at revision {newest_revision()}.\n"
    assert manta("upgrade", **new).endswith(made)
    assert manta("upgrade", **new).endswith(f"new.db is at revision {newest_revision()}.\n")
    assert manta("check", **new).endswith(f"new.db is sound, at revision {newest_revision()}.\n")


def test_database_is_not_taken_from_a_release_under_which_jobs_run(manta, store, document):
    job, _ = store.write(lambda session: jobs.create(session, parse_job_spec(document)))

    def become(state):
        store.write(lambda session: session.execute(text(f"UPDATE jobs SET state = '{state}'")))

    store.migrate(FIRST_RELEASED)
    become("RUNNING")
    said = manta("upgrade", code=2)
    assert f"{job.id} may be running under a release that could not use" in said and "pause them" in said
    assert store.revision == FIRST_RELEASED
    become("PAUSED")
    assert f"was brought from revision {FIRST_RELEASED} and is at revision {newest_revision()}." in manta("upgrade")


def test_database_is_backed_up_and_restored_to_another_place(manta, store, document, tmp_path):
    job, _ = store.write(lambda session: jobs.create(session, parse_job_spec(document)))
    assert "is backed up to" in manta("backup", tmp_path / "backup.db")
    assert "is there already" in manta("backup", tmp_path / "backup.db", code=2)
    other = f"sqlite:///{tmp_path}/other/manta.db"
    said = manta("restore", tmp_path / "backup.db", "--database", other)
    assert "Unfinished jobs: 1.\n" in said
    assert "has jobs (1); with --replace" in manta("restore", tmp_path / "backup.db", "--database", other, code=2)
    manta("restore", tmp_path / "backup.db", "--replace", "--database", other)
    with contextlib.closing(Store(other)) as restored, restored.read() as session:
        assert jobs.get(session, job.id).state == "PAUSED"


def test_restore_is_refused_while_a_service_runs(manta, tmp_path):
    manta("backup", tmp_path / "backup.db")
    (tmp_path / "home").mkdir()
    with contextlib.closing(lock_home(tmp_path / "home")):
        said = manta("restore", tmp_path / "backup.db", code=2)
    assert "runs or starts already; end it with `manta down`" in said


def test_invalid_database_url_is_refused_without_printing_it(manta):
    assert manta("check", code=2, MANTA_DATABASE_URL="mysql://me:secret@there/x").startswith(
        "the database's URL begins with 'mysql', a kind of database that Manta does not work with; it has the form "
    )


def test_unwritable_backup_is_reported_without_an_error_number(manta, store):
    assert manta("backup", "/proc/x", code=2) == "cannot write /proc/x: No such file or directory\n"


def test_database_commands_print_json_for_programs(manta, store, document, tmp_path):
    store.write(lambda session: jobs.create(session, parse_job_spec(document)))

    def answer(*arguments, code=0):
        return json.loads(manta(*arguments, "--json", code=code))

    known = {"database": store.location, "revision": newest_revision()}
    assert answer("upgrade") == {**known, "before": newest_revision()}
    assert answer("check") == {**known, "sound": True, "problems": []}
    file = tmp_path / "backup.db"
    made = answer("backup", file)
    assert made == {"database": store.location, "file": str(file), "bytes": file.stat().st_size}
    other = f"sqlite:///{tmp_path}/other.db"
    restored = {"database": other, "file": str(file), "unfinished_jobs": 1}
    assert answer("restore", file, "--database", other) == restored
    with contextlib.closing(Store(other)) as damaged:
        damaged.write(lambda session: session.execute(text("DELETE FROM installation")))
    said = answer("check", "--database", other, code=2)
    assert (said["sound"], said["problems"]) == (False, ["installation has 0 rows, and must have one"])
