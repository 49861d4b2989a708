"""Jobs under a supervisor, on a cluster that exists on paper."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from manta.service.job.generation import RunningGeneration
from manta.service.recovery import decisions
from manta.workers.protocol.reports import Report
from tests.service.support.fake_agents import FakeAgent
from tests.service.support.fake_cluster import FakeCluster
from tests.service.support.generations import agent_of
from tests.service.support.supervised_job import SupervisedJob


@pytest.fixture
def cluster(tmp_path) -> FakeCluster:
    """One node with eight slots."""
    return FakeCluster(tmp_path, one=8)


@pytest.fixture
def two_replicas(store, submit) -> Callable[..., SupervisedJob]:
    """A queued job of tensor 2 x data 2 ranks on a cluster, with some of its sections replaced."""

    def make(cluster, **sections) -> SupervisedJob:
        return SupervisedJob(store, cluster, submit(**{"parallel": {"tensor": 2, "data": 2}, **sections}))

    return make


@pytest.fixture
def job(two_replicas, cluster) -> SupervisedJob:
    """A queued job of tensor 2 x data 2 ranks."""
    return two_replicas(cluster)


@pytest.fixture
def agents(request) -> list[FakeAgent | None]:
    """Agents in generation 1: two, or as many as the parameter says; None for those that are gone."""
    ranks = getattr(request, "param", 2)
    return [rank if rank is None else agent_of(rank) for rank in (range(ranks) if isinstance(ranks, int) else ranks)]


@pytest.fixture
def handled() -> list[tuple[int, str]]:
    """Rank and kind of each report that `running` has handled."""
    return []


@pytest.fixture
@asynccontextmanager
async def running(agents, handled) -> AsyncIterator[RunningGeneration]:
    """Generation 1 over `agents`."""

    async def handle(report: Report) -> None:
        handled.append((report.rank, report.kind))

    made = RunningGeneration(agents, 1, {}, handle)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def short_waits(monkeypatch) -> None:
    """Repairs that do not help wait a millisecond before the next."""
    monkeypatch.setattr(decisions, "INITIAL_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(decisions, "MAX_WAIT_SECONDS", 0.001)
