"""The slot of a rank's trainer under its agent: which process is in it, what watches that process, which faults are
pending for it, and the next one that is prepared when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, replace

from manta.workers.errors import MantaError
from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.liveness.hang_detection import REST_BYTES_PER_SECOND, TrainerWatch
from manta.workers.liveness.stacks import capture_stacks, stacks_path
from manta.workers.node.host import this_host, visible
from manta.workers.paths import Paths, zygote_socket
from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.messages import Fault, Launched, LaunchOrder, TrainerArgument
from manta.workers.protocol.reports import KillReason, TrainerStatus
from manta.workers.protocol.requests import Arm, RankRequest
from manta.workers.rank.rank_log import LineSink, RankLog, ReportedLines
from manta.workers.rank.report_buffer import ReportBuffer
from manta.workers.rank.trainer_handle import TrainerHandle
from manta.workers.zygote.client import Exit, ZygoteUnavailable, fork

ZYGOTE_WAIT_SECONDS = 60.0
"""Seconds that a launch waits for a zygote that is still importing torch."""
PREPARE_WAIT_SECONDS = 1.0
"""Seconds that a standby trainer that is not needed yet may hold up a launch."""


class StaleGeneration(MantaError):
    """An order of a generation that a newer one has replaced; drop it and read the job's current generation."""


@dataclass(eq=False)
class _Occupant:
    """A trainer, and the tasks that were started for it."""

    trainer: TrainerHandle
    watch: TrainerWatch | None = None
    watched_as: int | None = None
    """Rank whose progress record is watched."""
    has_successor: bool = False
    """Whether a successor is prepared when this one is killed."""


