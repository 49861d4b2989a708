"""Jobs under a supervisor, on a cluster that exists on paper."""

from collections.abc import Callable

import pytest

from manta.service.recovery import decisions
from tests.service.support.fake_cluster import FakeCluster
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
def short_waits(monkeypatch) -> None:
    """Repairs that do not help wait a millisecond before the next."""
    monkeypatch.setattr(decisions, "INITIAL_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(decisions, "MAX_WAIT_SECONDS", 0.001)
