"""A running job in the database: what is written when a generation begins."""

import asyncio
import time

import pytest

from service.job.record import JobRecord
from service.states import JobState
from service.store import events, failed_jobs, jobs
from workers.config import ParallelConfig
from workers.protocol.messages import Resume


@pytest.fixture
def record(store, submit):
    return JobRecord(store, submit().id)


def begun(record, resume):
    asyncio.run(record.begin("test", False, resume, resume.source, ParallelConfig(), None, []))
    with record.store.read() as session:
        return [event.type for event in events.page(session, record.id).items]


def reached(record, step):
    def note(session):
        jobs.get(session, record.id, lock=True).step = step

    record.store.write(note)


def test_job_that_begins_again_though_it_had_taken_steps_says_so(record):
    assert "state_lost" not in begun(record, Resume())
    reached(record, 7)
    assert begun(record, Resume()).count("state_lost") == 1


@pytest.mark.parametrize("kept", [True, False])
def test_snapshots_of_a_job_that_fails_while_it_is_cancelled_are_kept_no_longer(record, kept):
    def cancel(session):
        jobs.transition(session, record.id, JobState.STARTING)
        jobs.request_cancel(session, record.id)

    record.store.write(cancel)
    asyncio.run(record.end(JobState.FAILED, "user_error", "boom", time.time() + 1000 if kept else None))
    with record.store.read() as session:
        job, expired = jobs.get(session, record.id), failed_jobs.memory_expired(session, time.time() + 1)
    assert (job.state, job.reason, expired) == ("CANCELLED", None, [record.id] if kept else [])


def test_job_that_goes_on_from_any_state_has_lost_nothing(record):
    reached(record, 7)
    assert "state_lost" not in begun(record, Resume("snapshot", 7))
    assert "state_lost" not in begun(record, Resume("checkpoint", 5, "/somewhere"))
