"""Jobs that ended long ago are deleted where somebody asked for it, and never one that may not be old."""

import asyncio
import os
import threading
import time
from unittest.mock import Mock

import pytest

from manta.service.cluster.errors import ClusterUnavailable
from manta.service.control import removal
from manta.service.control.file_work import FileWork, StillRunning
from manta.service.control.removal import (
    CONFIRMED_SECONDS,
    DAY_SECONDS,
    ConfirmedExpiry,
    Retention,
    has_newer_files,
    modified_since,
)
from manta.service.states import JobState
from manta.service.store import audit, deletion, events, exports, jobs, pauses_and_retries
from manta.service.store.errors import JobNotFound
from manta.workers.paths import Paths
from manta.workers.storage.files import LocalFiles

DAYS = 30.0
OLD = time.time() - (DAYS + 1) * DAY_SECONDS


@pytest.fixture
def paths(tmp_path):
    return Paths.of(tmp_path)


@pytest.fixture
def clock():
    """A clock that nobody sets but the test: `clock[0]` is the time."""
    return [0.0]


@pytest.fixture
def check(store, paths, clock):
    """Looks once, so many seconds after the last time; the jobs that the cluster let go of since the start."""
    kept, let_go_of = Retention(paths, DAYS, FileWork(), lambda: clock[0]), []

    async def release_job(job_id):
        let_go_of.append(job_id)

    def once(later=0.0, release_job=release_job):
        clock[0] += later
        asyncio.run(kept.check(store, release_job))
        return let_go_of

    return once


@pytest.fixture
def ended(store, submit, paths):
    """Makes a job that ended at `at`, with a checkpoint that is as old."""

    def make(at=OLD, state=JobState.SUCCEEDED, started=True):
        job_id = submit().id
        for to in (JobState.STARTING, state):
            store.write(lambda session, to=to: jobs.transition(session, job_id, to))

        def age(session):
            job = jobs.get(session, job_id)
            job.finished_at, job.generation = at, int(started)

        store.write(age)
        if started:
            folder = paths.checkpoint_folder(job_id) / "step-00000005-generation-1"
            folder.mkdir(parents=True)
            (folder / "data").write_bytes(b"x")
            for each in (folder / "data", folder, folder.parent, folder.parent.parent):
                os.utime(each, (at, at))
        return job_id

    return make


def is_there(store, job_id):
    with store.read() as session:
        try:
            jobs.get(session, job_id)
        except JobNotFound:
            return False
        return True


def test_expired_job_is_deleted_after_an_hour_of_consistent_looks(store, paths, check, ended):
    old, young = ended(), ended(at=time.time() - (DAYS - 1) * DAY_SECONDS)
    for later in (0.0, 600.0, CONFIRMED_SECONDS - 601.0):
        assert check(later) == []
        assert is_there(store, old)
    assert check(1.0) == [old]
    assert not is_there(store, old)
    assert not paths.job_folder(old).exists()
    assert is_there(store, young)
    assert paths.job_folder(young).exists()
    (entry,) = store.query(audit.page, None).items
    assert store.query(deletion.deleted_ones, [old, young]) == {old}
    assert (entry.operation, entry.target, entry.key_name, entry.status) == (
        "delete_expired_job", old, "the service", 200,
    )  # fmt: skip


def test_expired_jobs_that_cannot_be_deleted_do_not_block_others(store, paths, check, ended, monkeypatch):
    monkeypatch.setattr(removal, "JOBS_PER_CHECK", 2)
    kept, others = [ended(at=OLD - 1) for _ in range(2)], [ended() for _ in range(3)]
    for job in kept:
        os.utime(paths.checkpoint_folder(job))
    check()
    check(CONFIRMED_SECONDS)
    assert all(is_there(store, job) for job in (*kept, *others)), "two at a time, those that ended first before others"
    check(600.0)
    assert [is_there(store, job) for job in others] == [False, False, True]
    check(600.0)
    assert [is_there(store, job) for job in (*kept, *others)] == [True, True, False, False, False]


def test_clock_set_forward_for_less_than_an_hour_deletes_no_job(store, check, ended, monkeypatch):
    job, real = ended(at=time.time() - DAY_SECONDS), time.time
    for ahead in (0.0, 365 * DAY_SECONDS, 0.0, 365 * DAY_SECONDS):
        monkeypatch.setattr(removal.time, "time", lambda ahead=ahead: real() + ahead)
        assert check(CONFIRMED_SECONDS - 1.0) == []
    assert is_there(store, job)


