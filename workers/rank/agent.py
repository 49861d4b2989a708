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

from workers.errors import MantaError
from workers.json_codec import JsonObject, to_json
from workers.liveness.stacks import stacks_path, take_stacks
from workers.liveness.trainer_status import TrainerStatus
from workers.liveness.trainer_watch import Watch
from workers.messages import (
    AgentDescription,
    BackupAddress,
    Fault,
    Launched,
    LaunchOrder,
    StoredSnapshot,
    TrainerArgument,
    check_protocol,
)
from workers.node.host import this_host
from workers.paths import Paths, rank_stem, zygote_socket
from workers.rank.rank_log import RankLog
from workers.rank.report_buffer import ReportBuffer
from workers.rank.trainer_run import TrainerRun
from workers.remote_call import serve
from workers.reports import KillReason, Report
from workers.snapshot.backup import BackupError, BackupProgress, BackupSender, BackupServer, fetch
from workers.snapshot.files import snapshot_files, steps_kept
from workers.snapshot.snapshot_file import committed_steps
from workers.zygote.client import Exit, ZygoteUnavailable, fork

ZYGOTE_WAIT_SECONDS = 60.0
"""How long a launch waits for a zygote that still imports torch."""
PREPARE_WAIT_SECONDS = 1.0
"""How long a trainer that nobody has asked for yet may hold up a launch."""


class StaleGeneration(MantaError):
    """An order of a generation that a newer one has replaced; drop it and read the job's current generation."""


