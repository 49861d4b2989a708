"""Durable checkpoints: a row from the first byte, complete only once."""

from pathlib import Path

import pytest

from service.store import InvalidCursor, checkpoints, generations
from service.store.paging import Cursors
from workers.checkpoint.catalog import Condition, ListedCheckpoint, Listing, Manifest, checkpoint_path

FOLDER = Path("/x")
UNFINISHED = str(checkpoint_path(FOLDER, 150, 1))


def save(store, job, step, generation=1, size=100):
    path = str(checkpoint_path(FOLDER, step, generation))
    row = store.write(lambda session: checkpoints.begin(session, job.id, generation, step, path))
    assert store.write(lambda session: checkpoints.complete(session, row.id, size))
    return row.id


def newest(store, job):
    with store.read() as session:
        return next(iter(checkpoints.complete_ones(session, job.id)), None)


def test_the_newest_complete_one_is_what_a_job_can_resume_from(store, started):
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


def test_a_job_would_go_on_from_the_one_that_was_made_last_though_others_are_of_later_steps(store, started):
    save(store, started, 100)
    last = save(store, started, 50, generation=2)
    with store.read() as session:
        assert checkpoints.newest(session, started.id).id == last
        assert checkpoints.kept_because(session, started)[last].startswith("it is the newest")


def test_a_failed_save_can_be_tried_again(store, started):
    first = store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/x"))
    store.write(lambda session: checkpoints.fail(session, first.id))
    assert save(store, started, 50) == first.id
    assert (newest(store, started).bytes, newest(store, started).state) == (100, "complete")


def test_what_is_complete_cannot_fail_any_more(store, started):
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


def test_pages_show_the_highest_step_first(store, started):
    for step in (50, 150, 100):
        save(store, started, step)
    save(store, started, 100, generation=2)
    seen, cursor = [], None
    while True:
        with store.read() as session:
            page = checkpoints.page(session, started.id, limit=1, cursor=cursor)
        seen += [(row.step, row.generation) for row in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [(150, 1), (100, 2), (100, 1), (50, 1)]


@pytest.mark.parametrize("held", ["", "50", "50 1 1", "50 x", "-50 1", "50  1", "9" * 19 + " 1"])
def test_cursor_that_names_no_checkpoint_is_refused(store, started, held):
    with store.read() as session, pytest.raises(InvalidCursor):
        checkpoints.page(session, started.id, cursor=Cursors("checkpoints", job=started.id).encode(held))


def test_a_checkpoint_is_found_by_what_a_worker_knows_of_it(store, started):
    save(store, started, 50)
    with store.read() as session:
        assert checkpoints.find(session, started.id, 1, 50).path == "/x/step-00000050-generation-1"
        assert checkpoints.find(session, started.id, 2, 50) is None
        assert [row.step for row in checkpoints.complete_ones(session, started.id)] == [50]


def on_disk(step, condition=Condition.WHOLE, generation=1, path=None):
    manifest = Manifest("j", generation, step, {"data": 7}, {}) if condition is Condition.WHOLE else None
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
def test_folder_that_says_nothing_changes_no_row(store, started, rows, answer):
    assert reconciled(store, started, **answer) == rows


def test_only_what_cannot_be_read_stays_as_it_was(store, started, rows):
    assert reconciled(store, started, on_disk(100, Condition.UNKNOWN)) == rows
    there = [on_disk(100), on_disk(150, Condition.UNKNOWN)]
    assert reconciled(store, started, *there) == {**rows, 50: "deleted"}
    assert reconciled(store, started, on_disk(100), on_disk(150)) == {**rows, 50: "deleted", 150: "complete"}


def test_what_is_known_to_be_gone_or_damaged_is_deleted_or_failed(store, started, rows):
    there = [on_disk(50), on_disk(100, Condition.NOT_WHOLE)]
    assert reconciled(store, started, *there) == {50: "complete", 100: "deleted", 150: "failed"}


def test_what_was_brought_back_is_complete_again(store, started, rows):
    assert reconciled(store, started, on_disk(100))[50] == "deleted"
    assert reconciled(store, started, on_disk(50), on_disk(100))[50] == "complete"


def test_what_a_restored_database_does_not_know_is_found_on_disk(store, started, rows):
    there = [on_disk(step) for step in (50, 100, 150, 200)]
    assert reconciled(store, started, *there, on_disk(250, Condition.UNKNOWN)) == {
        50: "complete", 100: "complete", 150: "complete", 200: "complete"
    }  # fmt: skip
    with store.read() as session:
        found = checkpoints.find(session, started.id, 1, 200)
        assert checkpoints.newest(session, started.id).id == found.id
    assert (found.path, found.bytes, found.completed_at) == ("/x/step-00000200-generation-1", 7, None)
    assert reconciled(store, started, *there)[200] == "complete"
    assert reconciled(store, started, *there[:3])[200] == "deleted"


def test_folder_that_no_save_has_named_changes_nothing_and_disturbs_no_other(store, started):
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
    with store.read() as session:
        assert checkpoints.find(session, started.id, 1, 50).path == "/x/step-00000050-generation-1"


def test_a_save_that_was_given_up_and_is_whole_all_the_same_is_complete(store, started, rows):
    """The store took its manifest long after its ranks had left each other."""
    assert reconciled(store, started, on_disk(50), on_disk(100)) == {**rows, 150: "failed"}
    assert reconciled(store, started, on_disk(50), on_disk(100), on_disk(150)) == {**rows, 150: "complete"}


def test_job_that_was_never_checkpointed_needs_no_folder(store, started):
    store.write(lambda session: checkpoints.begin(session, started.id, 1, 150, UNFINISHED))
    assert reconciled(store, started, exists=False) == {150: "failed"}


def test_save_that_begins_anew_knows_nothing_of_the_one_before(store, started):
    first = store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/old"))
    assert store.write(lambda session: checkpoints.complete(session, first.id, 100))
    with store.read() as session:
        done = checkpoints.find(session, started.id, 1, 50)
    assert done.completed_at >= done.created_at
    again = store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/new"))
    assert (again.id, again.state, again.path) == (first.id, "saving", "/new")
    assert (again.bytes, again.completed_at) == (None, None)
    assert again.created_at >= done.completed_at


def test_saves_under_way_are_told_from_those_that_are_begun_anew(store, started):
    def under_way():
        with store.read() as session:
            return checkpoints.under_way(session, started.id)

    save(store, started, 40)
    assert under_way() == []
    first = store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/x"))
    assert under_way() == [(first.id, first.created_at)]
    before = under_way()
    store.write(lambda session: checkpoints.fail(session, first.id))
    assert under_way() == []
    store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/x"))
    assert len(under_way()) == 1 and under_way() != before


def test_checkpoints_of_one_job_are_no_other_job_s(store, started, submit):
    other = submit()
    save(store, started, 50)
    store.write(lambda session: checkpoints.begin(session, started.id, 1, 150, UNFINISHED))
    with store.read() as session:
        assert checkpoints.page(session, other.id).items == checkpoints.complete_ones(session, other.id) == []
        assert checkpoints.find(session, other.id, 1, 50) is None
    assert reconciled(store, other, on_disk(100)) == {100: "complete"}
    with store.read() as session:
        assert [row.state for row in checkpoints.page(session, started.id).items] == ["saving", "complete"]
