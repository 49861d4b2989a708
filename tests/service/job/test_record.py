"""A running job in the database: what is written when a generation begins."""

import asyncio

import pytest

from service.job.record import JobRecord
from service.store import events, jobs
from workers.config import ParallelConfig
from workers.protocol.messages import Resume


@pytest.fixture
def record(store, submit):
    return JobRecord(store, submit().id)


def begun(record, resume):
    asyncio.run(record.begin("test", False, resume, resume.source, ParallelConfig(), None))
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


def test_job_that_goes_on_from_any_state_has_lost_nothing(record):
    reached(record, 7)
    assert "state_lost" not in begun(record, Resume("snapshot", 7))
    assert "state_lost" not in begun(record, Resume("checkpoint", 5, "/somewhere"))