class Agent:
    """Owns rank `rank` of `job`: launches its trainer, buffers its reports, writes its log."""

    def __init__(
        self, job: str, rank: int, home: str, runtime_folder: str, snapshot_folder: str | None, group: str = ""
    ):
        """`home`, `runtime_folder`: see `workers/paths.py`; `snapshot_folder`: the job's, in shared memory; `group`:
        the placement group that it is in."""
        self._group = group
        self._job, self._rank, self._home = job, rank, home
        self._runtime_folder, self._snapshot_folder = runtime_folder, snapshot_folder
        self._log = RankLog(Paths.of(home).rank_log(job, rank), rank)
        self._reports = ReportBuffer()
        self._generation = 0
        self._run: TrainerRun | None = None
        self._order: LaunchOrder | None = None
        self._watched: tuple[TrainerRun, int] | None = None
        self._minded: TrainerRun | None = None
        self._minding: asyncio.Task[None] | None = None
        self._watch: Watch | None = None
        self._lock = asyncio.Lock()
        self._backups: BackupServer | None = None
        self._backup: BackupSender | None = None
        self._faults: dict[str, Fault] = {}
        self._struck: set[str] = set()

    async def call(self, method: str, arguments: JsonObject) -> Any:
        """A method of this class for other processes: arguments and answer as JSON (`remote_call.py`)."""
        return await serve(self, method, arguments)

    async def describe(self) -> AgentDescription:
        """Where this rank is."""
        host = this_host()
        running = self._run is not None and not self._run.ended
        return AgentDescription(
            host=host.name,
            address=host.address,
            pid=os.getpid(),
            node=host.node,
            trainer_pid=self._run.process.pid if self._run is not None and running else None,
            generation=self._generation,
            group=self._group,
            devices=host.devices,
        )

    async def launch(self, order: LaunchOrder) -> Launched:
        """Start the trainer of a new generation from `order`.

        A trainer at rest goes on with it; any other that still runs is killed and reaped first. Raises
        StaleGeneration unless the order's generation is above every earlier one, ZygoteUnavailable if the node's
        zygote does not answer, ProtocolMismatch.
        """
        check_protocol("the control plane", order.protocol)
        self._refuse_stale(order)
        self._generation = order.generation  # from here on, older orders that wait for the lock are stale
        async with self._lock:
            self._refuse_replaced(order)
            self._become(order.rank)
            order = replace(order, faults=tuple(self._waiting_faults()))
            if self._run is not None and self._run.at_rest and order.in_place:
                kept = self._run.generation > 0
                self._run.go(order)
                self._mind(self._run, order)
                await self.stop_backups()  # in this generation it may be for somebody else, or nobody
                return Launched(self._run.process.pid, kept)
            if self._run is not None:
                await self._run.stop()
            self._run = await self._fork(order)
            for fault in self._waiting_faults():
                if fault not in order.faults:  # it came meanwhile
                    self._run.arm(fault)
            self._mind(self._run, order)
            await self.stop_backups()
            return Launched(self._run.process.pid)

    async def prepare(self, order: LaunchOrder) -> bool:
        """Have a trainer ready for an order like this one, but of a later generation, unless one runs. Answers once it
        is ready; False when it could not be made so. Raises ZygoteUnavailable."""
        async with self._lock:
            if self._run is None or self._run.ended:
                self._run = await self._fork(order, prepared=True)
        return await self._run.prepared()

    async def _fork(self, order: LaunchOrder, prepared: bool = False) -> TrainerRun:
        host = this_host()
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(host.devices)} if host.devices else {}
        socket_path = zygote_socket(self._runtime_folder, host.node)
        argument = to_json(TrainerArgument(order, prepare=prepared))
        wait = PREPARE_WAIT_SECONDS if prepared else ZYGOTE_WAIT_SECONDS
        process = await fork(socket_path, "trainer", argument, environment, timeout=wait)
        return TrainerRun(order, process, self._reports, self._log, prepared, self._struck)

    async def arm(self, fault: Fault) -> None:
        """Have this rank's trainer carry out `fault` when it gets there: the one that runs now, or one of a later
        generation while this agent lives."""
        self._faults[fault.id] = fault
        if self._run is not None and not self._run.ended:
            self._run.arm(fault)

    def _waiting_faults(self) -> list[Fault]:
        return [fault for fault in self._faults.values() if fault.id not in self._struck]

    def _mind(self, run: TrainerRun, order: LaunchOrder) -> None:
        """Watch over a trainer that has begun to carry out `order`."""
        self._order = order
        if self._watched != (run, self._rank):
            self._watched = (run, self._rank)
            self._begin_watch(run, order)
        if order.in_place and self._minded is not run:
            self._minded = run
            self._minding = asyncio.create_task(self._prepare_after(run), name="minder")

    async def _prepare_after(self, run: TrainerRun) -> None:
        """When the trainer is killed, get the next one ready without being told: its peers are about to wait for it."""
        ended = await run.wait()
        if ended.signal is not None and not run.stopped and self._order is not None:
            with contextlib.suppress(ZygoteUnavailable):  # then the launch that follows says so
                await self.prepare(self._order)

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        """Bring the trainer of `generation` to rest, after the step under way if that ends within `patience` seconds;
        whether it is. One that is not within `grace` seconds more is killed, so that this rank is out of the generation
        in any case."""
        async with self._lock:
            return self._run is not None and await self._run.rest(generation, grace, patience)

    def _become(self, rank: int) -> None:
        """Be another rank from now on: the ranks of a smaller layout are numbered anew."""
        if rank != self._rank:
            self._log.close()
            self._rank, self._log = rank, RankLog(Paths.of(self._home).rank_log(self._job, rank), rank)
            if self._run is not None:
                self._run.become(rank, self._log)

    def _begin_watch(self, run: TrainerRun, order: LaunchOrder) -> None:
        if self._snapshot_folder is None:
            return
        compiles = bool(order.spec.get("train", {}).get("compile", False))

        def tell(status: TrainerStatus) -> None:
            self._reports.add(status, self._generation, self._rank)

        self._watch = Watch(run.process.pid, self._rank, self._snapshot_folder, compiles, tell)
        run.beside(self._watch.run())

    async def progress(self) -> TrainerStatus | None:
        """Where the trainer stands; None when none runs, or none is watched."""
        if self._run is None or self._run.ended or self._watch is None:
            return None
        return self._watch.describe() if self._watch.look() else None

    async def stacks(self, pid: int) -> str:
        """The stacks of all threads of the trainer `pid`, or what the kernel tells about a process that does not
        answer; empty when it is not this agent's. They are written into the rank's log too."""
        if self._run is None or self._run.ended or self._run.process.pid != pid or self._snapshot_folder is None:
            return ""
        stacks = await take_stacks(pid, stacks_path(self._snapshot_folder, self._rank))
        self._log.write(self._generation, "agent", stacks.splitlines())
        return stacks

    async def kill(self, pid: int, kind: str, message: str, after_commit: bool = False) -> bool:
        """SIGKILL the trainer `pid`, after the next step that it commits with `after_commit`; its exit report says why.
        False when it is not this agent's, has ended, or does not commit."""
        run, watch = self._run, self._watch
        if run is None or run.ended or run.process.pid != pid:
            return False
        if after_commit and not (watch is not None and await watch.next_commit()):
            return False
        run.kill(KillReason(kind, message))
        return True

    def _refuse_stale(self, order: LaunchOrder) -> None:
        if order.job != self._job:
            raise StaleGeneration(f"This agent belongs to {self._job}, not to {order.job}.")
        if order.generation <= self._generation:
            raise StaleGeneration(
                f"Rank {self._rank} of {self._job} is at generation {self._generation}, "
                f"so generation {order.generation} cannot start; read the job's current generation."
            )

    def _refuse_replaced(self, order: LaunchOrder) -> None:
        if order.generation < self._generation:
            raise StaleGeneration(
                f"Generation {order.generation} of rank {self._rank} was replaced by {self._generation} "
                "before it started."
            )

    async def snapshot_steps(self, layout: str | None = None) -> list[int]:
        """Committed steps whose state is whole in this rank's shared memory, ascending; with `layout`, the tag of one,
        only those of that layout."""
        if self._snapshot_folder is None:
            return []
        return steps_kept(self._snapshot_folder, self._rank, layout)

    async def snapshot_files(self) -> list[StoredSnapshot]:
        """The job's snapshot files on this node, of all ranks and layouts."""
        files = snapshot_files(self._snapshot_folder) if self._snapshot_folder is not None else []
        return [
            StoredSnapshot(str(file.path), file.rank, file.layout, file.is_backup, tuple(committed_steps(file.path)))
            for file in files
        ]

    async def receive_backups(self, token: str, generation: int) -> BackupAddress | None:
        """Take backups of other ranks' snapshots, from callers who know `token` and are of `generation` or later, and
        give snapshots out. Answers where; None without shared memory, where there is nothing. Raises BackupError for
        an older generation than before."""
        if self._snapshot_folder is None:
            return None
        if self._backups is None:
            self._backups = BackupServer(self._snapshot_folder, this_host().address, token, generation)
        self._backups.expect(token, generation)
        return BackupAddress(*self._backups.address)

    async def send_backups(
        self, partner: BackupAddress, token: str, generation: int, layout: str, every: int = 1
    ) -> None:
        """Stream this rank's snapshots of the layout with tag `layout` to the agent at `partner`, from now on and
        instead of any other. `every`: see BackupSender. Raises StaleGeneration."""
        if generation < self._generation:
            raise StaleGeneration(f"Generation {generation} of rank {self._rank} was replaced by {self._generation}.")
        await self.stop_backups()
        if self._snapshot_folder is not None:
            address = (partner.host, partner.port)
            self._backup = BackupSender(self._snapshot_folder, self._rank, layout, address, token, generation, every)

    async def stop_backups(self) -> None:
        """Send no more snapshots; what the partner has stays there."""
        backup, self._backup = self._backup, None
        if backup is not None:
            await asyncio.to_thread(backup.stop)

    async def backup_progress(self) -> BackupProgress | None:
        """How far this rank's backup is; None without a partner."""
        return self._backup.state if self._backup is not None else None

    async def fetch_snapshot(
        self, rank: int, holder: BackupAddress, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        """Bring the snapshots of `rank` that the agent at `holder` has to this node, or those of the rank `of`, which
        has the same state; the steps that came whole. Raises BackupError, SharedMemoryError, OSError."""
        if self._snapshot_folder is None:
            raise BackupError("this agent was started without a folder in shared memory")
        address = (holder.host, holder.port)
        return await asyncio.to_thread(fetch, self._snapshot_folder, rank, layout, address, token, generation, of)

    async def reports(self, after: int, timeout: float) -> list[Report]:
        """Reports with a sequence above `after`: at once if there are any, else within `timeout` seconds.

        Asking is acknowledging: reports up to `after` are forgotten. At most some thousands at a time; ask again.
        """
        return await self._reports.read(after, timeout)

    async def stop(self) -> Exit:
        """SIGKILL the trainer and wait until it is reaped. Answers how it ended; `Exit(None, None)` if none ran."""
        async with self._lock:
            return Exit(None, None) if self._run is None else await self._run.stop()

    async def close(self) -> None:
        """Stop for good: the trainer is gone, this rank's snapshots are removed. The agent may be killed then."""
        await self.stop()
        await self.stop_backups()
        if self._backups is not None:
            await asyncio.to_thread(self._backups.close)
            self._backups = None
        self._log.close()
        if self._snapshot_folder is None:
            return
        folder = Path(self._snapshot_folder)
        for file in folder.glob(f"{rank_stem(self._rank)}.*"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # the last rank on this node closes the door