def test_expired_job_that_was_retried_meanwhile_is_kept(store, check, ended, monkeypatch):
    job = ended(state=JobState.FAILED)
    check()
    expired = deletion.expired

    def then_retried(session, before):
        jobs_due = expired(session, before)
        store.write(lambda session: pauses_and_retries.request_retry(session, job))
        return jobs_due

    monkeypatch.setattr(deletion, "expired", then_retried)
    assert check(CONFIRMED_SECONDS) == []
    assert store.query(jobs.get, job).deletion_began_at is None
    assert store.query(audit.page, None).items == []


def test_expired_job_with_files_newer_than_its_row_is_kept(store, paths, check, ended):
    """A restored database does not know what the job has done since."""
    job = ended()
    os.utime(paths.checkpoint_folder(job) / "step-00000005-generation-1" / "data")
    check()
    assert check(CONFIRMED_SECONDS) == []
    assert is_there(store, job)


def test_expired_job_that_never_started_needs_no_file_check(store, check, ended):
    job = ended(started=False)
    check()
    assert check(CONFIRMED_SECONDS) == [job]
    assert not is_there(store, job)


def test_expired_job_is_kept_while_its_weights_are_exported(store, check, ended):
    job = ended()
    begun = store.write(lambda session: exports.begin(session, job, "ckpt_1", "/out", "hf", None)).id
    check()
    assert check(CONFIRMED_SECONDS) == [] and is_there(store, job)
    store.write(lambda session: exports.end(session, begun, None))
    check()
    assert check(CONFIRMED_SECONDS) == [job]


def test_expired_job_that_the_cluster_still_holds_is_retried_in_an_hour(store, check, ended):
    first, second = ended(at=OLD - 1), ended()

    async def busy_with_the_first(job_id):
        if job_id == first:
            raise ClusterUnavailable(TimeoutError("busy"))

    check()
    check(CONFIRMED_SECONDS, busy_with_the_first)
    assert is_there(store, first)
    assert not is_there(store, second), "the others do not wait for it"
    assert check() == []
    assert check(CONFIRMED_SECONDS) == [first]
    assert len(store.query(audit.page, None).items) == 2, "begun once for each"


def test_expired_jobs_are_deleted_oldest_first_and_a_limited_number_at_once(store, check, ended, monkeypatch):
    monkeypatch.setattr(removal, "JOBS_PER_CHECK", 2)
    last, first, second = ended(at=OLD), ended(at=OLD - 20), ended(at=OLD - 10)
    check()
    assert check(CONFIRMED_SECONDS) == [first, second]
    assert is_there(store, last)


def test_expired_jobs_are_finished_ones_only(store, submit, ended):
    job, waiting = ended(), submit().id
    assert store.query(deletion.expired, time.time()) == {job: True}
    assert store.query(deletion.expired, OLD) == {}
    assert store.query(jobs.get, waiting).finished_at is None


def test_retention_continues_after_a_failed_look(paths, store, monkeypatch):
    monkeypatch.setattr(removal, "POLL_SECONDS", 0.001)
    looks = []

    async def check(_store, _release_job):
        looks.append(1)
        if len(looks) < 3:
            raise RuntimeError("the database is away")
        raise asyncio.CancelledError

    keeping = removal.Retention(paths, 1.0, FileWork())
    monkeypatch.setattr(keeping, "check", check)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(keeping.run(store, None))
    assert len(looks) == 3


def test_expiry_of_a_job_missing_from_one_look_is_confirmed_anew():
    seen = ConfirmedExpiry(CONFIRMED_SECONDS)
    assert seen.confirmed(["a", "b"], 0.0) == []
    assert seen.confirmed(["b"], 10.0) == []
    assert seen.confirmed(["a", "b"], CONFIRMED_SECONDS) == ["b"]
    assert seen.confirmed(["a", "b"], CONFIRMED_SECONDS + 1) == [], "the one that was named begins anew too"


@pytest.mark.parametrize("newer", ["", "checkpoints", "checkpoints/step-00000005-generation-1/data"])
def test_recent_files_in_a_jobs_folder_are_noticed(paths, ended, newer):
    folder = paths.job_folder(ended())
    assert not modified_since(folder, OLD + 1)
    os.utime(folder / newer)
    assert modified_since(folder, OLD + 1)


