"""What an agent shares of its job's snapshots, and what it does where there is no shared memory."""

import asyncio

import pytest
import torch
from stepped_snapshots import parts_of

from manta.workers.protocol.messages import Endpoint, StoredSnapshot
from manta.workers.rank import snapshot_sharing
from manta.workers.rank.snapshot_sharing import SnapshotSharing
from manta.workers.snapshot.backup import BackupError
from manta.workers.snapshot.files import snapshot_path
from manta.workers.snapshot.node_memory import SnapshotMemory
from manta.workers.snapshot.snapshots import Snapshots

LAYOUT = "0a0a0a0a"
NOWHERE = Endpoint("127.0.0.1", 1)


def test_snapshot_sharing_without_shared_memory_has_nothing_to_share():
    async def body():
        sharing = SnapshotSharing(None)
        assert (sharing.steps(0), sharing.files(), sharing.receive("token", 1)) == ([], [], None)
        await sharing.send(0, NOWHERE, "token", 1, LAYOUT)
        assert sharing.progress is None
        with pytest.raises(BackupError, match="without a folder"):
            await sharing.fetch(0, NOWHERE, "token", 1, LAYOUT)
        await sharing.close(0)

    asyncio.run(body())


def test_snapshot_sharing_lists_the_folders_files_and_removes_its_own_on_close(tmp_path):
    async def body():
        for rank in (0, 1):
            snapshots = Snapshots(tmp_path, rank, parts_of([torch.zeros(8)]), b"0" * 16, LAYOUT)
            snapshots.save(rank + 4)
            snapshots.close()
        sharing = SnapshotSharing(str(tmp_path))
        assert sharing.steps(1) == sharing.steps(1, LAYOUT) == [5]
        assert sharing.steps(1, "ffffffff") == []
        of_rank_0, of_rank_1 = sharing.files()
        path = str(snapshot_path(tmp_path, 0, LAYOUT))
        assert of_rank_0 == StoredSnapshot(path, 0, LAYOUT, is_backup=False, steps=(4,))
        assert (of_rank_1.rank, of_rank_1.steps) == (1, (5,))
        await sharing.close(0)
        assert [file.rank for file in sharing.files()] == [1]
        await sharing.close(1)
        assert not tmp_path.exists()

    asyncio.run(body())


def test_snapshot_server_accepts_later_generations_and_refuses_earlier_ones(tmp_path):
    async def body():
        sharing = SnapshotSharing(str(tmp_path))
        address = sharing.receive("token", 2)
        assert sharing.receive("another", 3) == address
        with pytest.raises(BackupError, match="generation 1 was replaced by 3"):
            sharing.receive("token", 1)
        await sharing.close(0)

    asyncio.run(body())


def test_snapshots_are_sent_to_one_partner_at_a_time(tmp_path, monkeypatch):
    sending = []

    class Sender:
        """Stands for a BackupSender."""

        def __init__(self, *arguments):
            self.arguments, self.state = arguments, f"how far {arguments[3]} is"
            sending.append(arguments)

        def stop(self):
            sending.remove(self.arguments)

    monkeypatch.setattr(snapshot_sharing, "BackupSender", Sender)

    async def body():
        sharing = SnapshotSharing(str(tmp_path))
        for port in (1, 2):
            address = ("127.0.0.1", port)
            await sharing.send(5, Endpoint(*address), "token", 7, LAYOUT, every=3)
            assert sending == [(str(tmp_path), 5, LAYOUT, address, "token", 7, 3)]
            assert sharing.progress == f"how far {address} is"
        await sharing.begin(5)
        assert (sending, sharing.progress) == ([], None)
        await sharing.send(5, NOWHERE, "token", 7, LAYOUT)
        assert sending[0][-1] == 1, "every step where nothing else is said"
        await sharing.close(5)
        assert sending == []

    asyncio.run(body())


def test_snapshot_of_a_rank_can_be_fetched_from_one_with_the_same_state(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(snapshot_sharing, "fetch", lambda *arguments: fetched.append(arguments) or [4, 5])

    async def body():
        sharing = SnapshotSharing(str(tmp_path), keeper=tmp_path / "memory.sock")
        assert await sharing.fetch(2, NOWHERE, "token", 7, LAYOUT, of=0) == [4, 5]
        await sharing.fetch(2, NOWHERE, "token", 7, LAYOUT)

    asyncio.run(body())
    same = (str(tmp_path), 2, LAYOUT, ("127.0.0.1", 1), "token", 7)
    here = SnapshotMemory("auto", tmp_path / "memory.sock")
    assert fetched == [(*same, 0, here), (*same, None, here)]


def test_closed_snapshot_server_takes_no_backups_until_it_begins_anew(tmp_path):
    async def body():
        sharing = SnapshotSharing(str(tmp_path))
        address = sharing.receive("token", 2)
        await sharing.close(0)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address.host, address.port)
        assert sharing.receive("token", 1) is not None, "it may begin anew"
        await sharing.close(0)

    asyncio.run(body())


def test_snapshot_server_accepts_the_newest_token_and_generation_only(tmp_path):
    async def body():
        sharing = SnapshotSharing(str(tmp_path))
        address = sharing.receive("token", 2)
        sharing.receive("another", 3)
        for token, generation, reason in (("token", 3, "does not know"), ("another", 2, "was replaced by 3")):
            with pytest.raises(BackupError, match=reason):
                await sharing.fetch(0, address, token, generation, LAYOUT)
        with pytest.raises(BackupError, match="there is no snapshot of rank 0"):
            await sharing.fetch(0, address, "another", 3, LAYOUT)
        await sharing.close(0)

    asyncio.run(body())


def test_new_generation_removes_backups_of_a_former_partner(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(snapshot_sharing.BackupServer, "remove_former", lambda self, rank: asked.append(rank))

    async def body():
        sharing = SnapshotSharing(str(tmp_path))
        await sharing.begin(4)
        assert asked == [], "nobody's were taken"
        sharing.receive("token", 2)
        await sharing.begin(4)
        await sharing.close(0)

    asyncio.run(body())
    assert asked == [4]