class TrainerSlot:
    """Holds the trainer of rank `rank` of `job`, one at a time."""

    def __init__(
        self,
        job: str,
        rank: int,
        home: str | None,
        runtime_folder: str,
        snapshot_folder: str | None,
        reports: ReportBuffer,
    ):
        """`home`: of the job's logs, None where they are reported; `runtime_folder`: see `workers/paths.py`;
        `snapshot_folder`: the job's, in shared memory; `reports`: takes what trainers report."""
        self._job, self._home = job, home
        self._runtime_folder, self._snapshot_folder, self._reports = runtime_folder, snapshot_folder, reports
        self.rank, self.generation = rank, 0
        """Generation of the last launch; 0 before the first."""
        self._log: LineSink = self._log_of(rank)
        self._lock = asyncio.Lock()
        self._occupant: _Occupant | None = None
        self._order: LaunchOrder | None = None
        self._successors: set[asyncio.Task[None]] = set()
        self._faults: dict[str, Fault] = {}
        self._struck: set[str] = set()

    @property
    def order(self) -> LaunchOrder | None:
        """The last order that was carried out; None while one of a newer generation is in progress."""
        return self._order if self._order is not None and self._order.generation == self.generation else None

    @property
    def pid(self) -> int | None:
        """Process id of the trainer; None if none is running."""
        occupant = self._running()
        return occupant.trainer.process.pid if occupant is not None else None

    async def launch(self, order: LaunchOrder) -> Launched:
        """Have a trainer carry out `order`: the resting one, if there is one, otherwise a new one; any other running
        one is killed and reaped first. Raises StaleGeneration unless the order's generation is above every earlier one,
        ZygoteUnavailable."""
        self._refuse_stale(order)
        self.generation = order.generation  # from now on, older orders that wait for the lock are stale
        async with self._lock:
            self._refuse_replaced(order)
            self._assign_rank(order.rank)
            order = replace(order, faults=tuple(self._waiting_faults()))
            occupant, was_reused = self._occupant, False
            if occupant is not None and occupant.trainer.at_rest:
                was_reused = occupant.trainer.generation > 0  # otherwise it was only prepared
                occupant.trainer.go(order)
            else:
                if occupant is not None:
                    await occupant.trainer.stop()
                occupant = await self._fork(order)
                for fault in self._waiting_faults():
                    if fault not in order.faults:  # it was armed meanwhile
                        occupant.trainer.tell(Arm(fault))
            self._attend(occupant, order)
            return Launched(occupant.trainer.process.pid, was_reused)

    async def prepare(self, order: LaunchOrder) -> bool:
        """Have a trainer ready for an order like this one, but of a later generation, unless one is running. Returns
        True when it is ready, False if that failed. Raises ZygoteUnavailable."""
        async with self._lock:
            occupant = self._running() or await self._fork(order, prepared=True)
        return await occupant.trainer.prepared()

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        """Bring the trainer of `generation` to rest; see `TrainerHandle.rest`. `grace` is extended to the time that its
        snapshot takes, which may be larger than the caller knows."""
        async with self._lock:
            if (occupant := self._occupant) is None:
                return False
            if occupant.watch is not None:
                grace = max(grace, occupant.watch.snapshot_bytes() / REST_BYTES_PER_SECOND)
            return await occupant.trainer.rest(generation, grace, patience)

    def tell(self, request: RankRequest) -> bool:
        """Have the trainer carry out `request`; returns whether it can, see `TrainerHandle.tell`. A fault is remembered
        for trainers of later generations."""
        if isinstance(request, Arm):
            self._faults[request.fault.id] = request.fault
        occupant = self._running()
        return occupant is not None and occupant.trainer.tell(request)

    async def stop(self) -> Exit:
        """SIGKILL the trainer and wait until it is reaped. Returns how it ended; `Exit(None, None)` if none was
        running."""
        async with self._lock:
            return Exit(None, None) if self._occupant is None else await self._occupant.trainer.stop()

    async def kill(self, pid: int, reason: KillReason, after_commit: bool = False) -> bool:
        """SIGKILL the trainer `pid`, with `after_commit` after the next step that it commits; its exit report says why.
        False if it is not here, has ended, or does not commit."""
        occupant = self._running()
        if occupant is None or occupant.trainer.process.pid != pid:
            return False
        if after_commit and not (occupant.watch is not None and await occupant.watch.next_commit()):
            return False
        occupant.trainer.kill(reason)
        return True

    def status(self) -> TrainerStatus | None:
        """The trainer's position; None if none is running, or none is watched."""
        occupant = self._running()
        if occupant is None or occupant.watch is None or not occupant.watch.poll():
            return None
        return occupant.watch.describe()

    async def stacks(self, pid: int) -> str:
        """The stacks of all threads of the trainer `pid`, or the kernel's information about a process that does not
        answer; empty if it is not here. They are also written to the rank's log."""
        if self.pid != pid or self._snapshot_folder is None:
            return ""
        stacks = await capture_stacks(pid, stacks_path(self._snapshot_folder, self.rank))
        self._log.write(self.generation, "agent", stacks.splitlines())
        return stacks

    async def flight_record(self, pid: int) -> FlightRecord | None:
        """NCCL's flight record in the trainer `pid`; None if it is not here, or does not answer."""
        occupant = self._running()
        if occupant is None or occupant.trainer.process.pid != pid:
            return None
        return await occupant.trainer.flight_record()

    def _running(self) -> _Occupant | None:
        return self._occupant if self._occupant is not None and not self._occupant.trainer.ended else None

    async def _fork(self, order: LaunchOrder, prepared: bool = False) -> _Occupant:
        host = this_host()
        socket_path = zygote_socket(self._runtime_folder, host.node)
        argument = to_json(TrainerArgument(order, prepare=prepared))
        wait = PREPARE_WAIT_SECONDS if prepared else ZYGOTE_WAIT_SECONDS
        environment = order.spec.get("resources", {}).get("environment", {}) | visible(host.devices)
        process = await fork(socket_path, "trainer", argument, environment, timeout=wait)
        self._occupant = _Occupant(TrainerHandle(order, process, self._reports, self._log, prepared, self._struck))
        return self._occupant

    def _attend(self, occupant: _Occupant, order: LaunchOrder) -> None:
        """Watch a trainer that has begun to carry out `order`, and prepare its successor."""
        self._order = order
        if occupant.watched_as != self.rank and self._snapshot_folder is not None:
            compiles = bool(order.spec.get("train", {}).get("compile", False))
            occupant.watch = TrainerWatch(
                occupant.trainer.process.pid, self.rank, self._snapshot_folder, compiles, self._report_status
            )
            occupant.watched_as = self.rank
            occupant.trainer.run_alongside(occupant.watch.run())
        if occupant.watch is not None:
            occupant.watch.enter_generation(math.prod(order.sizes))
        if (order.in_place or order.tries_repair) and not occupant.has_successor:
            occupant.has_successor = True
            successor = asyncio.create_task(self._prepare_successor(occupant.trainer), name="successor")
            self._successors.add(successor)
            successor.add_done_callback(self._successors.discard)

    async def _prepare_successor(self, trainer: TrainerHandle) -> None:
        """When the trainer is killed, prepare the next one without a request: its peers are about to wait for it."""
        ended = await trainer.wait()
        if ended.signal is not None and not trainer.stopped and self._order is not None:
            with contextlib.suppress(ZygoteUnavailable):  # the next launch reports it then
                await self.prepare(self._order)

    def _report_status(self, status: TrainerStatus) -> None:
        self._reports.add(status, self.generation, self.rank)

    def _waiting_faults(self) -> list[Fault]:
        return [fault for fault in self._faults.values() if fault.id not in self._struck]

    def _assign_rank(self, rank: int) -> None:
        """Become another rank: the ranks of a smaller layout are renumbered."""
        if rank != self.rank:
            self.rank, self._log = rank, self._log_of(rank)
            if self._occupant is not None:
                self._occupant.trainer.assign_rank(rank, self._log)

    def _log_of(self, rank: int) -> LineSink:
        if self._home is None:
            return ReportedLines(self._reports, rank)
        return RankLog(Paths.of(self._home).rank_log(self._job, rank), rank)

    def _refuse_stale(self, order: LaunchOrder) -> None:
        if order.job != self._job:
            raise StaleGeneration(f"This agent belongs to {self._job}, not to {order.job}.")
        if order.generation <= self.generation:
            raise StaleGeneration(
                f"Rank {self.rank} of {self._job} is at generation {self.generation}, "
                f"so generation {order.generation} cannot start; read the job's current generation."
            )

    def _refuse_replaced(self, order: LaunchOrder) -> None:
        if order.generation < self.generation:
            raise StaleGeneration(
                f"Generation {order.generation} of rank {self.rank} was replaced by {self.generation} "
                "before it started."
            )
