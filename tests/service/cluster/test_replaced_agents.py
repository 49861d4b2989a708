"""Agents that take the places of others, without Ray."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from manta.service.cluster import cluster as cluster_module
from manta.service.cluster.cluster import Cluster
from manta.service.cluster.placement import Seat
from manta.workers.paths import Paths

SEATS = {2: Seat("group", 0), 3: Seat("group", 1)}


class StartedAgents:
    """Starts one agent for each seat, and notes which are ended."""

    def __init__(self):
        self.started, self.killed = [], []

    async def start(self, job, generation, seats, unit):
        self.started.append((job, generation, list(seats), unit))
        return ["second", "third"]

    async def kill(self, agents):
        self.killed += agents


@pytest.fixture
def agents():
    return StartedAgents()


def replaced(tmp_path, agents, state="CREATED"):
    cluster = Cluster(
        Paths.of(tmp_path), None, SimpleNamespace(states=AsyncMock(return_value={"group": state})), agents, None, None
    )
    return asyncio.run(cluster.replace_agents("job_1", 4, SEATS, "manta_slot"))


@pytest.mark.parametrize("answer", [True, False])
def test_new_agents_that_do_not_answer_give_their_seats_back(tmp_path, agents, monkeypatch, answer):
    async def describe(asked):
        assert asked == ["second", "third"]
        return ["as", "they are"] if answer else None

    monkeypatch.setattr(cluster_module, "describe", describe)
    assert replaced(tmp_path, agents) == (["second", "third"] if answer else None)
    assert agents.started == [("job_1", 4, [2, 3], "manta_slot")]
    assert agents.killed == ([] if answer else ["second", "third"])


@pytest.mark.parametrize("state", ["PENDING", "RESCHEDULING"])
def test_agents_are_not_replaced_in_a_placement_group_that_no_longer_stands(tmp_path, agents, state):
    assert replaced(tmp_path, agents, state) is None
    assert agents.started == []
