"""The control plane's part in a hang: when an agent reports an overdue rank, all agents are queried, and the culprit is
killed.

Nothing is queried while no agent reports an overdue rank. A rank that is killed here dies as `hung`, and is recovered
from like any other death.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from manta.service.cluster.agent_client import AgentClient, AgentError, AgentTimeout, within
from manta.service.cluster.agents import query
from manta.service.recovery.decisions import NOT_SAVED
from manta.service.recovery.waits import AXES, Group, RankView, Verdict, find_culprits, refined, waiting_for
from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.protocol.json_codec import JsonObject, to_json
from manta.workers.protocol.reports import Event, Report, TrainerStatus

T = TypeVar("T")
REQUEST_SECONDS = 2.0
"""Seconds after which an agent that does not report its trainer's position counts as silent."""
CONFIRM_SECONDS = 0.3
"""Seconds between the two queries that must agree before a rank is killed."""
RETRY_SECONDS = 1.0
"""Seconds between queries while overdue ranks may still continue."""
EVIDENCE_SECONDS = 5.0
"""Seconds after which an agent that does not describe its trainer counts as silent."""
KILL_SECONDS = 5.0
"""Seconds after which an agent that does not kill a hung trainer counts as silent."""
REPLACE_SECONDS = 600.0
"""Seconds in which a rank is replaced as a straggler at most once."""
MAX_NAMED = 16
"""Most ranks of a hung gang whose evidence is kept."""

_FROM_RECORD = ("phase", "step", "micro_batch", "waits_for", "counts", "committed", "device")
"""Fields of a trainer's record that an event keeps."""

Answers = dict[int, TrainerStatus | None]


class WriteEvent(Protocol):
    """Writes an event of the job."""

    def __call__(
        self, kind: str, message: str, rank: int | None, step: int | None, data: JsonObject
    ) -> Awaitable[None]: ...


