"""A generation that runs, as the supervisor sees it: the agents of its ranks, and what they report.

A watcher per rank reads that rank's reports in order. A report is acknowledged by asking for the next ones, which
happens only after it was handled, so a control plane that dies in between sees it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from manta.service.cluster.agent_client import AgentClient, AgentError, within
from manta.service.job.inbox import Inbox, Note
from manta.service.recovery.decisions import Death, culprit_of, describe_exit
from manta.workers.accounting.state_costs import held_bytes
from manta.workers.config import JobSpec
from manta.workers.errors import failure_kind
from manta.workers.liveness.hang_detection import REST_BYTES_PER_SECOND
from manta.workers.protocol.reports import EXIT_SAVED, Exited, Finished, Printed, Report, Resting, TrainerStatus

POLL_SECONDS = 30.0
POLLS_A_SECOND = 0.5
"""Requests to a whole gang that has nothing to report: the more ranks it has, the less often each is asked, so that a
running job costs the same whatever its size."""
# If an agent takes that much longer to answer, it or its node is hanging.
ANSWER_SECONDS = 20.0
# After the first rank that merely lost a peer, how long to wait for the death that explains it.
CULPRIT_SECONDS = 0.3
# An agent that takes longer to stop its trainer is given up.
STOP_SECONDS = 15.0
LAST_REPORTS_POLL_SECONDS = 0.5

Question = Callable[[AgentClient], Awaitable[object]]
Handler = Callable[[Report], Awaitable[None]]
REST_SECONDS = 5.0
"""Seconds to leave the generation."""


class RunningGeneration:
    """The agents of a job, watched during one generation."""

    def __init__(
        self,
        agents: Sequence[AgentClient | None],
        generation: int,
        after: dict[int, int],
        handle: Handler,
        kept: Callable[[int], tuple[int, int]] | None = None,
    ):
        """`agents`: None for one that was gone before; `after`: last sequence handled of each rank; `handle` gets every
        report of this generation; `kept`: generation and sequence of the last report of a rank whose lines agents need
        not remember; None: all that were handled."""
        self.agents, self.generation = list(agents), generation
        self._after, self._handle, self._kept = after, handle, kept
        self.deaths: list[Death] = []
        """Ends that were not successes, in order of arrival."""
        self.finished: set[int] = set()
        """Ranks that committed the last step and exited."""
        self.saved: set[int] = set()
        """Ranks that were asked to save their state and end before the last step, and have."""
        self.resting: dict[int, int | None] = {}
        """Ranks that have left the generation and wait for the next, with the committed step that each holds."""
        self.launched = asyncio.Event()
        """Set once it is recorded which ranks were launched."""
        self._peers_lost: list[Death] = []
        self._reported_finished: set[int] = set()
        self._stalled_since: dict[int, float] = {}
        self._poll_seconds = max(POLL_SECONDS, len(self.agents) / POLLS_A_SECOND)
        self._polls: dict[int, asyncio.Timeout] = {}
        """By rank how long its agent has for the answer that is waited for."""
        self._stopping = False
        self._handling: set[int] = set()
        """Ranks one of whose reports is being stored: what they say next is not yet asked for."""
        self._changed = asyncio.Event()
        self._watchers = [asyncio.create_task(self._watch(rank)) for rank in range(len(self.agents))]
        self._alongside: list[asyncio.Task[None]] = []

    def run_alongside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` until the generation is over."""
        self._alongside.append(asyncio.create_task(work))

    def lose(self, rank: int, why: str) -> None:
        """Give up the agent of `rank` for the reason `why`, unless its end is known already."""
        if self._watchers[rank].done():
            return
        self._watchers[rank].cancel()
        self._record_death(Death(rank, "agent_lost", message=why))

    @property
    def all_ended(self) -> bool:
        """Whether no rank runs any more."""
        return len(self.finished) + len(self.saved) + len(self.deaths) == len(self.agents)

    @property
    def broken(self) -> bool:
        """Whether the generation cannot continue: a rank has died, or has lost a peer."""
        return bool(self.deaths or self.resting)

    @property
    def culprit(self) -> Death:
        """The death that caused the others; a lost connection if no process has died."""
        return culprit_of([*self.deaths, *self._peers_lost])

    async def wait(self, inbox: Inbox, *kinds: type[Note]) -> None:
        """Return when all ranks have finished, when one has died or come to rest, or when `inbox` has a note of one of
        these `kinds`."""
        note = asyncio.create_task(inbox.wait(*kinds))
        change = asyncio.create_task(self._changed.wait())
        try:
            while not (self.all_ended or self.broken or note.done() or inbox.has(*kinds)):
                change.cancel()
                self._changed.clear()
                change = asyncio.create_task(self._changed.wait())
                alongside = [task for task in self._alongside if not task.done()]
                await asyncio.wait({note, change, *self._running(), *alongside}, return_when=asyncio.FIRST_COMPLETED)
                self._raise_errors()
        finally:
            note.cancel()
            change.cancel()

    async def wait_for_culprit(self) -> None:
        """After a death that is only a consequence, wait a moment for the death that caused it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CULPRIT_SECONDS):
                while self.culprit.kind == "peer_lost" and self._running():
                    self._changed.clear()
                    await self._changed.wait()

    async def rest(self, grace: float, patience: float = 0.0) -> None:
        """Bring every trainer that still runs to rest, and handle what each of them reported before. They finish the
        step in progress first, if that takes at most `patience` seconds: then all rest at the same committed step. One
        that takes longer than `grace` seconds after that is killed."""
        running = [agent for agent, watcher in zip(self.agents, self._watchers, strict=True) if not watcher.done()]
        await self._end_all(
            running, lambda agent: agent.rest(self.generation, grace, patience), grace + patience + STOP_SECONDS
        )

    async def stop(self) -> None:
        """Kill every trainer, and handle what each of them reported before it ended."""
        await self._end_all(self.agents, lambda agent: agent.stop(), STOP_SECONDS)

    async def _end_all(self, agents: Sequence[AgentClient | None], request: Question, seconds: float) -> None:
        self._stopping = True
        for task in self._alongside:
            task.cancel()
        await asyncio.gather(*(self._query(request, agent, seconds) for agent in agents))
        await self._receive_last_reports(STOP_SECONDS)
        self._raise_errors()
        for rank, watcher in enumerate(self._watchers):
            if not watcher.done():
                self._record_death(Death(rank, "agent_lost", message="was given up: its agent does not answer"))
        await self.close()

    async def _receive_last_reports(self, seconds: float) -> None:
        """Wait until the last report of every rank is handled, at most `seconds`, not counting time in which reports
        are being stored: the database needs that, not an agent."""
        while seconds > 0 and self._running():
            began, storing = time.monotonic(), bool(self._handling)
            await asyncio.wait(self._running(), timeout=min(seconds, LAST_REPORTS_POLL_SECONDS))
            if not (storing or self._handling):
                seconds -= time.monotonic() - began

    async def close(self) -> None:
        """Stop listening; trainers run on."""
        for task in [*self._watchers, *self._alongside]:
            task.cancel()
        await asyncio.gather(*self._watchers, *self._alongside, return_exceptions=True)

    def _running(self) -> list[asyncio.Task[None]]:
        return [watcher for watcher in self._watchers if not watcher.done()]

    def _raise_errors(self) -> None:
        for task in [*self._watchers, *self._alongside]:
            if task.done() and not task.cancelled() and task.exception() is not None:
                task.result()

    async def _query(self, request: Question, agent: AgentClient | None, seconds: float) -> None:
        if agent is None:
            return
        with contextlib.suppress(AgentError):
            await within(seconds, request(agent))

    async def _watch(self, rank: int) -> None:
        agent = self.agents[rank]
        if agent is None:
            self._record_death(Death(rank, "agent_lost", message="lost its agent while the control plane was away"))
            return
        while True:
            try:
                reports = await self._next_reports(rank, agent)
            except AgentError as error:
                self._record_death(Death(rank, "agent_lost", message=f"lost its agent ({error.kind})"))
                return
            for report in reports:
                if isinstance(report.payload, Printed):  # the last lines of a generation may come after its end
                    await self._handle(report)
                    ended = False
                else:
                    ended = report.generation == self.generation and await self._take(rank, report)
                self._after[rank] = report.sequence
                if ended:
                    return

    async def _next_reports(self, rank: int, agent: AgentClient) -> list[Report]:
        """Raises AgentError; AgentTimeout if it does not answer a second request either: after the first, this process
        itself may have been delayed."""
        after = self._after.get(rank, 0)
        try:
            async with asyncio.timeout(self._poll_seconds + ANSWER_SECONDS) as self._polls[rank]:
                return await agent.reports(after, self._poll_seconds, *self._remembered(rank))
        except TimeoutError:
            return await within(ANSWER_SECONDS, agent.reports(after, 0.0, *self._remembered(rank)))
        finally:
            del self._polls[rank]

    def _remembered(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return () if self._kept is None else ((rank, *self._kept(rank)),)

    def _expect_the_end(self) -> None:
        """A rank has finished, and the others are about to: from now on all are asked frequently."""
        self._poll_seconds = POLL_SECONDS
        soon = asyncio.get_running_loop().time() + POLL_SECONDS + ANSWER_SECONDS
        for poll in self._polls.values():
            if not poll.expired() and (poll.when() or soon) > soon:
                poll.reschedule(soon)

    async def _take(self, rank: int, report: Report) -> bool:
        """Handle one report of this generation; True when it was the rank's last."""
        self._handling.add(rank)
        try:
            await self._handle(report)
        finally:
            self._handling.discard(rank)
        match report.payload:
            case TrainerStatus() as status:
                self._record_stall(rank, status, report.time)
            case Finished():
                self._reported_finished.add(rank)
            case Resting(step, message):
                self._peers_lost.append(Death(rank, "peer_lost", message=f"stopped: {message}", at=report.time))
                self.resting[rank] = step
                self._changed.set()
                return True
            case Exited() as exited:
                self._end(rank, exited, report.time)
                return True
        return False

    def _record_stall(self, rank: int, status: TrainerStatus, at: float) -> None:
        """A rank is overdue, or no longer."""
        if status.overdue:
            self._stalled_since[rank] = at - status.standing_seconds
        else:
            self._stalled_since.pop(rank, None)

    def _end(self, rank: int, exited: Exited, at: float) -> None:
        failure, reason = exited.failure, exited.killed_for
        if failure is None and (rank in self._reported_finished or exited.code == 0):
            self.finished.add(rank)
            self._expect_the_end()
            self._changed.set()
        elif exited.code == EXIT_SAVED:
            self.saved.add(rank)
            self._expect_the_end()
            self._changed.set()
        elif failure is not None:
            is_sentence, text = failure_kind(failure.kind).is_sentence, failure.traceback
            message = failure.message if is_sentence else f"failed with {failure.exception}: {failure.message}"
            self._record_death(Death(rank, failure.kind, failure.step, failure.exception, message, text, failure.at))
        elif reason is not None:
            since = self._stalled_since.get(rank, at)  # the failure began when it stopped making progress
            self._record_death(Death(rank, reason.kind, message=reason.message, at=since))
        else:
            words = describe_exit(exited.code, exited.signal, exited.memory_kills)
            self._record_death(Death(rank, "killed", message=words, traceback="\n".join(exited.last_output), at=at))

    def _record_death(self, death: Death) -> None:
        self.deaths.append(death)
        self._changed.set()


def time_to_rest(spec: JobSpec) -> float:
    """Seconds after which a trainer of the job that is not at rest is killed, and its rank forked again. Before it
    rests, its snapshot must be complete, with checksums, so that others can read it; for 100 GB that takes a minute.
    The snapshot of a custom model, which is not counted here, is known to its agent (`TrainerSlot.rest`)."""
    if spec.checkpoint.snapshots == "off" or not spec.model.is_counted:
        return REST_SECONDS
    return REST_SECONDS + held_bytes(spec) / REST_BYTES_PER_SECOND
