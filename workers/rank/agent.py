"""The agent of one rank: the long-lived process that owns a rank's device and the trainer that runs on it.

Plain Python, so that it starts fast and can be tested without Ray; the service makes a Ray actor of it. It imports
neither ray nor torch. The trainer dies with it; what the trainer reported stays here until the control plane has it.
"""

from __future__ import annotations

import os
from typing import Any

from workers.liveness.flight_record import FlightRecord
from workers.liveness.trainer_status import TrainerStatus
from workers.node.host import this_host
from workers.paths import memory_socket
from workers.protocol.json_codec import JsonObject
from workers.protocol.messages import (
    AgentDescription,
    Endpoint,
    Fault,
    Launched,
    LaunchOrder,
    StoredSnapshot,
    TraceOrder,
    check_protocol,
)
from workers.protocol.ownership import Ownership
from workers.protocol.remote_call import serve
from workers.protocol.reports import KillReason, Report
from workers.rank.report_buffer import ReportBuffer
from workers.rank.snapshot_sharing import SnapshotSharing
from workers.rank.trainer_slot import StaleGeneration, TrainerSlot
from workers.snapshot.backup import BackupProgress
from workers.system.cores import usable_cores
from workers.system.ports import PortRange
from workers.zygote.client import Exit


class Agent:
    """Owns rank `rank` of `job`: launches its trainer, buffers its reports, shares its snapshots. What other processes
    ask of it are its public methods."""

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
        """`home`: of the job's logs, None where they go to the control plane with the reports; `runtime_folder`: see
        `workers/paths.py`; `snapshot_folder`: the job's, in shared memory; `group`: the placement group that it is
        in; `ports`: on which it listens, None: any."""
        self._group = group
        self._ownership = Ownership()
        self._reports = ReportBuffer()
        self._slot = TrainerSlot(job, rank, home, runtime_folder, snapshot_folder, self._reports)
        self._sharing = SnapshotSharing(snapshot_folder, ports, memory_socket(runtime_folder, this_host().node))

    async def call(self, method: str, arguments: JsonObject) -> Any:
        """A method of this class for other processes: arguments and answer as JSON (`remote_call.py`). Raises
        StaleOwner."""
        self._ownership.admit(method, arguments)
        return await serve(self, method, arguments)

    async def describe(self) -> AgentDescription:
        """Where this rank is."""
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

        A trainer at rest continues with it; any other that still runs is killed and reaped first. Raises
        StaleGeneration unless the order's generation is above every earlier one, ZygoteUnavailable if the node's
        zygote does not answer, ProtocolMismatch.
        """
        check_protocol("the control plane", order.protocol)
        launched = await self._slot.launch(order)
        await self._sharing.begin(self._slot.rank)
        return launched

    async def prepare(self, order: LaunchOrder) -> bool:
        """Have a trainer ready for an order like this one, but of a later generation, unless one runs. Answers once it
        is ready; False when it could not be made so. Raises ZygoteUnavailable."""
        return await self._slot.prepare(order)

    async def arm(self, fault: Fault) -> None:
        """Have this rank's trainer carry out `fault` when it gets there: the one that runs now, or one of a later
        generation while this agent lives."""
        self._slot.arm(fault)

    async def trace(self, order: TraceOrder) -> bool:
        """Have all ranks of the order's generation record steps, from one and the same on; asked of rank 0. False when
        its trainer is not of that generation, or at rest."""
        return self._slot.trace(order)

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        """Bring the trainer of `generation` to rest, after the step under way if that ends within `patience` seconds;
        whether it is. One that is not within `grace` seconds more is killed, so that this rank is out of the generation
        in any case."""
        return await self._slot.rest(generation, grace, patience)

    async def save_and_end(self, generation: int) -> bool:
        """Have all ranks of `generation` save their state after one and the same step, and end; one agent that is asked
        is enough. False when its trainer is not of that generation, or at rest."""
        return self._slot.save_and_end(generation)

    async def progress(self) -> TrainerStatus | None:
        """Where the trainer stands; None when none runs, or none is watched."""
        return self._slot.status()

    async def stacks(self, pid: int) -> str:
        """The stacks of all threads of the trainer `pid`, or what the kernel tells about a process that does not
        answer; empty when it is not this agent's. They are written into the rank's log too."""
        return await self._slot.stacks(pid)

    async def flight_record(self, pid: int) -> FlightRecord | None:
        """What NCCL's flight recorder in the trainer `pid` knows; None when it is not this agent's, or does not
        answer."""
        return await self._slot.flight_record(pid)

    async def kill(self, pid: int, kind: str, message: str, after_commit: bool = False) -> bool:
        """SIGKILL the trainer `pid`, after the next step that it commits with `after_commit`; its exit report says why.
        False when it is not this agent's, has ended, or does not commit."""
        return await self._slot.kill(pid, KillReason(kind, message), after_commit)

    async def snapshot_steps(self, layout: str | None = None) -> list[int]:
        """Committed steps whose state is whole in this rank's shared memory, ascending; with `layout`, the tag of one,
        only those of that layout."""
        return self._sharing.steps(self._slot.rank, layout)

    async def snapshot_files(self) -> list[StoredSnapshot]:
        """The job's snapshot files on this node, of all ranks and layouts."""
        return self._sharing.files()

    async def receive_backups(self, token: str, generation: int) -> Endpoint | None:
        """Take backups of other ranks' snapshots, from callers who know `token` and are of `generation` or later, and
        give snapshots out. Answers where; None without shared memory, where there is nothing. Raises BackupError for
        an older generation than before."""
        return self._sharing.receive(token, generation)

    async def send_backups(self, partner: Endpoint, token: str, generation: int, layout: str, every: int = 1) -> None:
        """Stream this rank's snapshots of the layout with tag `layout` to the agent at `partner`, from now on and
        instead of any other. `every`: see BackupSender. Raises StaleGeneration."""
        rank, current = self._slot.rank, self._slot.generation
        if generation < current:
            raise StaleGeneration(f"Generation {generation} of rank {rank} was replaced by {current}.")
        await self._sharing.send(rank, partner, token, generation, layout, every)

    async def stop_backups(self) -> None:
        """Send no more snapshots; what the partner has stays there."""
        await self._sharing.stop_sending()

    async def backup_progress(self) -> BackupProgress | None:
        """How far this rank's backup is; None without a partner."""
        return self._sharing.progress

    async def fetch_snapshot(
        self, rank: int, holder: Endpoint, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        """Bring the snapshots of `rank` that the agent at `holder` has to this node, or those of the rank `of`, which
        has the same state; the steps that came whole. Raises BackupError, SharedMemoryError, OSError."""
        return await self._sharing.fetch(rank, holder, token, generation, layout, of)

    async def reports(self, after: int, timeout: float, kept: tuple[int, ...] | None = None) -> list[Report]:
        """Reports with a sequence above `after`: at once if there are any, else within `timeout` seconds.

        Asking is acknowledging: reports up to `after` are forgotten, printed lines only up to `kept` where that is
        given (rank, generation, sequence). At most some thousands at a time; ask again.
        """
        return await self._reports.read(after, timeout, None if kept is None else (kept[0], kept[1], kept[2]))

    async def stop(self) -> Exit:
        """SIGKILL the trainer and wait until it is reaped. Answers how it ended; `Exit(None, None)` if none ran."""
        return await self._slot.stop()

    async def close(self) -> None:
        """Stop for good: the trainer is gone, this rank's snapshots are removed. The agent may be killed then."""
        await self._slot.close()
        await self._sharing.close(self._slot.rank)
