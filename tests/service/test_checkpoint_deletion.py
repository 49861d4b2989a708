"""A checkpoint goes with its files where nobody needs it, and what a trainer reports leads nowhere else."""

import threading

import pytest
from s3_fixtures import bucket, s3_server  # noqa: F401 - fixtures

from manta.service.control import removal
from manta.service.control.file_work import FileWork
from manta.service.control.removal import (
    CheckpointNeeded,
    CheckpointNotRemoved,
    CheckpointStillRemoving,
    delete_checkpoint,
    delete_checkpoint_in_time,
)
from manta.service.states import JobState
from manta.service.store import checkpoints, events, exports, generations, jobs
from manta.service.store.errors import CheckpointNotFound, JobNotFound
from manta.workers.checkpoint.catalog import (
    MANIFEST,
    FrozenWeights,
    Manifest,
    checkpoint_path,
    frozen_path,
    refer,
    seal,
)
from manta.workers.checkpoint.checksums import SummedFiles
from manta.workers.checkpoint.pruning import remove
from manta.workers.paths import Paths
from manta.workers.storage.files import files_of


@pytest.fixture
def paths(tmp_path):
    return Paths.of(tmp_path)


@pytest.fixture
def job(store, submit, paths):
    """A RUNNING job with whole checkpoints of steps 5 and 10, and one of step 15 that is being saved."""
    job_id = submit().id

    def begin(session):
        generations.begin(session, job_id, "submitted", False)
        for state in (JobState.STARTING, JobState.RUNNING):
            jobs.transition(session, job_id, state)
        for step in (5, 10, 15):
            place = checkpoint_path(paths.checkpoint_folder(job_id), step, 1)
            row = checkpoints.begin(session, job_id, 1, step, str(place))
            if step < 15:
                checkpoints.complete(session, row.id, 100)

    store.write(begin)
    for step in (5, 10, 15):
        folder = checkpoint_path(paths.checkpoint_folder(job_id), step, 1)
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text("{}")
        (folder / "data").write_bytes(b"x" * 98)
    return job_id


def id_of(job, step):
    return f"ckpt_{job.removeprefix('job_')}_{step}_1"


def folder(paths, job, step):
    return checkpoint_path(paths.checkpoint_folder(job), step, 1)


def lies_at(store, job, step, place):
    store.write(lambda session: setattr(checkpoints.get(session, job, id_of(job, step)), "path", str(place)))


def deletions(store, job):
    with store.read() as session:
        return [each for each in events.page(session, job, limit=1000).items if each.type == "checkpoint_deleted"]


def test_checkpoint_deletion_removes_files_and_row_and_leaves_others(store, paths, job):
    deleted = delete_checkpoint(store, paths, job, id_of(job, 5))
    assert deleted.state == "deleted"
    assert not folder(paths, job, 5).exists() and folder(paths, job, 10).exists()
    (event,) = deletions(store, job)
    assert (event.step, event.data["bytes"], event.data["forced"]) == (5, 100, False)
    assert delete_checkpoint(store, paths, job, id_of(job, 5)).state == "deleted", "again changes nothing"
    assert len(deletions(store, job)) == 1


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PAUSED, JobState.FAILED])
def test_newest_whole_checkpoint_of_an_unfinished_job_is_deleted_by_force_only(store, paths, job, state):
    store.write(lambda session: setattr(jobs.get(session, job), "state", state))
    with pytest.raises(CheckpointNeeded, match="force=true"):
        delete_checkpoint(store, paths, job, id_of(job, 10))
    assert folder(paths, job, 10).exists()
    delete_checkpoint(store, paths, job, id_of(job, 10), force=True)
    assert not folder(paths, job, 10).exists()
    assert deletions(store, job)[0].data["forced"]
    with pytest.raises(CheckpointNeeded, match="newest whole"):
        delete_checkpoint(store, paths, job, id_of(job, 5))


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLED])
def test_checkpoints_of_a_finished_job_are_all_deletable(store, paths, job, state):
    store.write(lambda session: setattr(jobs.get(session, job), "state", state))
    for step in (10, 15):
        assert delete_checkpoint(store, paths, job, id_of(job, step)).state == "deleted"


def test_frozen_weights_go_with_the_last_checkpoint_of_a_job_that_is_over(store, paths, job):
    frozen = frozen_path(paths.checkpoint_folder(job), 5, 1)
    frozen.mkdir()
    crc32 = seal(frozen, Manifest(job, 1, 5, {}, {}))
    for step in (5, 10):
        refer(
            folder(paths, job, step),
            FrozenWeights(frozen.name, Manifest(job, 1, 5, {}, {}), crc32),
            files := SummedFiles(),
        )
        seal(folder(paths, job, step), manifest_with(job, step, files))
    delete_checkpoint(store, paths, job, id_of(job, 5))
    store.write(lambda session: jobs.transition(session, job, JobState.FAILED))
    assert frozen.exists(), "the one of step 10 needs it"
    delete_checkpoint(store, paths, job, id_of(job, 10), force=True)
    assert not frozen.exists()


