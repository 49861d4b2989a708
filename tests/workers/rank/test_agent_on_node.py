"""An agent uses the folders of its own node, whatever those of the control plane are."""

import asyncio

import pytest

from manta.workers.node.folders import mark
from manta.workers.paths import Paths, memory_socket
from manta.workers.protocol.messages import Launched, LaunchOrder
from manta.workers.rank.agent import AgentOnNode
from manta.workers.rank.trainer_slot import TrainerSlot

ID = "manta-0123456789abcdef"


@pytest.fixture
def orders(monkeypatch):
    """What trainers are launched with, or prepared for."""
    seen = []

    async def launch(slot, order):
        seen.append(order)
        return Launched(1, False)

    async def prepare(slot, order):
        seen.append(order)
        return True

    monkeypatch.setattr(TrainerSlot, "launch", launch)
    monkeypatch.setattr(TrainerSlot, "prepare", prepare)
    return seen


def given(agent, snapshot_folder):
    async def body():
        order = LaunchOrder("job-1", 1, 0, {}, snapshot_folder=snapshot_folder)
        await agent.prepare(order)
        await agent.launch(order)

    asyncio.run(body())


def test_node_without_a_shared_home_uses_its_own_folders_and_reports_ranks_output(tmp_path, monkeypatch, orders):
    monkeypatch.setenv("HOME", str(tmp_path))
    own = Paths.of(tmp_path / ".manta" / "nodes" / ID)
    agent = AgentOnNode("job-1", 0, "/home/of/the/service", ID)
    given(agent, "/dev/shm/manta-of-the-service/job-1")
    assert [order.snapshot_folder for order in orders] == [str(own.snapshot_folder("job-1"))] * 2
    assert [order.token_cache for order in orders] == [str(own.token_cache)] * 2
    keeper = str(memory_socket(own.runtime_folder))
    assert [order.memory_keeper for order in orders] == [keeper] * 2
    assert (agent._slot._home, agent._slot._runtime_folder) == (None, str(own.runtime_folder))
    given(agent, None)
    assert orders[-1].snapshot_folder is None, "this generation is to make none"


def test_agent_on_a_node_that_shares_the_home_uses_it(tmp_path, orders):
    home = Paths.of(tmp_path / "home")
    mark(home.home, ID)
    agent = AgentOnNode("job-1", 0, str(home.home), ID)
    given(agent, str(home.snapshot_folder("job-1")))
    assert orders[0].snapshot_folder == str(home.snapshot_folder("job-1"))
    assert agent._slot._home == str(home.home)
