"""The agent of one rank: the long-lived process that owns a rank's device and the trainer that runs on it.

Plain Python, so that it starts fast and can be tested without Ray; the service makes a Ray actor of it. It imports
neither ray nor torch. The trainer dies with it; what the trainer reported stays here until the control plane has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workers.errors import MantaError
from workers.liveness.stacks import stacks_path, take_stacks
from workers.liveness.trainer_watch import Watch
from workers.messages import LaunchOrder
from workers.node.host import this_host
from workers.paths import Paths, rank_stem, zygote_socket
from workers.rank.rank_log import RankLog
from workers.rank.report_buffer import ReportBuffer
from workers.rank.trainer_run import TrainerRun
from workers.snapshot.backup import ReplicaError, ReplicaServer, Replicator, fetch
from workers.snapshot.snapshot_file import committed_steps
from workers.snapshot.snapshots import kept_files, steps_kept
from workers.zygote.client import ZygoteUnavailable, fork

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
        self._replicas: ReplicaServer | None = None
        self._replicator: Replicator | None = None
        self._faults: dict[str, dict[str, Any]] = {}
        self._struck: set[str] = set()

    async def describe(self) -> dict[str, Any]:
        """Where this rank is: `host`, `ip`, `node`, `pid` (the agent's), `trainer_pid`, `generation`,
        `group` (its placement group), `devices`."""
        host = this_host()
        running = self._run is not None and not self._run.ended
        return {
            "host": host.name,
            "ip": host.address,
            "node": host.node,
            "pid": os.getpid(),
            "trainer_pid": self._run.process.pid if self._run is not None and running else None,
            "generation": self._generation,
            "group": self._group,
            "devices": list(host.devices),
        }

    async def launch(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start the trainer of a new generation from `order`, a LaunchOrder as JSON. Answers `{"pid", "kept"}`.

        A trainer at rest goes on with it (`kept`); any other that still runs is killed and reaped first. Raises
        StaleGeneration unless the order's generation is above every earlier one, ZygoteUnavailable if the node's
        zygote does not answer.
        """
        launch = LaunchOrder.from_json(order)
        self._refuse_stale(launch)
        self._generation = launch.generation  # from here on, older orders that wait for the lock are stale
        async with self._lock:
            self._refuse_replaced(launch)
            self._become(launch.rank)
            launch = replace(launch, faults=tuple(self._waiting_faults()))
            if self._run is not None and self._run.at_rest and launch.in_place:
                kept = self._run.generation > 0
                self._run.go(launch)
                self._mind(self._run, launch)
                await self.stop_replication()  # in this generation it may be for somebody else, or nobody
                return {"pid": self._run.process.pid, "kept": kept}
            if self._run is not None:
                await self._run.stop()
            self._run = await self._fork(launch)
            for fault in self._waiting_faults():
                if fault not in launch.faults:  # it came meanwhile
                    self._run.arm(fault)
            self._mind(self._run, launch)
            await self.stop_replication()
            return {"pid": self._run.process.pid, "kept": False}

    async def prepare(self, order: dict[str, Any]) -> bool:
        """Have a trainer ready for an order like this one, but of a later generation, unless one runs. Answers once it
        is ready; False when it could not be made so. Raises ZygoteUnavailable."""
        async with self._lock:
            if self._run is None or self._run.ended:
                self._run = await self._fork(LaunchOrder.from_json(order), prepared=True)
        return await self._run.prepared()

    async def _fork(self, order: LaunchOrder, prepared: bool = False) -> TrainerRun:
        host = this_host()
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(host.devices)} if host.devices else {}
        socket_path = zygote_socket(self._runtime_folder, host.node)
        argument = {"prepare": order.to_json()} if prepared else order.to_json()
        wait = PREPARE_WAIT_SECONDS if prepared else ZYGOTE_WAIT_SECONDS
        process = await fork(socket_path, "trainer", argument, environment, timeout=wait)
        return TrainerRun(order, process, self._reports, self._log, prepared, self._struck)

    async def arm(self, fault: dict[str, Any]) -> None:
        """Have this rank's trainer carry out `fault` (`Fault.to_json`) when it gets there: the one that runs now, or
        one of a later generation while this agent lives."""
        self._faults[fault["id"]] = fault
        if self._run is not None and not self._run.ended:
            self._run.arm(fault)

    def _waiting_faults(self) -> list[dict[str, Any]]:
        return [fault for fault in self._faults.values() if fault["id"] not in self._struck]

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
                await self.prepare(self._order.to_json())

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

        def tell(data: dict[str, Any]) -> None:
            self._reports.add("stalled", self._generation, self._rank, data)

        self._watch = Watch(run.process.pid, self._rank, self._snapshot_folder, compiles, tell)
        run.beside(self._watch.run())

    async def progress(self) -> dict[str, Any] | None:
        """Where the trainer stands (see `Watch.describe`); None when none runs, or none is watched."""
        if self._run is None or self._run.ended or self._watch is None:
            return None
        return self._watch.describe() if self._watch.look() else None

    async def stacks(self, pid: int) -> str:
        """The stacks of all threads of the trainer `pid`, or what the kernel tells about a process that does not
        answer; empty when it is not this agent's. They are written into the rank's log too."""
        if self._run is None or self._run.ended or self._run.process.pid != pid or self._snapshot_folder is None:
            return ""
        found = await take_stacks(pid, stacks_path(self._snapshot_folder, self._rank))
        self._log.write(self._generation, "agent", found.splitlines())
        return found

    async def condemn(self, pid: int, kind: str, message: str, after_commit: bool = False) -> bool:
        """SIGKILL the trainer `pid`, after the next step that it commits with `after_commit`; its exit report says why.
        False when it is not this agent's, has ended, or does not commit."""
        run, watch = self._run, self._watch
        if run is None or run.ended or run.process.pid != pid:
            return False
        if after_commit and not (watch is not None and await watch.next_commit()):
            return False
        run.condemn(kind, message)
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

    async def kept(self) -> list[dict[str, Any]]:
        """The job's snapshot files on this node, of all ranks and layouts: `path`, `rank`, `layout` (tag),
        `is_replica`, `steps` (committed ones that are whole)."""
        found = kept_files(self._snapshot_folder) if self._snapshot_folder is not None else []
        return [{**asdict(file), "path": str(file.path), "steps": committed_steps(file.path)} for file in found]

    async def receive_replicas(self, token: str, generation: int) -> dict[str, Any]:
        """Keep replicas of other ranks' snapshots, for callers who know `token` and are of `generation` or later, and
        give them out again. Answers where: `{"host", "port"}`. Without shared memory there is nothing: `{}`.
        Raises ReplicaError for an older generation than before."""
        if self._snapshot_folder is None:
            return {}
        if self._replicas is None:
            self._replicas = ReplicaServer(self._snapshot_folder, this_host().address, token, generation)
        self._replicas.expect(token, generation)
        host, port = self._replicas.address
        return {"host": host, "port": port}

    async def replicate_to(
        self, partner: dict[str, Any], token: str, generation: int, layout: str, every: int = 1
    ) -> None:
        """Stream this rank's snapshots of the layout with tag `layout` to the agent that answered `partner` to
        `receive_replicas`, from now on and instead of any other. `every`: see Replicator. Raises StaleGeneration."""
        if generation < self._generation:
            raise StaleGeneration(f"Generation {generation} of rank {self._rank} was replaced by {self._generation}.")
        await self.stop_replication()
        if self._snapshot_folder is not None and partner:
            address = (str(partner["host"]), int(partner["port"]))
            self._replicator = Replicator(self._snapshot_folder, self._rank, layout, address, token, generation, every)

    async def stop_replication(self) -> None:
        """Send no more snapshots; what the partner has stays there."""
        replicator, self._replicator = self._replicator, None
        if replicator is not None:
            await asyncio.to_thread(replicator.stop)

    async def replication(self) -> dict[str, Any] | None:
        """How far this rank's replica is (`Replication`); None without a partner."""
        return self._replicator.state.to_json() if self._replicator is not None else None

    async def fetch_snapshot(
        self, rank: int, holder: dict[str, Any], token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        """Bring the snapshots of `rank` that the agent `holder` (as `receive_replicas` answered) keeps to this node, or
        those of the rank `of`, which has the same state; the steps that came whole. Raises ReplicaError,
        SharedMemoryError, OSError."""
        if self._snapshot_folder is None:
            raise ReplicaError("this agent was started without a folder in shared memory")
        address = (str(holder["host"]), int(holder["port"]))
        return await asyncio.to_thread(fetch, self._snapshot_folder, rank, layout, address, token, generation, of)

    async def reports(self, after: int, timeout: float) -> list[dict[str, Any]]:
        """Reports with a sequence above `after`, as JSON: at once if there are any, else within `timeout` seconds.

        Asking is acknowledging: reports up to `after` are forgotten. At most some thousands at a time; ask again.
        """
        return [report.to_json() for report in await self._reports.read(after, timeout)]

    async def stop(self) -> dict[str, int | None]:
        """SIGKILL the trainer and wait until it is reaped. Answers its `code` and `signal`; both None if none ran."""
        async with self._lock:
            if self._run is None:
                return {"code": None, "signal": None}
            return (await self._run.stop()).to_json()

    async def close(self) -> None:
        """Stop for good: the trainer is gone, this rank's snapshots are removed. The agent may be killed then."""
        await self.stop()
        await self.stop_replication()
        if self._replicas is not None:
            await asyncio.to_thread(self._replicas.close)
            self._replicas = None
        self._log.close()
        if self._snapshot_folder is None:
            return
        folder = Path(self._snapshot_folder)
        for file in folder.glob(f"{rank_stem(self._rank)}.*"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # the last rank on this node closes the door
