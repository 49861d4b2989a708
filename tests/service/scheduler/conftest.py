"""A scheduler, and a cluster of one node that exists on paper."""

import asyncio

import pytest

from manta.service.control import data_checks
from manta.service.control.scheduler import Scheduler
from tests.service.support.fake_cluster import FakeCluster


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A look at data that the machine is slow in taking is no data that does not answer."""
    monkeypatch.setattr(data_checks, "POLL_SECONDS", 60.0)


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path, node=8)


@pytest.fixture
def nodes(cluster):
    return cluster.nodes


@pytest.fixture
def look(store, cluster):
    """One pass over the queue, all of one scheduler; answers (job, generation) of the jobs that were handed to
    supervisors."""
    placed = []
    scheduler = Scheduler(store, cluster, lambda job, generation: placed.append((job.id, generation)))

    def once():
        placed.clear()
        asyncio.run(scheduler._round())
        return list(placed)

    return once
