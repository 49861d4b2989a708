"""Agents of a running generation that answer late, not at all, or cannot be asked any more."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from manta.service.job import generation
from manta.service.job.generation import RunningGeneration
from manta.service.job.inbox import Inbox
from manta.workers.protocol.reports import EXIT_SAVED, Exited, Finished, Metrics
from tests.service.support.generations import agent_of
from tests.service.support.waiting import reached


@pytest.fixture
def quick(monkeypatch):
    """Agents are asked after a centisecond, and given up after five more."""
    monkeypatch.setattr(generation, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(generation, "ANSWER_SECONDS", 0.05)


async def test_dead_agent_is_a_death_and_does_not_keep_stop_waiting(running, agents):
    agents[0].lose()
    await running.wait(Inbox())
    await running.stop()
    assert [(death.rank, death.kind) for death in running.deaths] == [(0, "agent_lost"), (1, "stopped")]


@pytest.mark.parametrize("agents", [(None, 1)], indirect=True)
async def test_agent_lost_before_adoption_is_a_death_and_others_are_heard(running, agents, handled):
    agents[1].say(Metrics(()))
    await running.wait(Inbox())
    await running.stop()
    assert [(death.rank, death.kind) for death in running.deaths] == [(0, "agent_lost"), (1, "stopped")]
    assert running.deaths[0].message == "lost its agent while the control plane was away"
    assert (1, "metrics") in handled


async def test_agent_that_does_not_answer_is_given_up(running, agents, monkeypatch):
    monkeypatch.setattr("manta.service.job.generation.STOP_SECONDS", 0.05)
    agents[0].stop = asyncio.Event().wait
    agents[1].say(Exited(signal=9))
    await running.wait(Inbox())
    await running.stop()
    assert [(death.rank, death.kind) for death in running.deaths] == [(1, "killed"), (0, "agent_lost")]
    assert running.deaths[1].sentence == "rank 0 was given up: its agent does not answer"


async def test_rank_whose_last_report_is_being_stored_is_not_given_up(monkeypatch):
    """The database may take longer than an agent may: that says nothing about the agent."""
    monkeypatch.setattr(generation, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(generation, "LAST_REPORTS_POLL_SECONDS", 0.01)
    agents, stored = [agent_of(0), agent_of(1)], asyncio.Event()

    async def handle(report):
        await stored.wait()

    running = RunningGeneration(agents, 1, {}, handle)
    resting = asyncio.create_task(running.rest(0.01))
    await asyncio.wait([resting], timeout=0.5)
    assert not resting.done() and running.deaths == []
    stored.set()
    await resting
    assert sorted(running.resting) == [0, 1] and running.deaths == []


async def test_agent_that_does_not_say_how_its_trainer_ended_is_given_up(running, agents, handled, monkeypatch):
    monkeypatch.setattr(generation, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(generation, "LAST_REPORTS_POLL_SECONDS", 0.01)
    agents[1].rest = AsyncMock(return_value=None)
    await running.rest(0.01)
    assert [(death.rank, death.kind) for death in running.deaths] == [(1, "agent_lost")]
    agents[1].say(Metrics(()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (1, "metrics") not in handled, "what it says later belongs to no generation"


async def test_ranks_slow_to_report_their_end_are_waited_for(running, agents, monkeypatch):
    monkeypatch.setattr(generation, "LAST_REPORTS_POLL_SECONDS", 0.001)

    async def later(*arguments):
        asyncio.get_running_loop().call_later(0.02, agents[1].be_stopped)

    agents[1].rest = later
    await running.rest(0.01)
    assert [(death.rank, death.kind) for death in running.deaths] == [(1, "stopped")]


async def test_agent_that_answers_nothing_is_lost_even_when_no_rank_waits_for_its_own(quick, running, agents):
    agents[1].silence()
    agents[0].finish(9)
    await running.wait(Inbox())
    (death,) = running.deaths
    assert (death.rank, death.kind, death.message) == (1, "agent_lost", "lost its agent (AgentTimeout)")


@pytest.mark.parametrize(("agents", "seconds"), [(2, 30.0), (8, 30.0), (64, 128.0)], indirect=["agents"])
async def test_agent_poll_interval_grows_with_the_number_of_ranks(running, agents, seconds):
    asked = []
    for agent in agents:
        agent.reports = lambda after, timeout: asked.append(timeout) or asyncio.Event().wait()
    await asyncio.sleep(0)
    assert asked == [seconds] * len(agents)


@pytest.mark.parametrize("said", [[Finished(9), Exited(code=0)], [Exited(code=EXIT_SAVED)]], ids=["finished", "saved"])
async def test_agent_silent_after_others_finished_or_saved_is_given_up_sooner(agents, said, monkeypatch, quick):
    monkeypatch.setattr(generation, "POLLS_A_SECOND", 0.0001)
    running = RunningGeneration(agents, 1, {}, AsyncMock())
    agents[1].silence()
    await asyncio.sleep(0)
    for payload in said:
        agents[0].say(payload)
    await reached(lambda: running.all_ended)
    assert (running.finished, running.saved) == (({0}, set()) if len(said) == 2 else (set(), {0}))
    assert [(death.rank, death.kind) for death in running.deaths] == [(1, "agent_lost")]


async def test_agent_that_answers_a_second_poll_is_kept(quick, running, agents):
    """This process itself may have stood still meanwhile."""
    reports, asked = agents[1].reports, []

    async def late(after, timeout):
        asked.append(timeout)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return await reports(after, timeout)

    agents[1].reports = late
    for agent in agents:
        agent.finish(9)
    await running.wait(Inbox())
    assert (running.finished, running.deaths, asked) == ({0, 1}, [], [0.01, 0.0])


@pytest.mark.parametrize(("end", "seconds"), [("rest", (5.0, 20.0)), ("stop", ())])
async def test_agent_answer_timeout_covers_the_requested_work(running, monkeypatch, end, seconds):
    given, within = [], generation.within

    async def noted(seconds, answer):
        given.append(seconds)
        return await within(seconds, answer)

    monkeypatch.setattr(generation, "within", noted)
    await getattr(running, end)(*seconds)
    assert given == [sum(seconds) + generation.STOP_SECONDS] * 2


async def test_rank_on_a_lost_node_is_dead_and_its_later_reports_are_ignored(running, agents, handled):
    waiting = asyncio.create_task(running.wait(Inbox()))
    await asyncio.sleep(0)
    running.lose(1, "was on a node that is lost")
    await waiting
    (death,) = running.deaths
    assert (death.rank, death.kind, death.message) == (1, "agent_lost", "was on a node that is lost")
    agents[0].say(Metrics(()))
    agents[1].finish(9)
    await reached(lambda: handled)
    assert (handled, running.finished) == ([(0, "metrics")], set())
