"""Durable checkpoints: a row from the first byte, complete only once."""

from pathlib import Path

import pytest

from manta.service.store import checkpoints, generations
from manta.service.store.errors import InvalidCursor
from manta.service.store.paging import Cursors
from manta.workers.checkpoint.catalog import Condition, ListedCheckpoint, Listing, Manifest, checkpoint_path

FOLDER = Path("/x")
UNFINISHED = str(checkpoint_path(FOLDER, 150, 1))


def save(store, job, step, generation=1, size=100):
    path = str(checkpoint_path(FOLDER, step, generation))
    row = store.write(lambda session: checkpoints.begin(session, job.id, generation, step, path))
    assert store.write(lambda session: checkpoints.complete(session, row.id, size))
    return row.id


def newest(store, job):
    return next(iter(store.query(checkpoints.complete_ones, job.id)), None)


def test_job_resumes_from_its_newest_complete_checkpoint(store, started):
    store.write(lambda session: generations.begin(session, started.id, "submitted", False))
    assert newest(store, started) is None
    save(store, started, 50)
    best = save(store, started, 100)
    unfinished = store.write(lambda session: checkpoints.begin(session, started.id, 1, 150, UNFINISHED))
    assert newest(store, started).id == best
    assert store.write(lambda session: checkpoints.fail(session, unfinished.id))
    assert newest(store, started).id == best
    store.write(lambda session: checkpoints.mark_deleted(session, best))
    assert newest(store, started).step == 50


def test_job_resumes_from_the_checkpoint_made_last_even_if_others_have_later_steps(store, started):
    save(store, started, 100)
    last = save(store, started, 50, generation=2)
    assert store.query(checkpoints.newest, started.id).id == last
    assert store.query(checkpoints.kept_because, started)[last].startswith("newest")


def test_complete_checkpoint_cannot_fail_and_a_deleted_one_cannot_be_completed(store, started):
    saved = save(store, started, 50)
    assert not store.write(lambda session: checkpoints.fail(session, saved))
    assert not store.write(lambda session: checkpoints.complete(session, saved, 7)), "nor be completed again"
    assert (newest(store, started).id, newest(store, started).bytes) == (saved, 100)
    deleted = save(store, started, 60)
    store.write(lambda session: checkpoints.mark_deleted(session, deleted))
    assert not store.write(lambda session: checkpoints.complete(session, deleted, 7)), "however late that is said"
    assert newest(store, started).id == saved
    for change in (checkpoints.fail, checkpoints.mark_deleted):
        assert not store.write(lambda session, change=change: change(session, "ckpt_nowhere"))