def manifest_with(job, step, files):
    """A manifest of these files."""
    sizes = {name: sums.size for name, sums in files.sums.items()}
    return Manifest(job, 1, step, sizes, {}, blocks={name: list(sums.blocks) for name, sums in files.sums.items()})


def test_checkpoint_being_saved_or_restored_is_not_deleted_even_by_force(store, paths, job):
    with pytest.raises(CheckpointNeeded, match="is being saved"):
        delete_checkpoint(store, paths, job, id_of(job, 15), force=True)

    store.write(lambda session: jobs.transition(session, job, JobState.RECOVERING))
    store.write(lambda session: generations.begin(session, job, "rank lost", True, "checkpoint", 5))
    with pytest.raises(CheckpointNeeded, match="is being restored"):
        delete_checkpoint(store, paths, job, id_of(job, 5), force=True)
    assert delete_checkpoint(store, paths, job, id_of(job, 15)).state == "deleted", "of a generation that is over"
    store.write(lambda session: generations.begin(session, job, "rank lost", True, "snapshot", 5))
    assert delete_checkpoint(store, paths, job, id_of(job, 5), force=True).state == "deleted", "memory has it"


def test_checkpoint_being_exported_is_not_deleted_until_the_export_ends(store, paths, job):
    begun = store.write(lambda session: exports.begin(session, job, id_of(job, 5), "/out", "hf", None)).id
    with pytest.raises(CheckpointNeeded, match="is being exported"):
        delete_checkpoint(store, paths, job, id_of(job, 5), force=True)
    assert delete_checkpoint(store, paths, job, id_of(job, 10), force=True).state == "deleted", "which it does not need"
    store.write(lambda session: exports.end(session, begun, "it failed"))
    assert delete_checkpoint(store, paths, job, id_of(job, 5), force=True).state == "deleted"


def test_checkpoint_outside_the_jobs_folder_is_not_deleted(store, paths, job, tmp_path):
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    lies_at(store, job, 5, elsewhere)
    with pytest.raises(CheckpointNeeded, match="removes nothing there"):
        delete_checkpoint(store, paths, job, id_of(job, 5), force=True)
    assert elsewhere.exists() and folder(paths, job, 5).exists()


def test_checkpoint_that_cannot_be_removed_stays_listed(store, paths, job, monkeypatch):
    monkeypatch.setattr(removal, "remove", lambda place: False)
    with pytest.raises(CheckpointNotRemoved, match="delete it again"):
        delete_checkpoint(store, paths, job, id_of(job, 5))
    assert store.query(checkpoints.get, job, id_of(job, 5)).state == "complete"
    assert deletions(store, job) == []


def test_checkpoint_of_another_job_is_not_found_for_deletion(store, paths, job, submit):
    with pytest.raises(CheckpointNotFound):
        delete_checkpoint(store, paths, submit().id, id_of(job, 5), force=True)
    with pytest.raises(JobNotFound):
        delete_checkpoint(store, paths, "job_000000000000", id_of(job, 5))
    assert folder(paths, job, 5).exists()


def test_checkpoint_in_an_object_store_is_deleted(store, job, tmp_path, bucket):  # noqa: F811 - a fixture
    paths = Paths.of(tmp_path, bucket)
    places = [checkpoint_path(paths.checkpoint_folder(job), step, 1) for step in (5, 10)]
    for place, step in zip(places, (5, 10), strict=True):
        files_of(place).write_atomically(place / MANIFEST, b"{}")
        files_of(place).write_atomically(place / "data", b"x")
        lies_at(store, job, step, place)
    assert delete_checkpoint(store, paths, job, id_of(job, 5)).state == "deleted"
    assert [files_of(place).is_there(place) for place in places] == [False, True]


def test_checkpoint_deletion_on_a_hanging_store_times_out_and_continues(store, paths, job, monkeypatch):
    answers, work, about = threading.Event(), FileWork(), (store, paths, job, id_of(job, 5), False)
    monkeypatch.setattr(removal, "remove", lambda place: answers.wait(20) and remove(place))
    monkeypatch.setattr(removal, "REMOVAL_SECONDS", 0.01)
    with pytest.raises(
        CheckpointStillRemoving, match=r"is not removed yet .* 0.01 s\); the work continues in the background"
    ):
        delete_checkpoint_in_time(*about, work)
    monkeypatch.setattr(removal, "REMOVAL_SECONDS", 20.0)
    answers.set()
    assert delete_checkpoint_in_time(*about, work).state == checkpoints.DELETED
    assert len(deletions(store, job)) == 1 and not folder(paths, job, 5).exists()