class HangWatch:
    """Ends hangs and replaces stragglers in one generation of a job."""

    def __init__(
        self,
        agents: Sequence[AgentClient | None],
        group: Group,
        write_event: WriteEvent,
        lose: Callable[[int, str], None],
        stragglers: str,
        replaced: dict[int, float],
    ):
        """`group`: the ranks that share an axis with a rank; `lose`: called with a rank whose agent is silent, and why;
        `stragglers`: the spec's policy; `replaced`: when each rank was last replaced as a straggler, over all
        generations."""
        self._agents, self._group, self._write_event, self._mark_lost = list(agents), group, write_event, lose
        self._policy, self._replaced = stragglers, replaced
        self._alarm = asyncio.Event()
        self._slow: asyncio.Queue[int] = asyncio.Queue()

    def note(self, report: Report) -> None:
        """Note one report of this generation."""
        match report.payload:
            case TrainerStatus(overdue=True):
                self._alarm.set()
            case Event(type="straggler", data=data) if self._policy == "replace":
                self._slow.put_nowait(data["straggler"])

    async def run(self, look_first: bool = False) -> None:
        """Act on reports, until cancelled. `look_first`: query once first, since an earlier report may have gone to
        another control plane."""
        if look_first:
            self._alarm.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._end_hangs())
            tasks.create_task(self._replace_stragglers())

    async def _end_hangs(self) -> None:
        while True:
            await self._alarm.wait()
            self._alarm.clear()
            await self._investigate()

    async def _investigate(self) -> None:
        """Query repeatedly, until two queries in a row find the same culprit at the same place, or all ranks move
        on."""
        suspects: tuple[Any, ...] | None = None
        while True:
            answers, views = await self._query()
            if not any(view.overdue for view in views):
                return
            verdict = find_culprits(views, self._group)
            if verdict.kind == "nobody":
                suspects = None
                await asyncio.sleep(RETRY_SECONDS)
                continue
            seen = (verdict.kind, verdict.ranks, tuple(views[rank].heartbeat for rank in verdict.ranks))
            if seen == suspects:
                if verdict.kind == "gang" and any(view.on_device for view in views):
                    verdict = refined(verdict, await self._flight_records(answers), self._group)
                await self._end(verdict, answers, views)
                return
            suspects = seen
            await asyncio.sleep(CONFIRM_SECONDS)

    async def _query(self) -> tuple[Answers, list[RankView]]:
        """The positions of all ranks."""
        answers = await asyncio.gather(*(self._progress(agent) for agent in self._agents))
        views = [
            RankView.of(rank, answer) if answered and answer is not None else RankView(rank, answered=answered)
            for rank, (answered, answer) in enumerate(answers)
        ]
        return {rank: answer for rank, (_, answer) in enumerate(answers)}, views

    async def _progress(self, agent: AgentClient | None) -> tuple[bool, TrainerStatus | None]:
        """Whether the agent answers, and its answer; None if no trainer is running. A lost agent is not a hang but a
        death, which is noticed elsewhere."""
        if agent is None:
            return True, None
        try:
            return True, await within(REQUEST_SECONDS, agent.progress())
        except AgentTimeout:
            return False, None
        except AgentError:
            return True, None

    async def _end(self, verdict: Verdict, answers: Answers, views: list[RankView]) -> None:
        """Record which rank hangs, with the evidence, and have it killed."""
        running = [rank for rank in verdict.ranks if answers[rank] is not None]
        shown = running[:MAX_NAMED]
        stacks = await self._of_trainers(shown, answers, lambda agent, pid: agent.stacks(pid))
        if verdict.kind == "gang":
            evidence = [_evidence(rank, answers[rank], stacks.get(rank, "")) for rank in shown]
            await self._write_event(
                "gang_hung", f"all ranks are restarted: {verdict.why}", None, None, {"ranks": evidence}
            )
        for rank in verdict.ranks if verdict.kind == "ranks" else ():
            waiting = waiting_for(views, rank, self._group)
            data = {
                **_evidence(rank, answers[rank], stacks.get(rank, "")),
                "why": verdict.why,
                "waiting_ranks": waiting[:64],
                "waiting": len(waiting),
            }
            message = f"rank {rank} {_describe_position(answers[rank])}"
            await self._write_event("rank_hung", message, rank, _step(answers[rank]), data)
        silent = [rank for rank in verdict.ranks if not views[rank].answered]
        answering = await asyncio.gather(*(self._kill_hung(rank, answers[rank]) for rank in running))
        silent += [rank for rank, answers_still in zip(running, answering, strict=True) if not answers_still]
        for rank in silent:
            self._mark_lost(rank, "makes no progress, and its agent does not answer")

    async def _flight_records(self, answers: Answers) -> dict[int, FlightRecord]:
        """NCCL's flight records, of the ranks that have them."""
        records = await self._of_trainers(answers, answers, lambda agent, pid: agent.flight_record(pid))
        return {rank: record for rank, record in records.items() if record is not None}

    async def _of_trainers(
        self, ranks: Iterable[int], answers: Answers, question: Callable[[AgentClient, int], Awaitable[T]]
    ) -> dict[int, T]:
        """By rank what its agent answers about its trainer, which has that process id; not of those that are gone, or
        silent."""
        pids = {rank: answer.pid for rank in ranks if (answer := answers[rank]) is not None}
        agents = {rank: agent for rank in pids if (agent := self._agents[rank]) is not None}
        known, _ = await query(agents, lambda rank, agent: question(agent, pids[rank]), EVIDENCE_SECONDS)
        return known

    async def _kill_hung(self, rank: int, answer: TrainerStatus | None) -> bool:
        """Whether its agent answers; an agent that has just reported its trainer's position may not any more."""
        try:
            await within(KILL_SECONDS, self._kill(rank, _kind(answer), answer))
        except AgentTimeout:
            return False
        return True

    async def _kill(self, rank: int, kind: str, answer: TrainerStatus | None, after_commit: bool = False) -> bool:
        agent = self._agents[rank]
        if agent is None or answer is None:
            return False
        message = "slowed the other ranks down and was replaced" if kind == "straggler" else _describe_position(answer)
        with contextlib.suppress(AgentError):
            return await agent.kill(answer.pid, kind, message, after_commit)
        return False

    async def _replace_stragglers(self) -> None:
        while True:
            rank = await self._slow.get()
            if time.monotonic() - self._replaced.get(rank, -REPLACE_SECONDS) < REPLACE_SECONDS:
                continue
            _, answer = await self._progress(self._agents[rank])
            if await self._kill(rank, "straggler", answer, after_commit=True):
                self._replaced[rank] = time.monotonic()


def _step(answer: TrainerStatus | None) -> int | None:
    return answer.record.step if answer is not None and answer.record is not None else None


def _kind(answer: TrainerStatus | None) -> str:
    """The kind of failure of a rank that hangs. One that only waits for a checkpoint to be written is not at fault, nor
    is its machine: the storage does not answer."""
    waits = answer is not None and answer.record is not None and answer.record.phase == "checkpoint"
    return NOT_SAVED if waits and answer is not None and not answer.stopped else "hung"


def _describe_position(answer: TrainerStatus | None) -> str:
    """A rank's position, in words."""
    if answer is None:
        return "makes no progress, and its agent does not answer"
    record, how = answer.record, "was stopped" if answer.stopped else "made no progress"
    # The host may be far ahead of a device that does not advance.
    place = record.device if record is not None and record.device is not None and record.device.pending else record
    where: str = place.phase if place is not None else "starting"
    if place is not None and place.micro_batch is not None:
        where += f" of micro-batch {place.micro_batch}"
    return f"{how} for {answer.standing_seconds:.1f} s in {where}"


def _evidence(rank: int, answer: TrainerStatus | None, stacks: str) -> JsonObject:
    """The evidence about one rank that an event keeps."""
    status = to_json(answer) if answer is not None else {}
    record = status.get("record") or {}
    channel = record.get("channel")
    axis = AXES[channel] if channel is not None and channel < len(AXES) else None
    return {
        "rank": rank,
        **{name: record.get(name) for name in _FROM_RECORD},
        "axis": axis,
        **{name: status.get(name) for name in ("stopped", "burning", "standing_seconds", "process")},
        "stacks": stacks,
    }
