"""An agent in this process whose rank is simulated: tests and benchmarks of the control plane drive it without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from manta.service.cluster.agent_client import AgentFailed, AgentLost
from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.protocol.messages import (
    AgentDescription,
    Endpoint,
    Fault,
    Launched,
    LaunchOrder,
    StoredSnapshot,
    TraceOrder,
)
from manta.workers.protocol.remote_call import call_name
from manta.workers.protocol.reports import (
    EXIT_SAVED,
    Event,
    Exited,
    Failure,
    Finished,
    KillReason,
    Metrics,
    Payload,
    Report,
    Resting,
    Started,
    TrainerStatus,
)
from manta.workers.protocol.requests import Arm, RankRequest, RecordSteps, SaveAndEnd
from manta.workers.snapshot.backup import BackupProgress
from manta.workers.zygote.client import Exit

SIGKILL = 9


class FakeAgent:
    """Stands for an AgentClient. What its rank does is up to its user: `begin`, `commit`, `finish`, `die`, `fail`.

    `lose` ends the agent itself, `silence` lets it answer nothing more; `refuse` makes one call fail, such as `launch`
    or `tell trace`.
    """

    def __init__(self, rank: int = 0, host: str = "host-0", node: str = "node-0", group: str = "group-0"):
        """`rank`: until an order names another; `host`, `node`, `group`: where it is."""
        self.rank, self.generation = rank, 0
        self.description = AgentDescription(host, "127.0.0.1", 1000 + rank, node, group=group)
        self.flight: FlightRecord | None = None
        self.status: TrainerStatus | Callable[[int], TrainerStatus | None] | None = None
        """What `progress` answers, or what makes that of how often it was asked."""
        self.on_launch: Callable[[FakeAgent], None] = FakeAgent.begin
        """What the trainer does when it is launched, or goes on."""
        self.steps: list[int] = []
        """Committed steps in its shared memory."""
        self.files: list[StoredSnapshot] = []
        self.has_shared_memory = True
        self.orders: list[LaunchOrder] = []
        self.prepared: list[LaunchOrder] = []
        self.faults: list[Fault] = []
        self.traces: list[TraceOrder] = []
        """Steps that were to be recorded."""
        self.asked_to_trace = 0
        """How often it was asked, whatever it answered."""
        self.asked_to_save: list[int] = []
        """Generations that were to save and end."""
        self.on_save: Callable[[FakeAgent], None] = lambda agent: None
        """What the trainer does when it is told so."""
        self.kills: list[tuple[int, KillReason, bool]] = []
        """(pid, reason, only after a commit)."""
        self.acknowledged: list[int] = []
        """What `reports` was asked to go on after, call by call."""
        self.fetched: list[tuple[int, str, int | None]] = []
        """(rank, layout, of whom) of the snapshots that it was asked to fetch."""
        self.backs_up_to: Endpoint | None = None
        self.asked = self.stops = self.closes = 0
        """How often `progress`, `stop` and `close` were called."""
        self.running = self.resting = False
        self.lost = self.silent = False
        self._refused: dict[str, str] = {}
        self._pid = 10_000 * (rank + 1)
        self._reports: list[Report] = []
        self._changed = asyncio.Event()

    # What drives the rank.

    def say(self, payload: Payload, generation: int | None = None, at: float = 0.0) -> None:
        """Report `payload`, as a rank of `generation` (default: the current one), made `at` Unix seconds."""
        of = self.generation if generation is None else generation
        self._reports.append(Report(payload, of, self.rank, at, len(self._reports) + 1))
        self._changed.set()

    def begin(self) -> None:
        """The trainer has its state."""
        self.say(Started(self._pid))

    def commit(self, *steps: int, keep: bool = True) -> None:
        """The trainer commits steps; with `keep` its shared memory has the last two of them."""
        self.say(Metrics(tuple({"step": step, "loss": 1.0, "step_seconds": 0.1} for step in steps)))
        if keep:
            self.steps = [*self.steps, *steps][-2:]

    def event(self, kind: str, step: int | None = None, **data: object) -> None:
        """The trainer has something to tell."""
        self.say(Event(kind, kind, step, data))

    def rest_by_itself(self, step: int | None, message: str = "a peer is gone") -> None:
        """The trainer has lost a peer and waits for the next order."""
        self.running, self.resting = False, True
        self.say(Resting(step, message))

    def finish(self, step: int) -> None:
        """The trainer has committed the last step, and exits."""
        self.say(Finished(step))
        self._exit(Exited(code=0))

    def save_and_exit(self) -> None:
        """The trainer has saved its state before the last step, as it was told, and exits."""
        self._exit(Exited(code=EXIT_SAVED))

    def die(self, signal: int = SIGKILL) -> None:
        """The trainer is killed."""
        self._exit(Exited(signal=signal))

    def fail(self, kind: str = "exception", step: int = 1, message: str = "it went wrong") -> None:
        """The trainer ends with a failure of this kind."""
        failure = Failure(kind, step, "RuntimeError", message)  # type: ignore[arg-type]
        self._exit(Exited(code=1, failure=failure))

    def be_stopped(self) -> None:
        """The agent kills its trainer."""
        self._exit(Exited(signal=SIGKILL, killed_for=KillReason("stopped", "was stopped by its agent")))

    def _exit(self, exited: Exited) -> None:
        self.running = self.resting = False
        self.say(exited)

    def lose(self) -> None:
        """The agent is gone, and every call to it fails from now on."""
        self.lost = True
        self._changed.set()

    def silence(self) -> None:
        """The agent answers nothing from now on."""
        self.silent = True

    def refuse(self, method: str, message: str) -> None:
        """`method` fails from now on."""
        self._refused[method] = message

    # What the control plane asks.

    async def describe(self) -> AgentDescription:
        await self._answer("describe")
        pid = self._pid if self.running or self.resting else None
        last = {"rank": self.orders[-1].rank, "sizes": self.orders[-1].sizes} if self.orders else {}
        return dataclasses.replace(self.description, generation=self.generation, trainer_pid=pid, **last)

    async def launch(self, order: LaunchOrder) -> Launched:
        await self._answer("launch")
        kept = self.resting
        if not kept:
            if self.running:
                self.be_stopped()
            self._pid += 1
        self.orders.append(order)
        self.rank, self.generation = order.rank, order.generation
        self.running, self.resting = True, False
        self.on_launch(self)
        return Launched(self._pid, kept)

    async def prepare(self, order: LaunchOrder) -> bool:
        await self._answer("prepare")
        self.prepared.append(order)
        return True

    async def tell(self, request: RankRequest) -> bool:
        self.asked_to_trace += isinstance(request, RecordSteps)
        await self._answer(call_name("tell", {"request": request.to_json()}))
        if request.of_generation is not None and not (self.running and request.of_generation == self.generation):
            return False
        match request:
            case Arm(fault):
                self.faults.append(fault)
            case RecordSteps(order):
                self.traces.append(order)
            case SaveAndEnd(generation):
                self.asked_to_save.append(generation)
                self.on_save(self)
        return True

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        await self._answer("rest")
        if self.running and generation == self.generation:
            self.rest_by_itself(max(self.steps, default=None), "was told to rest")
        return self.resting

    async def progress(self) -> TrainerStatus | None:
        self.asked += 1
        await self._answer("progress")
        return self.status(self.asked) if callable(self.status) else self.status

    async def stacks(self, pid: int) -> str:
        await self._answer("stacks")
        return f"stacks of {pid}"

    async def flight_record(self, pid: int) -> FlightRecord | None:
        await self._answer("flight_record")
        return self.flight

    async def kill(self, pid: int, kind: str, message: str, after_commit: bool = False) -> bool:
        await self._answer("kill")
        reason = KillReason(kind, message)
        self.kills.append((pid, reason, after_commit))
        self._exit(Exited(signal=SIGKILL, killed_for=reason))
        return True

    async def snapshot_steps(self, layout: str | None = None) -> list[int]:
        await self._answer("snapshot_steps")
        return list(self.steps)

    async def snapshot_files(self) -> list[StoredSnapshot]:
        await self._answer("snapshot_files")
        return list(self.files)

    async def receive_backups(self, token: str, generation: int) -> Endpoint | None:
        await self._answer("receive_backups")
        return Endpoint(self.description.host, 7000 + self.rank) if self.has_shared_memory else None

    async def send_backups(self, partner: Endpoint, token: str, generation: int, layout: str, every: int = 1) -> None:
        await self._answer("send_backups")
        self.backs_up_to = partner

    async def stop_backups(self) -> None:
        await self._answer("stop_backups")
        self.backs_up_to = None

    async def backup_progress(self) -> BackupProgress | None:
        await self._answer("backup_progress")
        return None

    async def fetch_snapshot(
        self, rank: int, holder: Endpoint, token: str, generation: int, layout: str, of: int | None = None
    ) -> list[int]:
        await self._answer("fetch_snapshot")
        self.fetched.append((rank, layout, of))
        return list(self.steps)

    async def reports(self, after: int, timeout: float, kept: tuple[int, ...] | None = None) -> list[Report]:
        self.acknowledged.append(after)
        await self._answer("reports")
        try:
            async with asyncio.timeout(timeout):
                while not (newer := [report for report in self._reports if report.sequence > after]):
                    self._changed.clear()
                    await self._changed.wait()
                    await self._answer("reports")
        except TimeoutError:
            return []
        return newer

    async def stop(self) -> Exit:
        self.stops += 1
        await self._answer("stop")
        if self.running or self.resting:
            self.be_stopped()
        return Exit(None, SIGKILL)

    async def close(self) -> None:
        await self.stop()
        self.closes += 1
        self.steps, self.files = [], []

    async def _answer(self, method: str) -> None:
        """Come back only when `method` may answer."""
        if self.lost:
            raise AgentLost("the actor is dead", "ActorDiedError")
        if self.silent:
            await asyncio.Event().wait()
        if method in self._refused:
            raise AgentFailed(self._refused[method])
