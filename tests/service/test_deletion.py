"""A job is deleted for good, and stays as a whole thing that can be deleted again where that is not possible."""

import shutil
import threading
from unittest.mock import Mock

import pytest

from manta.service.control import file_work, removal
from manta.service.control.file_work import FileWork, StillRunning
from manta.service.control.removal import FilesNotRemoved, RemovedFiles, StillRemoving, delete_job, remove_files
from manta.service.states import JobState
from manta.service.store import events, jobs, leases
from manta.service.store.errors import JobNotFound
from manta.service.store.tables import Metric
from manta.workers.node.folders import mark
from manta.workers.paths import Paths
from manta.workers.storage.files import LocalFiles


@pytest.fixture
def paths(tmp_path):
    return Paths.of(tmp_path)


@pytest.fixture
def job(store, submit, paths):
    """A job that is over, with two checkpoints and a log."""
    job_id = submit().id
    for state in (JobState.STARTING, JobState.SUCCEEDED):
        store.write(lambda session, to=state: jobs.transition(session, job_id, to))
    for name in ("step-00000005-generation-1", "step-00000010-generation-1"):
        folder = paths.checkpoint_folder(job_id) / name
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"x" * 100)
    paths.log_folder(job_id).mkdir()
    paths.rank_log(job_id, 0).write_bytes(b"y" * 10)
    return job_id


def types_of(store, job_id):
    with store.read() as session:
        return [event.type for event in events.page(session, job_id, limit=1000).items]


def test_job_deletion_removes_files_and_rows_after_the_cluster_released_it(store, paths, job):
    seen = []

    def release_job():
        seen.append((store.query(jobs.get, job).deletion_began_at is not None, paths.job_folder(job).exists()))

    deleted = delete_job(store, paths, job, release_job, FileWork())
    assert seen == [(True, True)], "marked, and nothing removed yet"
    assert deleted.files == RemovedFiles(checkpoints=2, logs=1, bytes=210)
    assert (deleted.rows["jobs"], deleted.rows["events"], deleted.rows["metrics"]) == (1, 4, 0)
    assert not paths.job_folder(job).exists()
    with store.read() as session, pytest.raises(JobNotFound):
        jobs.get(session, job)


def test_deletion_removes_checkpoints_in_another_folder_and_nothing_beside_them(tmp_path):
    paths = Paths.of(tmp_path / "home", tmp_path / "shared")
    for job_id in ("job-1", "job-2"):
        file = paths.checkpoint_folder(job_id) / "step-00000005-generation-1" / "data"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 100)
        paths.log_folder(job_id).mkdir(parents=True)
        paths.rank_log(job_id, 0).write_bytes(b"y" * 10)
    assert remove_files(paths, "job-1") == RemovedFiles(checkpoints=1, logs=1, bytes=110)
    assert sorted(each.name for each in (tmp_path / "shared").iterdir()) == ["job-2"]
    assert remove_files(paths, "job-1") == RemovedFiles()


def test_job_deletion_names_checkpoints_elsewhere_that_cannot_be_removed(tmp_path, monkeypatch):
    paths = Paths.of(tmp_path / "home", tmp_path / "shared")
    paths.checkpoint_folder("job-1").mkdir(parents=True)
    monkeypatch.setattr(LocalFiles, "remove_folder", lambda self, folder: None)
    with pytest.raises(
        FilesNotRemoved, match=rf"{tmp_path}/shared/job-1 cannot be removed \(some files could not be removed\)"
    ):
        remove_files(paths, "job-1")


def test_checkpoints_whose_folder_is_not_mounted_keep_the_job(tmp_path):
    paths = Paths.of(tmp_path / "home", tmp_path / "shared", "ours")
    mark(tmp_path / "shared", "ours")
    paths.checkpoint_folder("job-1").mkdir(parents=True)
    paths.log_folder("job-1").mkdir(parents=True)
    (tmp_path / "shared").rename(tmp_path / "unmounted")
    (tmp_path / "shared").mkdir()
    with pytest.raises(FilesNotRemoved, match=rf"{tmp_path}/shared is not mounted here"):
        remove_files(paths, "job-1")
    assert paths.log_folder("job-1").exists()
    (tmp_path / "shared").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "shared")
    remove_files(paths, "job-1")
    assert not paths.job_folder("job-1").exists() and not (tmp_path / "shared" / "job-1").exists()


