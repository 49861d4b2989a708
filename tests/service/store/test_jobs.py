"""Jobs: submitted once, edited, listed newest first, moved along the edges of the state machine only."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, text

from manta.service.ids import is_job_id, next_job_id
from manta.service.states import JobState
from manta.service.store import events, generations, jobs
from manta.service.store.errors import IdempotencyConflict, IllegalTransition, JobChanged, JobNotFound
from manta.service.store.tables import Job

times = st.floats(min_value=1_800_000_000, max_value=3_000_000_000)
entropy = st.integers(min_value=0, max_value=2**32)


@given(times, times, entropy, entropy)
def test_ids_sort_by_time_and_grow_even_when_the_clock_steps_back(first_time, second_time, low, high):
    first = next_job_id(first_time, low, None)
    second = next_job_id(second_time, high, first)
    assert is_job_id(first) and is_job_id(second)
    assert first < second
    if second_time > first_time + 0.002:
        assert second == next_job_id(second_time, high, None), "it says when the job was submitted"


@pytest.mark.parametrize(
    "text", ["", "job_", "job_../../../etc", "job_00000000000\n", "job_0000000000000", "JOB_000000000000"]
)
def test_malformed_text_is_not_a_job_id(text):
    assert not is_job_id(text)


@pytest.mark.parametrize("job_id", ["job_000000000000", "../../etc/passwd", ""])
def test_malformed_or_unknown_job_id_is_not_found(store, job_id):
    for operation in (jobs.get, lambda session, job: jobs.edit(session, job, priority=1)):
        with pytest.raises(JobNotFound):
            store.write(lambda session, operation=operation: operation(session, job_id))


def test_repeated_request_with_the_same_key_creates_one_job_and_another_body_is_refused(store, make_spec):
    def request(key="key-1", digest="digest-a"):
        return store.write(lambda session: jobs.create(session, make_spec(), key, digest))

    first, created = request()
    again, created_again = request()
    assert (created, created_again) == (True, False)
    assert first.id == again.id
    other, created = request("key-2")
    assert created and other.id != first.id
    assert request()[0].id == first.id
    with pytest.raises(IdempotencyConflict, match=first.id):
        request(digest="digest-b")


def test_concurrent_requests_with_one_key_make_one_job(store, make_spec):
    spec = make_spec()
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda _: store.write(lambda session: jobs.create(session, spec, "key", "digest")), range(16))
        )
    assert len({job.id for job, _ in results}) == 1
    assert sum(created for _, created in results) == 1


def test_transitions_follow_the_edges_and_leave_times_and_events(store, submit):
    job = submit()
    store.write(lambda session: jobs.transition(session, job.id, JobState.STARTING))
    store.write(lambda session: jobs.transition(session, job.id, JobState.RUNNING))
    ended = store.write(lambda session: jobs.transition(session, job.id, JobState.FAILED, "user_error", "boom"))
    assert (ended.state, ended.reason, ended.message) == ("FAILED", "user_error", "boom")
    assert job.created_at <= ended.started_at <= ended.finished_at
    with store.read() as session:
        changes_seen = [(event.type, event.data.get("to")) for event in events.page(session, job.id).items]
        last = events.page(session, job.id).items[-1]
    assert (last.message, last.data) == (
        "RUNNING -> FAILED: boom", {"from": "RUNNING", "to": "FAILED", "reason": "user_error"}
    )  # fmt: skip
    changes = [("state_changed", state) for state in ("STARTING", "RUNNING", "FAILED")]
    assert changes_seen == [("submitted", None), *changes]


def test_event_of_a_state_change_has_generation_and_step(store, started):
    def reach(session):
        generations.begin(session, started.id, "submitted", False)
        jobs.get(session, started.id, lock=True).step = 7

    store.write(reach)
    store.write(lambda session: jobs.transition(session, started.id, JobState.RUNNING))
    last = store.query(events.page, started.id).items[-1]
    assert (last.generation, last.step) == (1, 7)


def test_requested_size_is_stored_and_reported_as_an_event(store, submit):
    job = submit(parallel={"data": 2}, elastic={"min_data": 1})
    assert store.write(lambda session: jobs.request_resize(session, job.id, 1)).wanted_replicas == 1
    last = store.query(events.page, job.id).items[-1]
    assert (last.type, last.data, last.message) == (
        "resize_requested", {"data": 1}, "the user asked for 1 replica"
    )  # fmt: skip


def test_illegal_state_transition_is_refused_and_leaves_the_job_unchanged(store, submit):
    job = submit()
    with pytest.raises(IllegalTransition, match="QUEUED"):
        store.write(lambda session: jobs.transition(session, job.id, JobState.RUNNING))
    assert store.query(jobs.get, job.id).state == "QUEUED"


def test_requeued_job_keeps_the_time_of_its_first_start_but_not_the_reason_of_its_wait(store, started):
    store.write(lambda session: jobs.transition(session, started.id, JobState.QUEUED, "insufficient_slots", "full"))
    again = store.write(lambda session: jobs.transition(session, started.id, JobState.STARTING))
    assert (again.reason, again.message, again.finished_at) == (None, None, None)
    assert again.started_at == started.started_at


def test_cancel_ends_a_queued_job_at_once_and_asks_a_started_one(store, submit, started):
    queued = submit()
    assert store.write(lambda session: jobs.request_cancel(session, queued.id)).state == "CANCELLED"
    assert store.write(lambda session: jobs.request_cancel(session, started.id)).state == "CANCELLING"
    with pytest.raises(IllegalTransition, match="is CANCELLED: it has ended, and there is nothing to cancel"):
        store.write(lambda session: jobs.request_cancel(session, queued.id))


def test_job_queue_is_ordered_by_priority_then_by_age(store, submit, started):
    low, first, second = submit(priority=-1), submit(), submit()
    with store.read() as session:
        assert jobs.queue_positions(session, [low, first, second]) == {low.id: 3, first.id: 1, second.id: 2}
        assert jobs.queue_positions(session, [first]) == {first.id: 1}
        assert jobs.queue_positions(session, [jobs.get(session, started.id)]) == {}
        order = [job.id for job in jobs.unfinished(session)]
    assert order == [started.id, first.id, second.id, low.id]


def test_queue_in_brief_includes_jobs_whose_spec_makes_no_sense(store, submit, started):
    low, first = submit(priority=-1), submit(resources={"accelerator": "cpu"})
    foreign = submit()
    store.write(lambda session: setattr(jobs.get(session, foreign.id), "spec", {"resources": 7}))
    with store.read() as session:
        queued = [(each.id, each.accelerator) for each in jobs.queued(session)]
    assert queued == [(first.id, "cpu"), (foreign.id, "auto"), (low.id, "auto")]


def test_specs_of_unchanged_queued_jobs_are_not_read_again(store, submit, monkeypatch):
    monkeypatch.setattr(jobs, "_BATCH_JOBS", 2)
    asked, some = [], [submit(resources={"accelerator": "cpu"}) for _ in range(3)]

    def note(*about):
        asked.append("spec" in about[2])

    def queue(before):
        asked.clear()
        event.listen(store.database.readers, "before_cursor_execute", note)
        read = store.query(jobs.queued, before)
        event.remove(store.database.readers, "before_cursor_execute", note)
        return read

    first = queue([])
    assert ([each.accelerator for each in first], asked.count(True)) == (["cpu"] * 3, 2)
    assert (queue(first), asked.count(True)) == (first, 0)
    store.write(lambda session: jobs.transition(session, some[0].id, JobState.STARTING))
    store.write(lambda session: jobs.edit(session, some[1].id, name="another"))
    added = submit()
    then = queue(first)
    assert [(each.id, each.accelerator) for each in then] == [
        (some[1].id, "cpu"), (some[2].id, "cpu"), (added.id, "auto")
    ]  # fmt: skip
    assert (then[1], asked.count(True)) == (first[2], 1)


def test_a_waiting_job_says_what_it_lacks_until_it_starts(store, submit):
    job = submit()
    lacks = {"needed": 8, "available": 4}
    waiting = store.write(lambda session: jobs.set_waiting(session, job.id, lacks, "insufficient_slots", "wait"))
    assert (waiting.waiting_for, waiting.reason) == (lacks, "insufficient_slots")
    begun = store.write(lambda session: jobs.transition(session, job.id, JobState.STARTING))
    assert (begun.waiting_for, begun.reason) == (None, None)
    late = store.write(lambda session: jobs.set_waiting(session, job.id, lacks, "insufficient_slots"))
    assert late.waiting_for is None


def test_jobs_are_counted_by_state(store, submit, started):
    submit()
    counts = store.query(jobs.count_by_state)
    assert {state: count for state, count in counts.items() if count} == {JobState.QUEUED: 1, JobState.STARTING: 1}
    assert set(counts) == set(JobState)


def test_unfinished_jobs_can_be_read_from_the_database_of_another_release(store, submit):
    first, over = submit(), submit()
    second = submit(priority=3)
    store.write(lambda session: jobs.request_cancel(session, over.id))
    for column in ("submitted", "not_default", "deletion_began_at"):
        store.write(lambda session, column=column: session.execute(text(f"ALTER TABLE jobs DROP COLUMN {column}")))
    in_brief = store.query(jobs.unfinished_summaries)
    assert [(job.id, job.name, job.state, job.step, job.steps) for job in in_brief] == [
        (second.id, "small", "QUEUED", 0, 10),
        (first.id, "small", "QUEUED", 0, 10),
    ]


def test_created_job_has_all_columns_as_stored(store, make_spec):
    known = store.write(lambda session: jobs.create(session, make_spec(priority=3), "key", "digest", "lab"))[0]
    stored = store.query(jobs.get, known.id)
    columns = [column.key for column in Job.__table__.columns]
    assert {name: getattr(known, name) for name in columns} == {name: getattr(stored, name) for name in columns}


def test_a_new_job_can_be_changed_in_the_transaction_that_stores_it(store, make_spec):
    def submit_and_cancel(session):
        job, _ = jobs.create(session, make_spec())
        jobs.request_cancel(session, job.id)
        return job.id

    job_id = store.write(submit_and_cancel)
    assert store.query(jobs.get, job_id).state == JobState.CANCELLED


def test_a_job_says_that_it_is_held_unless_it_has_another_reason(store, started):
    def hold(why):
        job = store.write(lambda session: jobs.set_hold_reason(session, started.id, why))
        return job.reason, job.message

    assert [hold(why) for why in ("no disk", "no data", None)] == [
        ("held", "no disk"),
        ("held", "no data"),
        (None, None),
    ]
    store.write(
        lambda session: jobs.transition(session, started.id, JobState.CANCELLING, "cancelled_by_user", "enough")
    )
    assert [hold(why) for why in ("no disk", None)] == [("cancelled_by_user", "enough")] * 2


def edit(store, job, **changes):
    return store.write(lambda session: jobs.edit(session, job.id, **changes))


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


def test_edit_keeps_omitted_fields_adds_no_event_for_no_change_and_moves_a_job_in_the_queue(store, submit):
    first, job = submit(), submit()
    assert edit(store, job, priority=0).updated_at == job.updated_at
    assert edit(store, job, priority=3).name == "small"
    with store.read() as session:
        assert [event.type for event in events.page(session, job.id).items] == ["submitted", "edited"]
        assert [each.id for each in jobs.unfinished(session)] == [job.id, first.id]


def test_version_of_a_job_changes_with_an_edit_and_not_with_its_state(store, submit):
    job = submit()
    version = jobs.version_of(job)
    moved = store.write(lambda session: jobs.transition(session, job.id, JobState.STARTING))
    assert jobs.version_of(moved) == version
    assert jobs.version_of(edit(store, job, priority=1)) != version
    assert jobs.version_of(edit(store, job, name="other")) != version
    assert jobs.version_of(submit()) != version, "two jobs have nothing in common"


def test_edit_of_a_job_that_was_edited_meanwhile_is_refused(store, submit):
    job = submit()
    version = jobs.version_of(job)
    edit(store, job, priority=1, expected={version, "another"})
    with pytest.raises(JobChanged, match="read it again"):
        edit(store, job, priority=2, expected={version})
    with pytest.raises(JobChanged):
        edit(store, job, priority=2, expected=set())
    assert store.query(jobs.get, job.id).priority == 1


@pytest.mark.parametrize(("before", "after"), [
    (({"name": "small", "more": 1}, {"name": "small"}), ({"name": "better", "more": 1}, {"name": "better"})),
    ((None, None), (None, None)),
])  # fmt: skip
def test_edit_changes_a_stored_submitted_spec_and_its_event_has_generation_and_step(store, submit, before, after):
    job = submit()

    def move_on(session):
        row = jobs.get(session, job.id)
        row.generation, row.step = 3, 7
        row.submitted, row.not_default = before

    store.write(move_on)
    changed = edit(store, job, name="better")
    assert (changed.submitted, changed.not_default) == after
    assert changed.updated_at > job.updated_at
    entry = store.query(events.page, job.id).items[-1]
    assert (entry.generation, entry.step) == (3, 7)
