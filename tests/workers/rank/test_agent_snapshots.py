"""What an agent shares of its job's snapshots, and what it does where there is no shared memory."""

import asyncio

import pytest
import torch
from stepped_snapshots import parts_of

from manta.workers.protocol.messages import Endpoint, LaunchOrder, StoredSnapshot
from manta.workers.rank import agent as module
from manta.workers.rank.agent import Agent
from manta.workers.rank.trainer_slot import StaleGeneration
from manta.workers.snapshot.backup import BackupError
from manta.workers.snapshot.files import snapshot_path
from manta.workers.snapshot.node_memory import SnapshotMemory
from manta.workers.snapshot.snapshots import Snapshots

LAYOUT = "0a0a0a0a"
NOWHERE = Endpoint("127.0.0.1", 1)


class Slot:
    """Stands for the slot of a trainer that is launched and ends at once."""

    def __init__(self, rank, generation=0):
        self.rank, self.generation = rank, generation

    async def launch(self, order):
        return order.rank

    async def stop(self):
        pass


@pytest.fixture
def make_agent(tmp_path):
    """Makes the agent of a rank; must be called in a running event loop."""

    def make(rank=0, folder=tmp_path, generation=0):
        agent = Agent("job-1", rank, None, str(tmp_path), None if folder is None else str(folder))
        agent._slot = Slot(rank, generation)
        return agent

    return make


async def test_agent_without_shared_memory_has_no_snapshots_to_share(make_agent):
    agent = make_agent(folder=None)
    assert (await agent.snapshot_steps(), await agent.snapshot_files()) == ([], [])
    assert await agent.receive_backups("token", 1) is None
    await agent.send_backups(NOWHERE, "token", 1, LAYOUT)
    assert await agent.backup_progress() is None
    with pytest.raises(BackupError, match="without a folder"):
        await agent.fetch_snapshot(0, NOWHERE, "token", 1, LAYOUT)
    await agent.close()


async def test_agent_lists_the_folders_snapshots_and_removes_its_own_on_close(make_agent, tmp_path):
    for rank in (0, 1):
        snapshots = Snapshots(tmp_path / "s", rank, parts_of([torch.zeros(8)]), b"0" * 16, LAYOUT)
        snapshots.save(rank + 4)
        snapshots.close()
    first, second = (make_agent(rank, tmp_path / "s") for rank in (0, 1))
    assert await second.snapshot_steps() == await second.snapshot_steps(LAYOUT) == [5]
    assert await second.snapshot_steps("ffffffff") == []
    of_rank_0, of_rank_1 = await first.snapshot_files()
    path = str(snapshot_path(tmp_path / "s", 0, LAYOUT))
    assert of_rank_0 == StoredSnapshot(path, 0, LAYOUT, is_backup=False, steps=(4,))
    assert (of_rank_1.rank, of_rank_1.steps) == (1, (5,))
    await first.close()
    assert [file.rank for file in await second.snapshot_files()] == [1]
    await second.close()
    assert not (tmp_path / "s").exists()


async def test_agent_accepts_backups_of_later_generations_and_refuses_earlier_ones(make_agent):
    agent = make_agent()
    address = await agent.receive_backups("token", 2)
    assert await agent.receive_backups("another", 3) == address
    with pytest.raises(BackupError, match="generation 1 was replaced by 3"):
        await agent.receive_backups("token", 1)
    await agent.close()


async def test_agent_sends_snapshots_to_one_partner_at_a_time(make_agent, tmp_path, monkeypatch):
    sending = []

    class Sender:
        """Stands for a BackupSender."""

        def __init__(self, *arguments):
            self.arguments, self.state = arguments, f"how far {arguments[3]} is"
            sending.append(arguments)

        def stop(self):
            sending.remove(self.arguments)

    monkeypatch.setattr(module, "BackupSender", Sender)
    agent = make_agent(5, generation=7)
    for port in (1, 2):
        address = ("127.0.0.1", port)
        await agent.send_backups(Endpoint(*address), "token", 7, LAYOUT, every=3)
        assert sending == [(str(tmp_path), 5, LAYOUT, address, "token", 7, 3)]
        assert await agent.backup_progress() == f"how far {address} is"
    with pytest.raises(StaleGeneration, match="Generation 6 of rank 5 was replaced by 7"):
        await agent.send_backups(NOWHERE, "token", 6, LAYOUT)
    await agent.launch(LaunchOrder("job-1", 8, 5, {}))
    assert (sending, await agent.backup_progress()) == ([], None)
    await agent.send_backups(NOWHERE, "token", 8, LAYOUT)
    assert sending[0][-1] == 1, "every step where nothing else is said"
    await agent.close()
    assert sending == []


async def test_snapshot_of_a_rank_can_be_fetched_from_one_with_the_same_state(make_agent, tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(module, "fetch", lambda *arguments: fetched.append(arguments) or [4, 5])
    agent = make_agent()
    assert await agent.fetch_snapshot(2, NOWHERE, "token", 7, LAYOUT, of=0) == [4, 5]
    await agent.fetch_snapshot(2, NOWHERE, "token", 7, LAYOUT)
    same = (str(tmp_path), 2, LAYOUT, ("127.0.0.1", 1), "token", 7)
    here = SnapshotMemory("auto", tmp_path / "memory.sock")
    assert fetched == [(*same, 0, here), (*same, None, here)]


async def test_closed_agent_takes_no_backups_until_it_begins_anew(make_agent):
    agent = make_agent()
    address = await agent.receive_backups("token", 2)
    await agent.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(address.host, address.port)
    assert await agent.receive_backups("token", 1) is not None, "it may begin anew"
    await agent.close()


async def test_agent_serves_snapshots_for_the_newest_token_and_generation_only(make_agent):
    agent = make_agent()
    address = await agent.receive_backups("token", 2)
    await agent.receive_backups("another", 3)
    for token, generation, reason in (("token", 3, "does not know"), ("another", 2, "was replaced by 3")):
        with pytest.raises(BackupError, match=reason):
            await agent.fetch_snapshot(0, address, token, generation, LAYOUT)
    with pytest.raises(BackupError, match="there is no snapshot of rank 0"):
        await agent.fetch_snapshot(0, address, "another", 3, LAYOUT)
    await agent.close()


async def test_new_generation_removes_backups_of_a_former_partner(make_agent, monkeypatch):
    asked = []
    monkeypatch.setattr(module.BackupServer, "remove_former", lambda self, rank: asked.append(rank))
    agent = make_agent(4)
    await agent.launch(LaunchOrder("job-1", 1, 4, {}))
    assert asked == [], "nobody's were taken"
    await agent.receive_backups("token", 2)
    await agent.launch(LaunchOrder("job-1", 2, 4, {}))
    await agent.close()
    assert asked == [4]