def test_job_deletion_names_a_folder_that_cannot_be_removed_and_keeps_the_job(store, paths, job, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    paths.job_folder(job).rename(elsewhere)
    paths.job_folder(job).symlink_to(elsewhere)
    with pytest.raises(FilesNotRemoved, match=f"{job} cannot be removed.*delete {job} again"):
        delete_job(store, paths, job, lambda: None, FileWork())
    assert (elsewhere / "checkpoints").exists(), "what a link leads to is not ours"
    assert types_of(store, job)[-2:] == ["deletion_began", "deletion_failed"]
    paths.job_folder(job).unlink()
    assert delete_job(store, paths, job, lambda: None, FileWork()).rows["jobs"] == 1


@pytest.mark.parametrize("moment", ["release_job", "rmtree", "delete_metrics_batch", "end"])
def test_deletion_interrupted_at_any_moment_can_be_repeated(store, paths, job, monkeypatch, moment):
    class Killed(BaseException):
        pass

    def killed(*arguments):
        raise Killed

    with monkeypatch.context() as patch:
        if moment != "release_job":
            patch.setattr(removal.shutil if moment == "rmtree" else removal.deletion, moment, killed)
        with pytest.raises(Killed):
            delete_job(store, paths, job, killed if moment == "release_job" else lambda: None, FileWork())
    assert store.query(jobs.get, job).deletion_began_at is not None, "it says so"
    delete_job(store, paths, job, lambda: None, FileWork())
    assert not paths.job_folder(job).exists()


def test_job_without_files_is_deleted_too(store, paths, submit):
    job_id = submit().id
    store.write(lambda session: jobs.request_cancel(session, job_id))
    assert delete_job(store, paths, job_id, lambda: None, FileWork()).files == RemovedFiles()
    assert remove_files(paths, job_id) == RemovedFiles()


def test_deletion_of_a_job_without_checkpoints_or_logs_removes_its_folder(paths, job):
    for folder in (paths.checkpoint_folder(job), paths.log_folder(job)):
        shutil.rmtree(folder)
    (paths.job_folder(job) / "note").write_bytes(b"z" * 5)
    assert remove_files(paths, job) == RemovedFiles(bytes=5)
    assert not paths.job_folder(job).exists()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(13, "Permission denied", "/x/y"), "/x/y cannot be removed (Permission denied)"),
        (OSError("not a folder"), "{folder} cannot be removed (not a folder)"),
        (OSError(), "{folder} cannot be removed (OSError)"),
    ],
)
def test_deletion_that_fails_says_what_is_in_the_way(store, paths, job, monkeypatch, error, why):
    monkeypatch.setattr(removal.shutil, "rmtree", Mock(side_effect=error))
    with pytest.raises(FilesNotRemoved) as caught:
        delete_job(store, paths, job, lambda: None, FileWork())
    assert str(caught.value).startswith(why.format(folder=paths.job_folder(job)))
    with store.read() as session:
        (event,) = [each for each in events.page(session, job, limit=1000).items if each.type == "deletion_failed"]
    assert event.message == str(caught.value)


def test_job_deletion_removes_and_counts_all_metrics(store, paths, job, monkeypatch):
    metrics, bins = iter([3, 2, 0]), iter([4, 4, 4, 0])
    monkeypatch.setattr(removal.deletion, "delete_metrics_batch", lambda session, job_id: next(metrics))
    monkeypatch.setattr(removal.deletion, "delete_bins_batch", lambda session, job_id: next(bins))
    rows = delete_job(store, paths, job, lambda: None, FileWork()).rows
    assert (rows["metrics"], rows["metric_bins"]) == (5, 12)


