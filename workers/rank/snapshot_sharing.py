"""An agent's part in the snapshots of its job: what lies in its node's shared memory, backups to and from other nodes,
and fetching what lies elsewhere. No trainer takes part."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from workers.node.host import this_host
from workers.paths import rank_stem
from workers.protocol.messages import Endpoint, StoredSnapshot
from workers.snapshot.backup import BackupError, BackupProgress, BackupSender, BackupServer, fetch
from workers.snapshot.files import snapshot_files, steps_kept
from workers.snapshot.node_memory import SnapshotMemory
from workers.snapshot.snapshot_file import committed_steps
from workers.system.ports import PortRange


class SnapshotSharing:
    """The snapshots of one job, as one agent gives them out and takes them. Without a folder there are none."""

    def __init__(self, folder: str | None, ports: PortRange | None = None, keeper: Path | None = None):
        """`folder`: the job's in shared memory; `ports`: on which it listens, None: any; `keeper`: socket of the node's
        MemoryKeeper."""
        self._folder, self._ports = folder, ports
        self._memory = SnapshotMemory(keeper=keeper)
        self._server: BackupServer | None = None
        self._sender: BackupSender | None = None

    def steps(self, rank: int, layout: str | None = None) -> list[int]:
        """Committed steps whose state is whole in the own files of `rank`, ascending; with `layout`, the tag of one,
        only those of that layout."""
        return [] if self._folder is None else steps_kept(self._folder, rank, layout)

    def files(self) -> list[StoredSnapshot]:
        """The job's snapshot files on this node, of all ranks and layouts."""
        files = snapshot_files(self._folder) if self._folder is not None else []
        return [
            StoredSnapshot(str(file.path), file.rank, file.layout, file.is_backup, tuple(committed_steps(file.path)))
            for file in files
        ]

    def receive(self, token: str, generation: int) -> Endpoint | None:
        """From now on take backups from callers who know `token` and are of `generation` or later, and give snapshots
        out to them; where. Raises BackupError for an older generation than before."""
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
        """Stream the snapshots of `rank` in the layout with tag `layout` to `partner`, from now on and instead of any
        other. `every`: see BackupSender."""
        await self.stop_sending()
        if self._folder is not None:
            address = (partner.host, partner.port)
            self._sender = BackupSender(self._folder, rank, layout, address, token, generation, every)

    async def stop_sending(self) -> None:
        """Send no more snapshots; what the partner has stays there."""
        sender, self._sender = self._sender, None
        if sender is not None:
            await asyncio.to_thread(sender.stop)

    async def begin(self, rank: int) -> None:
        """A generation begins, in which this agent's is `rank`. What was sent to a partner is not any more: it may be
        another rank's by now, or no rank's. Backups that were taken, and are not needed any more, are removed."""
        await self.stop_sending()
        if self._server is not None:
            with contextlib.suppress(OSError):  # they cost memory, and the generation has begun
                await asyncio.to_thread(self._server.remove_former, rank)

    @property
    def progress(self) -> BackupProgress | None:
        """How far the backup is; None while none is sent."""
        return self._sender.state if self._sender is not None else None

    async def fetch(
        self, rank: int, holder: Endpoint, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        """Bring the snapshots of `rank` that the agent at `holder` has to this node, or those of the rank `of`, which
        has the same state; the steps that came whole. Raises BackupError, SharedMemoryError, OSError."""
        if self._folder is None:
            raise BackupError("this agent was started without a folder in shared memory")
        address = (holder.host, holder.port)
        place = (self._folder, rank, layout, address)
        return await asyncio.to_thread(fetch, *place, token, generation, of, self._memory)

    async def close(self, rank: int) -> None:
        """Neither send nor receive any more; remove the backups that were taken and all files of `rank`."""
        await self.stop_sending()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None
        if self._folder is None:
            return
        folder = Path(self._folder)
        for file in folder.glob(f"{rank_stem(rank)}.*"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks of the job have files there
            folder.rmdir()