def test_checkpoint_pages_list_the_highest_step_first(store, started):
    for step in (50, 150, 100):
        save(store, started, step)
    save(store, started, 100, generation=2)
    seen, cursor = [], None
    while True:
        page = store.query(checkpoints.page, started.id, limit=1, cursor=cursor)
        seen += [(row.step, row.generation) for row in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [(150, 1), (100, 2), (100, 1), (50, 1)]


@pytest.mark.parametrize("held", ["", "50", "50 1 1", "50 x", "-50 1", "50  1", "9" * 19 + " 1"])
def test_cursor_that_names_no_checkpoint_is_refused(store, started, held):
    with store.read() as session, pytest.raises(InvalidCursor):
        checkpoints.page(session, started.id, cursor=Cursors("checkpoints", job=started.id).encode(held))


def on_disk(step, condition=Condition.COMPLETE, generation=1, path=None):
    manifest = Manifest("j", generation, step, {"data": 7}, {}) if condition is Condition.COMPLETE else None
    return ListedCheckpoint(path or checkpoint_path(FOLDER, step, generation), step, generation, condition, manifest)


def reconciled(store, job, *there, **more):
    """The state of each row, by step, once it was compared with what the folder holds."""
    store.write(lambda session: checkpoints.reconcile(session, job.id, Listing(FOLDER, there, **more)))
    with store.read() as session:
        return {row.step: row.state for row in checkpoints.page(session, job.id).items}


@pytest.fixture
def rows(store, started):
    """Checkpoints of steps 50 and 100 are complete, that of 150 was being saved."""
    save(store, started, 50)
    save(store, started, 100)
    store.write(lambda session: checkpoints.begin(session, started.id, 1, 150, UNFINISHED))
    return {50: "complete", 100: "complete", 150: "saving"}


@pytest.mark.parametrize("answer", [{"problem": "Input/output error"}, {"exists": False}, {}])
def test_checkpoint_folder_that_is_unreadable_or_empty_changes_no_row(store, started, rows, answer):
    assert reconciled(store, started, **answer) == rows


def test_reconciling_leaves_the_rows_of_unreadable_checkpoints_unchanged(store, started, rows):
    assert reconciled(store, started, on_disk(100, Condition.UNKNOWN)) == rows
    there = [on_disk(100), on_disk(150, Condition.UNKNOWN)]
    assert reconciled(store, started, *there) == {**rows, 50: "deleted"}
    assert reconciled(store, started, on_disk(100), on_disk(150)) == {**rows, 50: "deleted", 150: "complete"}


def test_reconciling_marks_missing_or_damaged_checkpoints_until_they_are_back(store, started, rows):
    there = [on_disk(50), on_disk(100, Condition.INCOMPLETE)]
    assert reconciled(store, started, *there) == {50: "complete", 100: "deleted", 150: "failed"}
    assert reconciled(store, started, on_disk(100))[50] == "deleted"
    assert reconciled(store, started, on_disk(50), on_disk(100)) == {**rows, 150: "failed"}
    # The store took its manifest long after its ranks had left each other.
    assert reconciled(store, started, on_disk(50), on_disk(100), on_disk(150)) == {**rows, 150: "complete"}


def test_checkpoints_unknown_to_a_restored_database_are_found_on_disk(store, started, rows):
    there = [on_disk(step) for step in (50, 100, 150, 200)]
    assert reconciled(store, started, *there, on_disk(250, Condition.UNKNOWN)) == {
        50: "complete", 100: "complete", 150: "complete", 200: "complete"
    }  # fmt: skip
    found = store.query(checkpoints.find, started.id, 1, 200)
    assert store.query(checkpoints.newest, started.id).id == found.id
    assert (found.path, found.bytes, found.completed_at) == ("/x/step-00000200-generation-1", 7, None)
    assert reconciled(store, started, *there)[200] == "complete"
    assert reconciled(store, started, *there[:3])[200] == "deleted"


def test_reconciling_ignores_folders_with_names_that_no_save_gives(store, started):
    copies = [
        on_disk(50, path=FOLDER / name) for name in ("step-000000050-generation-1", "step-00000050-generation-01")
    ]
    strange = [on_disk(2**63), on_disk(2**70), on_disk(60, generation=2**31)]
    assert reconciled(store, started, *copies, *strange) == {}
    largest = on_disk(2**63 - 1, generation=2**31 - 1)
    assert reconciled(store, started, *copies, on_disk(50), *strange, largest) == {
        50: "complete",
        2**63 - 1: "complete",
    }
    assert store.query(checkpoints.find, started.id, 1, 50).path == "/x/step-00000050-generation-1"


def test_job_that_was_never_checkpointed_needs_no_folder(store, started):
    store.write(lambda session: checkpoints.begin(session, started.id, 1, 150, UNFINISHED))
    assert reconciled(store, started, exists=False) == {150: "failed"}


def test_repeated_save_of_a_step_keeps_nothing_of_the_earlier_one(store, started):
    first = store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/old"))
    store.write(lambda session: checkpoints.fail(session, first.id))
    assert save(store, started, 50) == first.id
    done = store.query(checkpoints.find, started.id, 1, 50)
    assert (done.state, done.bytes, done.completed_at >= done.created_at) == ("complete", 100, True)
    assert store.query(checkpoints.find, started.id, 2, 50) is None
    again = store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/new"))
    assert (again.id, again.state, again.path) == (first.id, "saving", "/new")
    assert (again.bytes, again.completed_at) == (None, None)
    assert again.created_at >= done.completed_at


def test_repeated_save_can_be_told_from_the_one_under_way_before(store, started):
    def under_way():
        return store.query(checkpoints.under_way, started.id)

    save(store, started, 40)
    assert under_way() == []
    first = store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/x"))
    assert under_way() == [(first.id, first.created_at)]
    before = under_way()
    store.write(lambda session: checkpoints.fail(session, first.id))
    assert under_way() == []
    store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/x"))
    assert len(under_way()) == 1 and under_way() != before


def test_checkpoints_of_one_job_are_not_listed_for_another(store, started, submit):
    other = submit()
    save(store, started, 50)
    store.write(lambda session: checkpoints.begin(session, started.id, 1, 150, UNFINISHED))
    with store.read() as session:
        assert checkpoints.page(session, other.id).items == checkpoints.complete_ones(session, other.id) == []
        assert checkpoints.find(session, other.id, 1, 50) is None
    assert reconciled(store, other, on_disk(100)) == {100: "complete"}
    with store.read() as session:
        assert [row.state for row in checkpoints.page(session, started.id).items] == ["saving", "complete"]