def test_missing_folder_proves_no_expiry_if_all_others_are_missing_too(paths, ended, tmp_path):
    one, other = (paths.job_folder(ended()) for _ in range(2))
    one.rename(tmp_path / "one")
    assert not modified_since(one, OLD + 1), "it was removed by hand"
    other.rename(tmp_path / "other")
    assert modified_since(one, OLD + 1)
    other.parent.rmdir()
    assert modified_since(one, OLD + 1)


def test_obstacle_to_a_deletion_is_reported_once(store, ended):
    job = ended()
    for why in ("read-only", "read-only", "away"):
        store.write(lambda session, why=why: deletion.record_obstacle(session, job, why))
    with store.read() as session:
        said = [event.message for event in events.page(session, job).items if event.type == "deletion_failed"]
    assert said == ["read-only", "away"]


@pytest.mark.parametrize("newer", [None, "checkpoints", "logs", "home"])
def test_expired_job_with_newer_files_anywhere_is_kept(tmp_path, newer):
    """One that has nothing in the home any more, but elsewhere, is as old as that says."""
    paths = Paths.of(tmp_path / "home", tmp_path / "shared", logs=tmp_path / "logs")
    for kind, folder in (("checkpoints", paths.checkpoint_folder("j")), ("logs", paths.stored_log_folder("j"))):
        folder.mkdir(parents=True)
        os.utime(folder, (OLD, OLD) if newer != kind else None)
    if newer == "home":
        paths.log_folder("j").mkdir(parents=True)
    assert has_newer_files(paths, "j", time.time() - DAYS * DAY_SECONDS) is (newer is not None)


def test_expired_job_is_kept_while_the_checkpoint_store_is_missing(tmp_path):
    paths, moment = Paths.of(tmp_path / "home", tmp_path / "shared"), time.time() - DAYS * DAY_SECONDS
    paths.job_folder("j").mkdir(parents=True)
    os.utime(paths.job_folder("j"), (OLD, OLD))
    assert has_newer_files(paths, "j", moment), "the file system is not mounted"
    (tmp_path / "shared").mkdir()
    assert has_newer_files(paths, "j", moment), "nor is it here"
    paths.checkpoint_folder("other").mkdir(parents=True)
    assert not has_newer_files(paths, "j", moment), "it never saved anything, or its checkpoints were removed by hand"


def test_expired_job_with_a_hanging_store_is_kept(tmp_path, monkeypatch):
    paths = Paths.of(tmp_path / "home", logs=tmp_path / "logs")
    monkeypatch.setattr(LocalFiles, "newest", Mock(side_effect=OSError("no answer")))
    assert has_newer_files(paths, "j", time.time())


def test_expired_job_with_hanging_files_is_kept(store, check, ended, monkeypatch):
    first, second = ended(at=OLD - 1), ended()
    answers = threading.Event()
    monkeypatch.setattr(removal, "FILE_SECONDS", 0.01)
    monkeypatch.setattr(removal, "has_newer_files", lambda *about: not answers.wait(60))
    check()
    assert check(CONFIRMED_SECONDS) == []
    answers.set()
    monkeypatch.undo()
    check()
    assert check(CONFIRMED_SECONDS) == [first, second]


def test_expired_jobs_with_unresponsive_files_do_not_block_others(store, check, ended, monkeypatch):
    """One look takes on two of them; jobs that it has not come to are the next one's."""
    silent, answering, tried = [ended(at=OLD - 10 + n) for n in range(5)], [ended(at=OLD - 9.5), ended()], []

    def run(work, about, seconds, do):
        tried.append(about[1])
        if about[1] in silent:
            raise StillRunning(seconds)
        return do()

    monkeypatch.setattr(FileWork, "run", run)
    check()
    assert check(CONFIRMED_SECONDS) == answering[:1], "the one after the first that does not answer"
    assert check(600.0) == answering[:1]
    assert check(600.0) == answering
    assert [job for job in tried if job in silent] == silent, "each was tried once, and is again after an hour"
    check(CONFIRMED_SECONDS - 600.0)
    assert tried[-2:] == silent[:2]
    assert all(is_there(store, job) for job in silent)
