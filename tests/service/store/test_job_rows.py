"""Jobs in lists: newest first, and another row whenever anything that is shown of a job is another."""

import pytest
from sqlalchemy import String

from manta.service.states import JobState
from manta.service.store import edits, job_rows, jobs
from manta.service.store.errors import InvalidCursor, JobNotFound
from manta.service.store.job_rows import JobFilter
from manta.service.store.tables import Job
from manta.service.store.types import AnyText, Document, Numbers, ShortText


def test_pages_are_newest_first_and_complete_while_jobs_arrive(store, submit):
    ids = [submit().id for _ in range(5)]
    seen, cursor = [], None
    while True:
        with store.read_rows() as connection:
            page = job_rows.page(connection, limit=2, cursor=cursor)
        seen += [job.id for job in page.items]
        submit()  # must neither shift nor repeat anything
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == ids[::-1]


def test_last_page_of_jobs_has_no_next_cursor(store, submit):
    submit(), submit()
    with store.read_rows() as connection:
        assert job_rows.page(connection, limit=2).next_cursor is None
        assert job_rows.page(connection, limit=1).next_cursor is not None


def test_pages_filter_by_state_and_name(store, submit):
    first, second = submit(name="a"), submit(name="b")
    store.write(lambda session: jobs.transition(session, first.id, JobState.STARTING))
    with store.read_rows() as connection:
        assert [job.id for job in job_rows.page(connection, JobFilter(states=("STARTING",))).items] == [first.id]
        assert [job.id for job in job_rows.page(connection, JobFilter(name="b")).items] == [second.id]
        assert job_rows.page(connection, JobFilter(states=("PAUSED",))).items == []


def test_jobs_asked_for_by_id_are_listed_newest_first(store, submit):
    first, _, third = submit(), submit(), submit()
    with store.read_rows() as connection:
        rows = job_rows.understood(connection, [first.id, "job_000000000000", third.id])
    assert [row.id for row in rows] == [third.id, first.id]


@pytest.mark.parametrize("cursor", ["?", "AAAA", "é", "am9iXw", "a"])
def test_invalid_cursor_of_job_pages_is_refused(store, cursor):
    with store.read_rows() as connection, pytest.raises(InvalidCursor):
        job_rows.page(connection, cursor=cursor)


def test_a_row_is_equal_as_long_as_nothing_that_is_shown_has_changed(store, submit):
    job_id = submit().id

    def row():
        with store.read_rows() as connection:
            return job_rows.one(connection, job_id)

    def store_as(name, value):
        store.write(lambda session: setattr(jobs.get(session, job_id), name, value))

    assert row() == row()
    for column in Job.__table__.columns:
        if column.key in {"id", "project", "idempotency_key"}:
            continue
        before = row()
        store_as(column.key, _another(column.type))
        assert (row() == before) is (column.key in job_rows.NOT_SHOWN | job_rows.FOLLOWS), column.key


@pytest.mark.parametrize("change", [{"name": "another"}, {"priority": 7}, {"labels": {"a": "b"}}])
def test_edit_that_changes_the_spec_changes_the_row_in_lists(store, submit, change):
    job_id = submit().id
    with store.read_rows() as connection:
        before = job_rows.one(connection, job_id)
    spec = store.write(lambda session: dict(jobs.get(session, job_id).spec))
    assert store.write(lambda session: dict(edits.edit(session, job_id, **change).spec)) != spec
    with store.read_rows() as connection:
        assert job_rows.one(connection, job_id) != before


def _another(kind):
    if isinstance(kind, Document | Numbers):
        return {"changed": 1}
    return "CHANGED" if isinstance(kind, String | ShortText | AnyText) else 7


def test_reading_the_row_of_an_unknown_job_raises_job_not_found(store):
    with store.read_rows() as connection:
        for job_id in ("job_000000000000", "../../etc/passwd", ""):
            with pytest.raises(JobNotFound):
                job_rows.one(connection, job_id)
