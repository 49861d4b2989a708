"""Agents are asked by name, once for all who want to know, and what cannot be asked is a sentence."""

import asyncio

import pytest

from manta.service.cluster.agent_client import AgentTimeout
from manta.service.control.running_ranks import NoRanks, RankNotFound, RankTimeout, RunningRanks
from manta.service.states import JobState
from manta.service.store import generations, jobs, ranks
from manta.service.store.errors import JobNotFound
from manta.workers.protocol.reports import Position, TrainerStatus
from manta.workers.protocol.requests import SaveAndEnd


class Agent:
    """Answers, or does not."""

    def __init__(self, status, text="stack of it", silent=False):
        self.status, self.text, self.silent, self.asked, self.of = status, text, silent, 0, []

    async def progress(self):
        self.asked += 1
        if self.silent:
            raise AgentTimeout("no answer")
        return self.status

    async def tell(self, request):
        if self.silent:
            raise AgentTimeout("no answer")
        self.of.append(request)
        return True

    async def stacks(self, pid):
        self.of.append(pid)
        return self.text


class Cluster:
    """Finds agents by name."""

    def __init__(self, agents):
        self._agents, self.agents = agents, self

    async def find(self, names):
        return [self._agents.get(name) for name in names]


def status(pid, waits_for=None, overdue=False):
    record = Position(pid, 1, "reduction", 3, waits_for=waits_for, channel=2 if waits_for is not None else None)
    return TrainerStatus(pid, overdue, standing_seconds=4.0, record=record)


@pytest.fixture
def job(store, submit):
    """A RUNNING job of two replicas."""
    job_id = submit(parallel={"data": 2}).id

    def begin(session):
        generations.begin(session, job_id, "submitted", False)
        place = {"tensor": 0, "pipeline": 0, "generation": 1, "state": "running"}
        rows = [{**place, "rank": rank, "data": rank, "pid": 50 + rank, "actor": f"a{rank}"} for rank in range(2)]
        ranks.replace(session, job_id, rows)
        for state in (JobState.STARTING, JobState.RUNNING):
            jobs.transition(session, job_id, state)

    store.write(begin)
    return job_id


@pytest.fixture
def agents():
    return {"a0": Agent(status(50, overdue=True)), "a1": Agent(status(51, waits_for=0))}


@pytest.fixture
def running(store, agents):
    return RunningRanks(store, Cluster(agents))


async def test_concurrent_questions_about_running_ranks_share_one_look(running, agents, job):
    first, *others = await asyncio.gather(*(running.waits(job) for _ in range(5)))
    assert all(seen is first for seen in others)
    assert (first.waits.culprits, first.waits.ranks[1].waits_for) == ((0,), (0,))
    assert [agent.asked for agent in agents.values()] == [1, 1]


async def test_stale_look_at_running_ranks_is_repeated(running, agents, job, monkeypatch):
    monkeypatch.setattr("manta.service.control.running_ranks.FRESH_SECONDS", 0.0)
    await running.waits(job)
    await running.waits(job)
    assert agents["a0"].asked == 2


def test_rank_with_a_lost_or_silent_agent_is_unknown(running, agents, job):
    del agents["a0"]
    agents["a1"].silent = True
    seen = asyncio.run(running.waits(job))
    assert [rank.phase for rank in seen.waits.ranks] == ["unknown", "unknown"]


def test_stack_is_taken_from_the_current_trainer_of_a_rank(running, agents, job):
    stack = asyncio.run(running.stack(job, 1))
    assert (stack.rank, stack.pid, stack.text, agents["a1"].of) == (1, 51, "stack of it", [51])


def test_stack_or_waits_of_missing_ranks_are_refused_with_a_reason(running, agents, store, submit, job):
    with pytest.raises(RankNotFound, match="its ranks are 0 to 1"):
        asyncio.run(running.stack(job, 2))
    agents["a0"].status, agents["a1"].text = None, ""
    for rank, why in ((0, "no trainer runs there"), (1, "its trainer has ended")):
        with pytest.raises(RankTimeout, match=why):
            asyncio.run(running.stack(job, rank))
    agents["a1"].silent = True
    with pytest.raises(RankTimeout, match="does not answer"):
        asyncio.run(running.stack(job, 1))
    del agents["a0"]
    with pytest.raises(RankTimeout, match="its agent is gone"):
        asyncio.run(running.stack(job, 0))
    store.write(lambda session: ranks.end_all(session, job))
    queued = submit().id
    for about in (job, queued):
        with pytest.raises(NoRanks, match="no running ranks"):
            asyncio.run(running.waits(about))
    with pytest.raises(JobNotFound):
        asyncio.run(running.waits("job_000000000000"))


def test_request_is_told_to_all_ranks_and_a_silent_agent_is_named(store, job):
    agents = {"a0": Agent(None), "a1": Agent(None)}
    running, request = RunningRanks(store, Cluster(agents)), SaveAndEnd(1)
    asyncio.run(running.tell(job, request))
    agents["a1"].silent = True
    with pytest.raises(RankTimeout, match="rank 1 cannot be asked: its agent does not answer"):
        asyncio.run(running.tell(job, request))
    assert (agents["a0"].of, agents["a1"].of) == ([request, request], [request])
