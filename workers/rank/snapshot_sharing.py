"""An agent's part in the snapshots of its job: those in its node's shared memory, backups to and from other nodes, and
fetching from other nodes. No trainer takes part."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from manta.workers.node.host import this_host
from manta.workers.paths import rank_stem
from manta.workers.protocol.messages import Endpoint, StoredSnapshot
from manta.workers.snapshot.backup import BackupError, BackupProgress, BackupSender, BackupServer, fetch
from manta.workers.snapshot.files import snapshot_files, stored_steps
from manta.workers.snapshot.node_memory import SnapshotMemory
from manta.workers.snapshot.snapshot_file import committed_steps
from manta.workers.system.ports import PortRange
from manta.workers.system.regular_files import remove


class SnapshotSharing:
    """The snapshots of one job, as one agent serves and receives them. Without a folder there are none."""

    def __init__(self, folder: str | None, ports: PortRange | None = None, keeper: Path | None = None):
        """`folder`: the job's, in shared memory; `ports`: to listen on, None: any; `keeper`: socket of the node's
        MemoryServer."""
        self._folder, self._ports = folder, ports
        self._memory = SnapshotMemory(server=keeper)
        self._server: BackupServer | None = None
        self._sender: BackupSender | None = None

    def steps(self, rank: int, layout: str | None = None) -> list[int]:
        """Committed steps whose state is complete in the own files of `rank`, ascending; with `layout`, only those of
        the layout with that tag."""
        return [] if self._folder is None else stored_steps(self._folder, rank, layout)

    def files(self) -> list[StoredSnapshot]:
        """The job's snapshot files on this node, of all ranks and layouts."""
        files = snapshot_files(self._folder) if self._folder is not None else []
        return [
            StoredSnapshot(str(file.path), file.rank, file.layout, file.is_backup, tuple(committed_steps(file.path)))
            for file in files
        ]

    def receive(self, token: str, generation: int) -> Endpoint | None:
        """From now on accept backups from callers that know `token` and are of `generation` or later, and serve
        snapshots to them; returns the address. Raises BackupError for an older generation than before."""
        if self._folder is None:
            return None
        if self._server is None:
            host = this_host().address
            self._server = BackupServer(self._folder, host, token, generation, self._ports, self._memory)
        self._server.expect(token, generation)
        return Endpoint(*self._server.address)

    async def send(
        self, rank: int, partner: Endpoint, token: str, generation: int, layout: str, every: int = 1
    ) -> None:
        """From now on stream the snapshots of `rank` in the layout with tag `layout` to `partner`, and to no other.
        `every`: see BackupSender."""
        await self.stop_sending()
        if self._folder is not None:
            address = (partner.host, partner.port)
            self._sender = BackupSender(self._folder, rank, layout, address, token, generation, every)

    async def stop_sending(self) -> None:
        """Stop sending snapshots; the partner keeps what it has."""
        sender, self._sender = self._sender, None
        if sender is not None:
            await asyncio.to_thread(sender.stop)

    async def begin(self, rank: int) -> None:
        """A generation begins, in which this agent's rank is `rank`. Sending to the last partner stops: it may be
        another rank's by now, or no rank's. Received backups that are no longer needed are removed."""
        await self.stop_sending()
        if self._server is not None:
            with contextlib.suppress(OSError):  # they only cost memory, and the generation has begun
                await asyncio.to_thread(self._server.remove_former, rank)

    @property
    def progress(self) -> BackupProgress | None:
        """The progress of the backup; None if none is being sent."""
        return self._sender.state if self._sender is not None else None

    async def fetch(
        self, rank: int, holder: Endpoint, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        """Copy the snapshots of `rank`, or those of the rank `of` with the same state, from the agent at `holder` to
        this node; returns the steps that arrived complete. Raises BackupError, SharedMemoryError, OSError."""
        if self._folder is None:
            raise BackupError("this agent was started without a folder in shared memory")
        address = (holder.host, holder.port)
        place = (self._folder, rank, layout, address)
        return await asyncio.to_thread(fetch, *place, token, generation, of, self._memory)

    async def close(self, rank: int) -> None:
        """Stop sending and receiving; remove received backups and all files of `rank`."""
        await self.stop_sending()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None
        if self._folder is None:
            return
        folder = Path(self._folder)
        for file in folder.glob(f"{rank_stem(rank)}.*"):
            remove(file)
        with contextlib.suppress(OSError):  # other ranks of the job have files there
            folder.rmdir()
