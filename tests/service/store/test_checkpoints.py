"""Durable checkpoints: a row from the first byte, complete only once."""

from service.store import checkpoints, generations


def save(store, job, step, generation=1, size=100):
    row = store.write(lambda session: checkpoints.begin(session, job.id, generation, step, f"/x/{step}"))
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
    unfinished = store.write(lambda session: checkpoints.begin(session, started.id, 1, 150, "/x/150"))
    assert newest(store, started).id == best
    assert store.write(lambda session: checkpoints.fail(session, unfinished.id))
    assert not store.write(lambda session: checkpoints.complete(session, unfinished.id, 1))
    assert newest(store, started).id == best
    store.write(lambda session: checkpoints.mark_deleted(session, best))
    assert newest(store, started).step == 50


def test_a_failed_save_can_be_tried_again(store, started):
    first = store.write(lambda session: checkpoints.begin(session, started.id, 1, 50, "/x"))
    store.write(lambda session: checkpoints.fail(session, first.id))
    assert save(store, started, 50) == first.id
    assert (newest(store, started).bytes, newest(store, started).state) == (100, "complete")


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


def test_a_checkpoint_is_found_by_what_a_worker_knows_of_it(store, started):
    save(store, started, 50)
    with store.read() as session:
        assert checkpoints.find(session, started.id, 1, 50).path == "/x/50"
        assert checkpoints.find(session, started.id, 2, 50) is None
        assert [row.step for row in checkpoints.complete_ones(session, started.id)] == [50]
