"""Whether database and checkpoints can be used, without a trace of the question."""

from dataclasses import replace

import pytest

from manta.service.doctor import stores
from manta.service.settings import Settings
from manta.service.store import Store
from manta.service.store.location import sqlite_url
from manta.workers.storage.locations import ObjectPath


def test_doctor_accepts_a_database_that_does_not_exist_yet(tmp_path):
    (seen,) = stores.database(Settings(tmp_path / "home"))
    assert seen.verdict == "ok" and "is empty; the first `manta up` makes what is needed" in seen.message
    assert not (tmp_path / "home").exists()


def test_doctor_accepts_an_empty_database(tmp_path):
    (tmp_path / "manta.db").touch()
    (seen,) = stores.database(Settings(tmp_path))
    assert seen.verdict == "ok" and "is empty" in seen.message


def test_doctor_reports_a_home_whose_database_was_not_named(tmp_path):
    (tmp_path / "database").write_text("postgresql://me:***@there/manta")
    (seen,) = stores.database(Settings(tmp_path))
    assert seen.verdict == "problem" and "are in postgresql://me:***@there/manta, which was not named" in seen.message
    assert seen.advice == "name it with --database or MANTA_DATABASE_URL"
    (tmp_path / "database").write_text(sqlite_url(tmp_path / "manta.db"))
    assert [each.verdict for each in stores.database(Settings(tmp_path))] == ["ok"]


def test_a_database_of_this_release_answers(database_url, tmp_path):
    seen = list(stores.database(Settings(tmp_path, database_url=database_url)))
    assert {each.verdict for each in seen} == {"ok"}
    assert [each.subject for each in seen] == ["database", "clock"][: len(seen)]
    assert seen[0].message.endswith("at revision " + Store(database_url).revision)


def test_doctor_warns_of_a_database_of_another_release(store, database_url, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "newest_revision", lambda: "9999")
    assert next(iter(stores.database(Settings(tmp_path, database_url=database_url)))).verdict == "warning"


def test_doctor_reports_an_unreachable_database_without_its_password(tmp_path):
    url = "postgresql://me:secret@127.0.0.1:9/manta"
    (seen,) = stores.database(Settings(tmp_path, database_url=url))
    assert seen.verdict == "problem" and "secret" not in seen.message


@pytest.mark.parametrize(("seconds", "verdict"), [(0.2, "ok"), (-6.0, "warning"), (3600.0, "warning")])
def test_doctor_reports_clocks_that_differ_too_much(seconds, verdict):
    assert stores._skew("the database", seconds).verdict == verdict


def test_doctor_tests_the_checkpoint_folder_and_leaves_nothing_there(tmp_path):
    assert [each.verdict for each in stores.checkpoints(None)] == ["ok"]
    (seen,) = stores.checkpoints(tmp_path / "checkpoints")
    assert seen.verdict == "ok" and list((tmp_path / "checkpoints").iterdir()) == []


def test_doctor_reports_a_checkpoint_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    (seen,) = stores.checkpoints(tmp_path / "file" / "below")
    assert seen.verdict == "problem" and "Not a directory" in seen.message


def test_doctor_reports_an_object_store_that_does_not_answer(monkeypatch):
    class Away:
        def make_folder(self, folder):
            pass

        def write_atomically(self, file, content):
            raise OSError("s3://bucket: no answer")

    monkeypatch.setattr(stores, "files_of", lambda place: Away())
    (seen,) = stores.checkpoints(ObjectPath("s3", "bucket"))
    assert seen.verdict == "problem" and "no answer" in seen.message and "credentials" in seen.advice


def test_doctor_checks_the_log_folder_unless_it_is_that_of_checkpoints(tmp_path):
    settings = Settings(tmp_path, checkpoints=tmp_path / "there", logs=tmp_path / "there")
    assert [each.message for each in stores.logs(settings)] == [f"in {tmp_path}/there, with the checkpoints"]
    (seen,) = stores.logs(replace(settings, logs=tmp_path / "logs"))
    assert (seen.subject, seen.verdict) == ("logs", "ok")
    (tmp_path / "file").touch()
    (seen,) = stores.logs(replace(settings, logs=tmp_path / "file" / "below"))
    assert (seen.subject, seen.verdict) == ("logs", "problem")
    assert "home alone" in next(stores.logs(Settings(tmp_path))).message