def test_job_deletion_is_not_stopped_by_a_broken_link(store, paths, job):
    (paths.log_folder(job) / "newest").symlink_to("gone")
    assert delete_job(store, paths, job, lambda: None, FileWork()).files.logs == 2


def test_job_deletion_in_several_transactions_counts_all_rows(store, paths, job, monkeypatch):
    monkeypatch.setattr(removal.deletion, "METRICS_BATCH_ROWS", 2)

    def fill(session):
        session.add_all(Metric(job_id=job, step=step, generation=1, time=1.0, extra={}) for step in range(1, 6))
        jobs.get(session, job).step = 5

    store.write(fill)
    assert delete_job(store, paths, job, lambda: None, FileWork()).rows["metrics"] == 5
    with store.read() as session:
        assert session.query(Metric).count() == 0


def test_deleted_job_has_no_lease(store, paths, job):
    store.write(lambda session: leases.claim(session, job, "me"))
    delete_job(store, paths, job, lambda: None, FileWork())
    assert store.query(leases.owned, "me") == set()


@pytest.mark.parametrize("place", ["shared", "logs"])
def test_deletion_removes_logs_in_another_folder_and_nothing_beside_them(tmp_path, place):
    """With the checkpoints, or in a place of their own."""
    paths = Paths.of(tmp_path / "home", tmp_path / "shared", logs=tmp_path / place)
    for job_id in ("job-1", "job-2"):
        for folder in (paths.checkpoint_folder(job_id), paths.stored_log_folder(job_id)):
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(b"x" * 7)
    assert remove_files(paths, "job-1") == RemovedFiles(checkpoints=1, logs=1, bytes=14)
    assert not (tmp_path / "shared" / "job-1").exists() and not (tmp_path / place / "job-1").exists()
    assert (paths.stored_log_folder("job-2") / "file").exists()


def test_job_deletion_on_a_hanging_store_times_out_and_continues(store, paths, job, submit, monkeypatch):
    answers, work, remove, other = threading.Event(), FileWork(), removal.remove_files, submit().id
    store.write(lambda session: jobs.request_cancel(session, other))

    def hang(paths, job_id):
        assert job_id == other or answers.wait(20)
        return remove(paths, job_id)

    monkeypatch.setattr(removal, "remove_files", hang)
    monkeypatch.setattr(removal, "REMOVAL_SECONDS", 0.01)
    for _ in range(2):
        with pytest.raises(
            StillRemoving, match=f"{job} are not all removed yet .*continues in the background: check .*delete {job}"
        ):
            delete_job(store, paths, job, lambda: None, work)
    assert types_of(store, job)[-2:] == ["deletion_began", "deletion_failed"], "said once"
    monkeypatch.setattr(removal, "REMOVAL_SECONDS", 20.0)
    assert delete_job(store, paths, other, lambda: None, work).rows["jobs"], "another job's are removed meanwhile"
    answers.set()
    with pytest.raises(JobNotFound):  # where what had begun is quicker
        while delete_job(store, paths, job, lambda: None, work).rows["jobs"]:
            pass
    assert not paths.job_folder(job).exists()


def test_job_deletion_that_could_not_begin_says_so(store, paths, job, monkeypatch):
    answers, work = threading.Event(), FileWork()
    monkeypatch.setattr(file_work, "MAX_THREADS", 1)
    monkeypatch.setattr(removal, "REMOVAL_SECONDS", 0.01)
    with pytest.raises(StillRunning):
        work.run("another", 0.01, lambda: answers.wait(20))
    with pytest.raises(StillRemoving, match=r"\(1 others were under way for 0.01 s\).*; nothing was started: check "):
        delete_job(store, paths, job, lambda: None, work)
    answers.set()
    work.close()
    with pytest.raises(
        StillRemoving, match=rf"\(the service is ending\).* until the service is back, and delete {job} "
    ):
        delete_job(store, paths, job, lambda: None, work)
    assert paths.job_folder(job).exists()
