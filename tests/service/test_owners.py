"""Owners of jobs: one for each job, whatever the others do."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from manta.service.control.owners import CLAIM_SECONDS, JobOwners
from manta.service.job.context import DEFAULT_MEMORY_SECONDS
from manta.service.job.inbox import Cancel, Pause, Resize
from manta.service.leases.decisions import JobSummary
from manta.service.states import JobState
from tests.service.support.virtual_time import in_virtual_time


class FakeLeases:
    """Leases that answer with what a test puts into `answers`, one for each look; the last one from then on."""

    def __init__(self, *answers):
        self.changed, self.answers, self.dropped, self.released = asyncio.Event(), list(answers), [], []
        self.of, self.drop = lambda job_id: SimpleNamespace(epoch=1), self.dropped.append

    async def refresh(self, is_busy):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer, {}

    async def release(self, job_id):
        self.released.append(job_id)


class FakeOwner:
    """An owner that writes down what it is asked for, and whose job ends when `over` is set."""

    def __init__(self):
        self.id, self.asked, self.over = "job_1", [], asyncio.Event()
        self.tell = self.asked.append

    async def run(self, scheduled_generation):
        await self.over.wait()


async def none_wanted(_query):
    return []


def made(*answers):
    owners = JobOwners(SimpleNamespace(read_async=none_wanted), FakeLeases(*answers), DEFAULT_MEMORY_SECONDS)
    noop = SimpleNamespace(is_placing=lambda job: False, stop_if_lost=lambda: None, wake=lambda: None)
    owners.begin(SimpleNamespace(), noop)
    return owners


def job(state=JobState.RUNNING, wanted_replicas=None):
    return JobSummary("job_1", state, wanted_replicas, 0, "me", 1)


@pytest.fixture
def virtual(monkeypatch):
    return lambda body: in_virtual_time(monkeypatch, body)


def test_job_listing_outage_is_logged_once_each_time(virtual, caplog):
    async def body():
        away = OSError("away")
        owners = made(away, away, [], away, away)
        watching = asyncio.create_task(owners.run())
        await asyncio.sleep(6 * CLAIM_SECONDS)
        watching.cancel()

    with caplog.at_level(logging.ERROR):
        virtual(body)
    assert [record.getMessage() for record in caplog.records] == ["cannot list the jobs: away"] * 2


@pytest.mark.parametrize("replaced", [False, True])
def test_owner_that_ends_removes_itself_and_no_later_owner_of_the_job(virtual, replaced):
    async def body():
        owners, owner = made([]), FakeOwner()
        task = asyncio.create_task(owners._run(owner, None, None, "its lease"))
        later = (FakeOwner(), task)
        owners.by_job["job_1"] = later if replaced else (owner, task)
        owner.over.set()
        await task
        assert owners.by_job == ({"job_1": later} if replaced else {})
        assert (owners.leases.released, owners.leases.dropped) == (["job_1"], ["its lease"])

    virtual(body)


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        (job(), job(), []),
        (job(), job(JobState.CANCELLING), [Cancel()]),
        (job(JobState.CANCELLING), job(JobState.CANCELLING), []),
        (job(), job(JobState.PAUSING), [Pause()]),
        (job(wanted_replicas=2), job(wanted_replicas=3), [Resize()]),
        (job(wanted_replicas=2), job(wanted_replicas=2), []),
        (job(wanted_replicas=2), job(), []),
    ],
)
def test_request_stored_by_another_control_plane_reaches_the_owner_once(virtual, before, after, asked):
    async def body():
        owners, owner = made([before], [after], [after]), FakeOwner()
        owners.by_job["job_1"] = (owner, asyncio.current_task())
        await owners.refresh()
        owner.asked.clear()
        await owners.refresh()
        await owners.refresh()
        assert owner.asked == asked

    virtual(body)
