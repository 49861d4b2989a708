"""`manta db ...` and `manta doctor`, without a service."""

import contextlib
import json

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from manta.api.cli import doctor as command
from manta.api.cli import main
from manta.api.cli.main import app
from manta.api.server import lock_home
from manta.service.doctor import Finding
from manta.service.revisions import newest_revision
from manta.service.store import Store, jobs
from manta.service.store.database import FIRST_RELEASED
from manta.workers.spec.reading import parse_job_spec
from tests.api.support.keys import add_key


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
    for words in (["check"], ["backup", tmp_path / "backup.db"]):
        assert "there is no such file (`manta up` and `manta db upgrade` make one)" in manta(*words, code=2, **new)
    assert not (tmp_path / "new.db").exists() and not (tmp_path / "backup.db").exists()
    made = f"new.db was migrated from revision none and is at revision {newest_revision()}.\n"
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
    assert f"was migrated from revision {FIRST_RELEASED} and is at revision {newest_revision()}." in manta("upgrade")


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


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    """Runs the command on made-up findings, in a home without a service or with MANTA_URL."""

    def run(*arguments, seen=(), code=0, **environment):
        monkeypatch.setattr(command, "checks", lambda settings, job: {"all": lambda: seen})
        settings = {"MANTA_HOME": str(tmp_path / "home"), **environment}
        result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env=settings)
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_doctor_prints_a_line_per_finding_with_advice(doctor, tmp_path):
    seen = [Finding("disk", "ok", "room"), Finding("limits", "warning", "few", "raise them")]
    assert doctor(seen=seen).splitlines() == [
        "ok    disk: room",
        "WARN  limits: few",
        "      -> raise them",
        f"-     service: no service is running with home {tmp_path}/home",
        "0 problems, 1 warning",
    ]


def test_doctor_exits_with_1_if_there_is_a_problem(doctor):
    output = doctor(seen=[Finding("torch", "problem", "no", "install it")], code=1)
    assert "FAIL  torch: no" in output and output.endswith("1 problem, 0 warnings\n")


def test_doctor_prints_findings_and_counts_as_json(doctor):
    document = json.loads(doctor("--json", seen=[Finding("disk", "ok", "room")]))
    assert document["items"][0] == {"subject": "disk", "verdict": "ok", "message": "room", "advice": ""}
    assert document["counts"] == {"ok": 1, "warning": 0, "problem": 0, "skipped": 1}


def test_doctor_checks_the_service_and_its_nodes(doctor, service):
    output = doctor(MANTA_URL=service.url)
    assert f"ok    service: {service.url} responds and can run jobs" in output
    assert "nodes: " in output


def test_doctor_names_closed_ports_and_nodes_that_were_left_out(doctor, service):
    assert "ok    ports: 2 nodes reach each other (10 connections tried)" in doctor(MANTA_URL=service.url)
    service.control.closed_ports = ["port 7 of node a cannot be reached from node b: open it"]
    service.control.left_out = ["Ray's head forgets: give it a Redis"]
    lines = doctor(MANTA_URL=service.url, code=1).splitlines()
    assert lines[-4:] == [
        "FAIL  ports: port 7 of node a cannot be reached from node b",
        "      -> open it",
        "WARN  cluster: Ray's head forgets: give it a Redis",
        "1 problem, 1 warning",
    ]


def test_doctor_with_a_read_key_skips_the_port_check(doctor, service):
    key = add_key(service.store, "read")
    assert "-     ports: whether the nodes reach each other was not checked" in doctor(
        MANTA_URL=service.url, MANTA_API_KEY=key
    )


def test_a_service_that_does_not_answer_is_a_problem(doctor):
    assert "FAIL  service: " in doctor(MANTA_URL="http://127.0.0.1:9", code=1)


def test_doctor_refuses_an_invalid_or_missing_job_file(doctor, tmp_path):
    (tmp_path / "job.yaml").write_text("model: 3")
    doctor(tmp_path / "job.yaml", code=2)
    assert "none.yaml: No such file or directory" in doctor(tmp_path / "none.yaml", code=2)
