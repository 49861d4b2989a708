"""A user changes a job's name or priority: in its row, in its spec, in its events."""

import pytest

from manta.service.states import JobState
from manta.service.store import edits, events, jobs
from manta.service.store.errors import JobChanged, JobNotFound


def edit(store, job, **changes):
    return store.write(lambda session: edits.edit(session, job.id, **changes))


def test_edit_changes_name_and_priority_in_row_spec_and_events(store, submit):
    job = submit()
    changed = edit(store, job, name="better", priority=7)
    assert (changed.name, changed.spec["name"]) == ("better", "better")
    assert (changed.priority, changed.spec["priority"]) == (7, 7)
    entry = store.query(events.page, job.id).items[-1]
    assert (entry.type, entry.message) == (
        "edited", "the user changed name from 'small' to 'better' and priority from 0 to 7"
    )  # fmt: skip
    assert entry.data == {"name": {"from": "small", "to": "better"}, "priority": {"from": 0, "to": 7}}


def test_edit_keeps_omitted_fields_and_adds_no_event_if_nothing_changes(store, submit):
    job = submit()
    assert edit(store, job, priority=0).updated_at == job.updated_at
    assert edit(store, job, priority=3).name == "small"
    with store.read() as session:
        assert [event.type for event in events.page(session, job.id).items] == ["submitted", "edited"]


def test_priority_moves_a_job_in_the_queue(store, submit):
    first, second = submit(), submit()
    edit(store, second, priority=1)
    with store.read() as session:
        assert [job.id for job in jobs.unfinished(session)] == [second.id, first.id]


def test_version_of_a_job_changes_with_an_edit_and_not_with_its_state(store, submit):
    job = submit()
    version = edits.version_of(job)
    moved = store.write(lambda session: jobs.transition(session, job.id, JobState.STARTING))
    assert edits.version_of(moved) == version
    assert edits.version_of(edit(store, job, priority=1)) != version
    assert edits.version_of(edit(store, job, name="other")) != version
    assert edits.version_of(submit()) != version, "two jobs have nothing in common"


def test_edit_of_a_job_that_was_edited_meanwhile_is_refused(store, submit):
    job = submit()
    version = edits.version_of(job)
    edit(store, job, priority=1, expected={version, "another"})
    with pytest.raises(JobChanged, match="read it again"):
        edit(store, job, priority=2, expected={version})
    with pytest.raises(JobChanged):
        edit(store, job, priority=2, expected=set())
    assert store.query(jobs.get, job.id).priority == 1


def test_edit_of_an_unknown_job_raises_job_not_found(store):
    with pytest.raises(JobNotFound):
        store.write(lambda session: edits.edit(session, "job_000000000000", priority=1))


def test_edit_changes_the_submitted_spec_and_its_event_has_generation_and_step(store, submit):
    job = submit()

    def move_on(session):
        row = jobs.get(session, job.id)
        row.generation, row.step = 3, 7
        row.submitted, row.not_default = {"name": "small", "more": 1}, {"name": "small"}

    store.write(move_on)
    changed = edit(store, job, name="better")
    assert (changed.submitted, changed.not_default) == ({"name": "better", "more": 1}, {"name": "better"})
    assert changed.updated_at > job.updated_at
    entry = store.query(events.page, job.id).items[-1]
    assert (entry.generation, entry.step) == (3, 7)


def test_edit_of_a_job_stored_without_its_submitted_spec_adds_none(store, submit):
    job = submit()

    def forget(session):
        row = jobs.get(session, job.id)
        row.submitted = row.not_default = None

    store.write(forget)
    changed = edit(store, job, name="better")
    assert (changed.submitted, changed.not_default) == (None, None)
