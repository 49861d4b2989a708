"""Traces reach the ranks of whatever generation runs, and what they record comes back."""

import pytest

from manta.service.job import launch
from manta.service.job.inbox import Trace
from manta.service.store import step_traces
from manta.workers.protocol.messages import TraceOrder
from manta.workers.protocol.reports import TraceBegan, Traced
from manta.workers.timing.recording import PackedRecording
from tests.service.support.waiting import reached

RECORDING = PackedRecording("x", 3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(launch, "INITIAL_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(launch, "MAX_WAIT_SECONDS", 0.02)


def ask(job, steps=1, step=0, profiled=()):
    """A user wants a trace."""
    number = job.store.write(lambda s: step_traces.request(s, job.id, steps, step, profiled)).number
    job.supervisor.tell(Trace())
    return number


def states(job):
    return [each.state for each in job._read(lambda s: step_traces.of_job(s, job.id))]


def orders(job):
    return [agent.traces for agent in job.ranks]


async def until(job, condition):
    await reached(lambda: job.task.done() or condition())
    assert not job.task.done(), job.log


async def test_trace_order_goes_to_rank_0_only_and_all_ranks_report(job, cluster):
    await job.train(1)
    first, second = ask(job, 2, 4), ask(job)
    await until(job, lambda: len(job.ranks[0].traces) == 2)
    assert orders(job) == [[TraceOrder(first, 1, 2, 4), TraceOrder(second, 1, 1, 0)], [], [], []]
    job.ranks[0].say(TraceBegan(first, 4))
    await until(job, lambda: states(job) == ["recording", "requested"])
    for agent in job.ranks:
        agent.say(Traced(first, 4, RECORDING))
    await until(job, lambda: states(job) == ["complete", "requested"])
    await job.finish()
    assert states(job) == ["complete", "failed"]


async def test_trace_that_has_not_begun_moves_to_the_next_generation(job, cluster):
    await job.train(1)
    first = ask(job)
    await until(job, lambda: len(job.ranks[0].traces) == 1)
    job.ranks[0].say(TraceBegan(first, 2))
    await until(job, lambda: states(job) == ["recording"])
    second = ask(job, step=7)
    await until(job, lambda: len(job.ranks[0].traces) == 2)
    job.ranks[1].die()
    for agent in (job.ranks[0], *job.ranks[2:]):
        agent.rest_by_itself(1)
    await job.watched(2)
    await until(job, lambda: len(job.ranks[0].traces) == 3)
    assert job.ranks[0].traces[-1] == TraceOrder(second, 2, 1, 7)
    assert states(job) == ["failed", "requested"]
    assert "rank 1 was killed (SIGKILL" in job.message("trace_failed")


async def test_trace_order_is_repeated_until_a_starting_rank_takes_it(job, cluster):
    await job.train()
    job.ranks[0].running = False
    ask(job)
    await until(job, lambda: job.ranks[0].asked_to_trace >= 3)
    job.ranks[0].running = True
    await until(job, lambda: len(job.ranks[0].traces) == 1)


async def test_trace_order_is_repeated_for_one_trace_while_another_was_delivered(job, cluster):
    await job.train()
    job.ranks[1].running = False
    passed, waits = ask(job), ask(job, profiled=(1,))
    await until(job, lambda: job.ranks[1].asked_to_trace and len(job.ranks[0].traces) == 1)
    job.ranks[1].running = True
    await until(job, lambda: [order.number for order in job.ranks[0].traces] == [passed, waits])


async def test_trace_of_agents_of_another_release_fails_with_a_reason(job, cluster):
    await job.train()
    job.ranks[0].refuse("tell trace", "Agent has no method 'tell' for other processes")
    ask(job)
    await until(job, lambda: states(job) == ["failed"])
    assert "perhaps since another release started them" in job.message("trace_failed")
