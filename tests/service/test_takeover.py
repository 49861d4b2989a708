"""What runs under another release is asked for before this one changes anything."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster.placement import placement_group_name, seats_of
from manta.service.control import takeover
from manta.service.control.takeover import CannotTakeOver, refuse_incompatible_agents
from manta.service.states import JobState
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import PROTOCOL, ProtocolMismatch
from tests.service.support.fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path, one=16)


def agents_of(cluster, *job_ids, protocol=None):
    """Agents of these jobs, two of each."""

    async def place():
        for job in job_ids:
            layout = ParallelConfig(tensor=2)
            await cluster.groups.acquire(job, 1, layout, "manta_slot")
            seats = seats_of(layout, [placement_group_name(job, 1, 0)])
            for agent in await cluster.agents.start(job, 1, seats, "manta_slot"):
                if protocol is not None:
                    agent.describe = AsyncMock(side_effect=ProtocolMismatch("the agent", protocol))

    asyncio.run(place())


def look(cluster, **states):
    def known(job_ids):
        return {job: JobState(state) for job, state in states.items() if job in job_ids}

    asyncio.run(refuse_incompatible_agents(cluster, known))


def test_takeover_accepts_gangs_of_supported_protocols(cluster):
    look(cluster)
    agents_of(cluster, "job_a", "job_b")
    look(cluster, job_a="RUNNING", job_b="RECOVERING")


def test_takeover_refusal_names_the_jobs_and_both_protocols(cluster):
    agents_of(cluster, "job_a")
    agents_of(cluster, "job_b", protocol=1)
    with pytest.raises(CannotTakeOver) as caught:
        look(cluster, job_a="RUNNING", job_b="STARTING")
    assert str(caught.value).startswith(
        f"cannot take over job_b: their agents speak protocol 1 and this release of Manta {PROTOCOL}. Nothing was "
    )
    assert "Start their release again and let them finish, or end their processes with" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("state", ["QUEUED", "CANCELLING", "FAILED", "SUCCEEDED", "unknown to the database"])
def test_takeover_ignores_gangs_of_jobs_that_need_them_no_more(cluster, state):
    agents_of(cluster, "job_a", protocol=1)
    look(cluster, **({"job_a": state} if state.isupper() else {}))


def test_takeover_ignores_silent_and_lost_agents(cluster, monkeypatch):
    monkeypatch.setattr(takeover, "REQUEST_SECONDS", 0.01)
    agents_of(cluster, "job_a")
    silent, lost = cluster.agents.living.values()
    silent.silence()
    lost.lose()
    look(cluster, job_a="RUNNING")

    async def find(names):
        return [None for _ in names]

    monkeypatch.setattr(cluster.agents, "find", find)
    look(cluster, job_a="RUNNING")


def test_takeover_refusal_names_all_protocols_and_needs_one_agent_per_job(cluster):
    agents_of(cluster, "job_a", protocol=2)
    agents_of(cluster, "job_b", protocol=1)
    agents_of(cluster, "job_c")
    first, *_ = [agent for name, agent in cluster.agents.living.items() if "job_b" in name]
    del first.describe
    first.silence()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CannotTakeOver) as caught:
        patch.setattr(takeover, "REQUEST_SECONDS", 0.01)
        look(cluster, job_a="PAUSING", job_b="RESIZING", job_c="RUNNING")
    assert "cannot take over job_a, job_b: their agents speak protocol 1 and 2 and this" in str(caught.value)


@pytest.mark.parametrize(("letters", "more"), [("abcde", ": their agents"), ("abcdefg", " and 2 more: ")])
def test_takeover_refusal_names_five_jobs_and_counts_the_rest(cluster, letters, more):
    names = [f"job_{letter}" for letter in letters]
    agents_of(cluster, *names, protocol=1)
    with pytest.raises(CannotTakeOver, match=f"job_a, job_b, job_c, job_d, job_e{more}"):
        look(cluster, **dict.fromkeys(names, "RUNNING"))
