"""The agent of one rank: the long-lived process that owns a rank's device and the trainer that runs on it.

Plain Python, so that it starts fast and can be tested without Ray; the service makes a Ray actor of it. It imports
neither ray nor torch. The trainer dies with it; what the trainer reported stays here until the control plane has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.node.folders import paths_on_node
from manta.workers.node.host import this_host
from manta.workers.paths import memory_socket, rank_stem
from manta.workers.protocol.json_codec import JsonObject
from manta.workers.protocol.messages import (
    AgentDescription,
    Endpoint,
    Launched,
    LaunchOrder,
    StoredSnapshot,
    check_protocol,
)
from manta.workers.protocol.remote_call import Ownership, serve
from manta.workers.protocol.reports import KillReason, Report, TrainerStatus
from manta.workers.protocol.requests import RankRequest
from manta.workers.rank.report_buffer import ReportBuffer
from manta.workers.rank.trainer_slot import StaleGeneration, TrainerSlot
from manta.workers.settings import read_token_cache
from manta.workers.snapshot.backup import BackupError, BackupProgress, BackupSender, BackupServer, fetch
from manta.workers.snapshot.files import snapshot_files, stored_steps
from manta.workers.snapshot.node_memory import SnapshotMemory
from manta.workers.snapshot.snapshot_file import committed_steps
from manta.workers.system.regular_files import remove
from manta.workers.system.resources import usable_cores
from manta.workers.system.sockets import PortRange
from manta.workers.zygote.client import Exit


class Agent:
    """Owns rank `rank` of `job`: launches its trainer, buffers its reports, shares its snapshots. Its public methods
    are called by other processes."""

    def __init__(
        self,
        job: str,
        rank: int,
        home: str | None,
        runtime_folder: str,
        snapshot_folder: str | None,
        group: str = "",
        ports: PortRange | None = None,
    ):
        """`home`: of the job's logs, None if they go to the control plane with the reports; `runtime_folder`: see
        `workers/paths.py`; `snapshot_folder`: the job's, in shared memory; `group`: the agent's placement group;
        `ports`: to listen on, None: any."""
        self._group = group
        self._ownership = Ownership()
        self._reports = ReportBuffer()
        self._slot = TrainerSlot(job, rank, home, runtime_folder, snapshot_folder, self._reports)
        self._folder, self._ports = snapshot_folder, ports
        self._memory = SnapshotMemory(server=memory_socket(runtime_folder, this_host().node))
        self._server: BackupServer | None = None
        self._sender: BackupSender | None = None

    async def call(self, method: str, arguments: JsonObject) -> Any:
        """Call a method of this class from another process, with arguments and result as JSON (`remote_call.py`).
        Raises StaleOwner."""
        self._ownership.admit(method, arguments)
        return await serve(self, method, arguments)

    async def describe(self) -> AgentDescription:
        """The location of this rank."""
        host, order = this_host(), self._slot.order
        return AgentDescription(
            host=host.name,
            address=host.address,
            pid=os.getpid(),
            node=host.node,
            trainer_pid=self._slot.pid,
            generation=self._slot.generation,
            group=self._group,
            devices=host.devices,
            rank=None if order is None else order.rank,
            sizes=() if order is None else order.sizes,
            cores=usable_cores(),
            owner_epoch=self._ownership.epoch,
        )

    async def launch(self, order: LaunchOrder) -> Launched:
        """Start the trainer of a new generation from `order`.

        A resting trainer continues with it; any other running one is killed and reaped first. Raises StaleGeneration
        unless the order's generation is above every earlier one, ZygoteUnavailable if the node's zygote does not
        answer, ProtocolMismatch.
        """
        check_protocol("the control plane", order.protocol)
        launched = await self._slot.launch(order)
        await self.stop_backups()  # the last partner may be another rank's by now, or no rank's
        if self._server is not None:
            with contextlib.suppress(OSError):  # they only cost memory, and the generation has begun
                await asyncio.to_thread(self._server.remove_former, self._slot.rank)
        return launched

    async def prepare(self, order: LaunchOrder) -> bool:
        """Have a trainer ready for an order like this one, but of a later generation, unless one is running. Returns
        True when it is ready, False if that failed. Raises ZygoteUnavailable."""
        return await self._slot.prepare(order)

    async def tell(self, request: RankRequest) -> bool:
        """Have this rank's trainer carry out `request`. False if it cannot: none runs, or the request is for a
        generation that it is not in, or has left. A fault is remembered: it strikes the running trainer, or one of a
        later generation while this agent lives."""
        return self._slot.tell(request)

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        """Bring the trainer of `generation` to rest, after the present step if that ends within `patience` seconds;
        returns whether it is at rest. If it is not within `grace` more seconds, it is killed, so that this rank leaves
        the generation in any case."""
        return await self._slot.rest(generation, grace, patience)

    async def progress(self) -> TrainerStatus | None:
        """The trainer's position; None if none is running, or none is watched."""
        return self._slot.status()

    async def stacks(self, pid: int) -> str:
        """The stacks of all threads of the trainer `pid`, or the kernel's information about a process that does not
        answer; empty if it is not this agent's. They are also written to the rank's log."""
        return await self._slot.stacks(pid)

    async def flight_record(self, pid: int) -> FlightRecord | None:
        """NCCL's flight record in the trainer `pid`; None if it is not this agent's, or does not answer."""
        return await self._slot.flight_record(pid)

    async def kill(self, pid: int, kind: str, message: str, after_commit: bool = False) -> bool:
        """SIGKILL the trainer `pid`, with `after_commit` after the next step that it commits; its exit report says why.
        False if it is not this agent's, has ended, or does not commit."""
        return await self._slot.kill(pid, KillReason(kind, message), after_commit)

    async def snapshot_steps(self, layout: str | None = None) -> list[int]:
        """Committed steps whose state is complete in this rank's shared memory, ascending; with `layout`, only those of
        the layout with that tag."""
        return [] if self._folder is None else stored_steps(self._folder, self._slot.rank, layout)

    async def snapshot_files(self) -> list[StoredSnapshot]:
        """The job's snapshot files on this node, of all ranks and layouts."""
        files = snapshot_files(self._folder) if self._folder is not None else []
        return [
            StoredSnapshot(str(file.path), file.rank, file.layout, file.is_backup, tuple(committed_steps(file.path)))
            for file in files
        ]

    async def receive_backups(self, token: str, generation: int) -> Endpoint | None:
        """Accept backups of other ranks' snapshots, from callers that know `token` and are of `generation` or later,
        and serve snapshots. Returns the address; None without shared memory, where there are none. Raises BackupError
        for an older generation than before."""
        if self._folder is None:
            return None
        if self._server is None:
            host = this_host().address
            self._server = BackupServer(self._folder, host, token, generation, self._ports, self._memory)
        self._server.expect(token, generation)
        return Endpoint(*self._server.address)

    async def send_backups(self, partner: Endpoint, token: str, generation: int, layout: str, every: int = 1) -> None:
        """From now on stream this rank's snapshots of the layout with tag `layout` to the agent at `partner`, and to no
        other. `every`: see BackupSender. Raises StaleGeneration."""
        rank, current = self._slot.rank, self._slot.generation
        if generation < current:
            raise StaleGeneration(f"Generation {generation} of rank {rank} was replaced by {current}.")
        await self.stop_backups()
        if self._folder is not None:
            address = (partner.host, partner.port)
            self._sender = BackupSender(self._folder, rank, layout, address, token, generation, every)

    async def stop_backups(self) -> None:
        """Stop sending snapshots; the partner keeps what it has."""
        sender, self._sender = self._sender, None
        if sender is not None:
            await asyncio.to_thread(sender.stop)

    async def backup_progress(self) -> BackupProgress | None:
        """The progress of this rank's backup; None without a partner."""
        return self._sender.state if self._sender is not None else None

    async def fetch_snapshot(
        self, rank: int, holder: Endpoint, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        """Copy the snapshots of `rank`, or those of the rank `of` with the same state, from the agent at `holder` to
        this node; returns the steps that arrived complete. Raises BackupError, SharedMemoryError, OSError."""
        if self._folder is None:
            raise BackupError("this agent was started without a folder in shared memory")
        place = (self._folder, rank, layout, (holder.host, holder.port))
        return await asyncio.to_thread(fetch, *place, token, generation, of, self._memory)

    async def reports(self, after: int, timeout: float, kept: tuple[int, ...] | None = None) -> list[Report]:
        """Reports with a sequence number above `after`: at once if there are any, otherwise within `timeout` seconds.

        A request is an acknowledgement: reports up to `after` are deleted; printed lines only up to `kept` (rank,
        generation, sequence), if given. Returns at most some thousands at a time; ask again.
        """
        return await self._reports.read(after, timeout, None if kept is None else (kept[0], kept[1], kept[2]))

    async def stop(self) -> Exit:
        """SIGKILL the trainer and wait until it is reaped. Returns how it ended; `Exit(None, None)` if none was
        running."""
        return await self._slot.stop()

    async def close(self) -> None:
        """Stop for good: the trainer is gone, this rank's snapshots and the backups that it received are removed. The
        agent may then be killed."""
        await self._slot.stop()
        await self.stop_backups()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None
        if self._folder is None:
            return
        folder = Path(self._folder)
        for file in folder.glob(f"{rank_stem(self._slot.rank)}.*"):
            remove(file)
        with contextlib.suppress(OSError):  # other ranks of the job have files there
            folder.rmdir()


class AgentOnNode(Agent):
    """Determines its folders on this node by itself: they may differ from the control plane's."""

    def __init__(
        self,
        job: str,
        rank: int,
        home: str,
        installation: str = "",
        group: str = "",
        ports: str | None = None,
        reports_lines: bool = False,
    ):
        """`home`: the service's; `installation`: its id, for `workers/node/folders.py`; `group`: the agent's placement
        group; `ports`: a range for it and its trainer to listen on, None: any; `reports_lines`: the output of its
        trainers goes to the control plane, even if the node shares the home."""
        paths = paths_on_node(home, installation)
        logs = home if paths.home == Path(home) and not reports_lines else None
        self._token_cache = str(read_token_cache(paths.token_cache))
        self._memory_socket = str(memory_socket(paths.runtime_folder, this_host().node))
        snapshots, listening = str(paths.snapshot_folder(job)), None if ports is None else PortRange.of(ports)
        super().__init__(job, rank, logs, str(paths.runtime_folder), snapshots, group, listening)

    async def launch(self, order: LaunchOrder) -> Launched:
        """Like `Agent.launch`; if the order includes snapshots, they are on this node."""
        return await super().launch(self._here(order))

    async def prepare(self, order: LaunchOrder) -> bool:
        """Like `Agent.prepare`."""
        return await super().prepare(self._here(order))

    def _here(self, order: LaunchOrder) -> LaunchOrder:
        snapshots = None if order.snapshot_folder is None else self._folder
        own = replace(order, token_cache=self._token_cache, memory_keeper=self._memory_socket, ports=self._ports)
        return replace(own, snapshot_folder=snapshots)
