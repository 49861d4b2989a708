"""What monitoring is told of all jobs comes in as many queries as for one, and of unfinished jobs only in detail."""

import time

import pytest
from sqlalchemy import event

from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import JobState
from manta.service.store import Store, checkpoints, events, generations, job_numbers, jobs, leases, recoveries
from manta.service.store.job_numbers import RECENT_SECONDS, Saved
from manta.workers.config import JobSpec

SPEC = JobSpec.model_validate(
    {
        "name": "tiny",
        "model": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8},
        "data": {"source": "python-stdlib"},
        "train": {"steps": 10, "global_batch_size": 4},
    }
)


def made(store: Store, *states: JobState, reason: str | None = None, **place: str) -> str:
    """A job that went through these states after its submission."""

    def operation(session):
        job, _ = jobs.create(session, SPEC, **place)
        for state in states:
            jobs.transition(session, job.id, state, reason)
        return job.id

    return store.write(operation)


def numbers(store: Store, now: float | None = None, bound: str | None = None):
    return store.query(job_numbers.read, time.time() if now is None else now, bound)


def queries_of(store: Store) -> int:
    """How many it takes to read the numbers."""
    seen = []

    def note(*arguments):
        seen.append(arguments[2])

    readers = store.database.readers
    event.listen(readers, "before_cursor_execute", note)
    try:
        numbers(store)
    finally:
        event.remove(readers, "before_cursor_execute", note)
    return len([statement for statement in seen if "SELECT" in statement])


def test_job_numbers_of_an_empty_database_are_zero_or_none(store):
    nothing = numbers(store)
    assert (nothing.queued_since, nothing.without_owner, nothing.recent_failures, nothing.listed) == (None, 0, {}, [])


def test_number_of_queries_for_job_numbers_does_not_grow_with_the_jobs(store):
    made(store, JobState.STARTING, JobState.RUNNING)
    for_one = queries_of(store)
    for _ in range(5):
        made(store, JobState.STARTING, JobState.RUNNING)
    assert queries_of(store) == for_one <= 20


def test_job_numbers_list_started_jobs_first_up_to_a_limit(store, monkeypatch):
    monkeypatch.setattr(job_numbers, "MAX_JOBS", 2)
    made(store)
    running = {made(store, JobState.STARTING, JobState.RUNNING), made(store, JobState.STARTING)}
    made(store, JobState.STARTING, JobState.SUCCEEDED)
    seen = numbers(store)
    assert {job.row.id for job in seen.listed} == running
    assert (seen.by_state[JobState.QUEUED], seen.by_state[JobState.SUCCEEDED]) == (1, 1)


def test_recoveries_are_counted_by_kind_and_their_time_by_phase_once_they_are_over(store):
    job = made(store, JobState.STARTING, JobState.RUNNING)

    def recover(session):
        for kind, ends in (("killed", True), ("killed", True), ("hung", False)):
            number = generations.begin(session, job, "rank_died", True)
            times = RecoveryTimeline(noticed_at=101.0, failed_at=100.0)
            recoveries.begin(session, job, number, times, kind=kind, rank=0, cause="it died")
            if ends:
                recoveries.end(session, job, number, 104.0, steps_redone=1)

    store.write(recover)
    recovered = numbers(store).listed[0].recovered
    assert recovered.by_kind == {"killed": 2, "hung": 1}
    assert (recovered.ended, recovered.steps_redone) == (2, 2)
    assert recovered.seconds["detect"] == pytest.approx(2.0)
    assert sum(recovered.seconds.values()) == pytest.approx(8.0)


def test_numbers_have_the_times_of_the_newest_complete_checkpoint(store):
    job = made(store, JobState.STARTING, JobState.RUNNING)
    assert numbers(store).listed[0].saved is None

    def save(session):
        number = generations.begin(session, job, "submitted", False)
        for step in (10, 20, 30):
            row = checkpoints.begin(session, job, number, step, f"step-{step}")
            if step < 30:
                checkpoints.complete(session, row.id, 100)
                row.created_at, row.completed_at = float(step), step + 2.5

    store.write(save)
    assert numbers(store).listed[0].saved == Saved(20.0, 22.5)


def test_time_of_placement_is_when_the_job_last_left_the_queue(store):
    made(store)
    assert numbers(store).listed[0].placed_at is None
    again = made(store, JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.PAUSED, JobState.QUEUED)
    before = time.time()
    store.write(lambda session: jobs.transition(session, again, JobState.STARTING))
    seen = numbers(store).listed[0]
    assert (seen.row.id, seen.placed_at >= before) == (again, True)


def test_events_of_the_last_hour_are_counted_by_type(store):
    job = made(store, JobState.STARTING, JobState.RUNNING)
    now = time.time()

    def happen(session):
        for kind, at in (("straggler", now - 10), ("straggler", now), ("straggler", now - RECENT_SECONDS - 1)):
            events.append(session, job, kind, "slow", at=at)
        events.append(session, job, "edited", "which is no trouble", at=now)

    store.write(happen)
    assert numbers(store, now).listed[0].recent_events == {"straggler": 2}


def test_failures_of_the_last_hour_are_counted_by_reason(store):
    made(store, JobState.STARTING, JobState.FAILED, reason="not_finite")
    assert numbers(store).recent_failures == {"not_finite": 1}
    assert numbers(store, time.time() + RECENT_SECONDS + 1).recent_failures == {}


def test_queued_since_is_when_the_longest_waiting_job_was_queued(store):
    first = made(store)
    made(store)
    began = store.query(jobs.get, first).created_at
    assert numbers(store).queued_since == pytest.approx(began)
    store.write(lambda session: jobs.transition(session, first, JobState.STARTING))
    assert numbers(store).queued_since > began


def test_job_without_an_owner_is_counted_until_it_is_claimed(store):
    job = made(store, JobState.STARTING)
    made(store)
    store.write(lambda session: leases.join(session, "me", "here", "ray", False))
    assert (numbers(store).without_owner, numbers(store).control_planes) == (1, 1)
    store.write(lambda session: leases.claim(session, job, "me"))
    assert numbers(store).without_owner == 0
    store.write(lambda session: leases.leave(session, "me"))
    assert (numbers(store).without_owner, numbers(store).control_planes) == (1, 0)


def test_numbers_of_a_project_count_only_its_jobs(store):
    theirs = made(store, JobState.STARTING, project="theirs")
    made(store, JobState.STARTING, JobState.FAILED, reason="bad_data")
    made(store)
    seen = numbers(store, bound="theirs")
    assert [job.row.id for job in seen.listed] == [theirs]
    assert (seen.recent_failures, seen.queued_since, seen.by_state[JobState.FAILED]) == ({}, None, 0)
    assert seen.without_owner == 1
