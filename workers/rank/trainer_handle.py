"""An agent's handle for one trainer process: sends commands, receives reports and output, and notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Collection, Coroutine
from dataclasses import replace
from typing import Any

from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.protocol.json_codec import MalformedMessage
from manta.workers.protocol.messages import FAULT_STRUCK, LaunchOrder
from manta.workers.protocol.reports import (
    FROM_AGENTS,
    PAYLOADS,
    Event,
    Exited,
    Failure,
    KillReason,
    Prepared,
    Report,
    Resting,
)
from manta.workers.protocol.requests import Command, DumpFlightRecord, Go, RankRequest, Rest
from manta.workers.rank.control_socket import command_line
from manta.workers.rank.rank_log import LineSink, LineSplitter
from manta.workers.rank.report_buffer import ReportBuffer
from manta.workers.system.host_memory import killed_for_memory
from manta.workers.zygote.client import Exit, ForkedProcess

DRAIN_SECONDS = 2.0
"""Seconds without anything to read after which a trainer's output is complete. Its channels close with it, unless a
grandchild holds them open."""
MAX_DRAINS = 10
"""How often it is waited so long: a grandchild may go on writing."""
FLIGHT_RECORD_SECONDS = 3.0
CHUNK_BYTES = 65536


class TrainerHandle:
    """One trainer, through the generations that it survives. Its `exit` report comes last, after all its output has
    been read."""

    def __init__(
        self,
        order: LaunchOrder,
        process: ForkedProcess,
        reports: ReportBuffer,
        log: LineSink,
        prepared: bool,
        struck: set[str],
    ):
        """`prepared`: the process was forked to prepare for such an order, and waits for one; `struck`: takes the ids
        of faults that have struck."""
        self._struck = struck
        self.process, self.generation = process, 0 if prepared else order.generation
        self._rank, self._reports, self._log = order.rank, reports, log
        self._resting = asyncio.Event()
        if prepared:
            self._resting.set()
        self._prepared = asyncio.Event()
        self._flight_record: asyncio.Future[FlightRecord] | None = None
        self._alongside: asyncio.Task[None] | None = None
        self.stopped = False
        """Whether its end was requested."""
        self._stderr = LineSplitter()
        self._killed_before = killed_for_memory()
        self._killed_for: KillReason | None = None
        self._failure: Failure | None = None
        """The failure that it reported. It is part of the exit report: a new reader may only know what comes after a
        certain point."""
        self._received = 0
        """How many reports and chunks of output were read."""
        self._ending = asyncio.create_task(self._wait_for_exit(), name=f"trainer {process.pid}")

    @property
    def ended(self) -> bool:
        """Whether the process is gone and its exit has been reported."""
        return self._ending.done()

    def run_alongside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, instead of earlier work, as long as the process lives."""
        if self._alongside is not None:
            self._alongside.cancel()
        self._alongside = asyncio.create_task(work, name=f"alongside trainer {self.process.pid}")
        task = self._alongside
        self._ending.add_done_callback(lambda _: task.cancel())

    async def wait(self) -> Exit:
        """Wait for the end of the process, and for its `exit` report; returns how it ended."""
        return await asyncio.shield(self._ending)

    @property
    def at_rest(self) -> bool:
        """Whether the trainer has left its generation and is waiting for an order."""
        return self._resting.is_set() and not self.process.ended

    async def prepared(self) -> bool:
        """Wait until the process is ready for its order; False if it has ended before."""
        ready = asyncio.create_task(self._prepared.wait())
        await asyncio.wait({ready, self._ending}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return self._prepared.is_set()

    async def rest(self, generation: int, grace: float, patience: float = 0.0) -> bool:
        """Have the trainer leave `generation`; returns whether it is at rest. It may first finish its step, if that
        takes no more than `patience` seconds. If it takes more than `grace` seconds after that, it is killed."""
        if self.generation > generation:
            return self.at_rest  # it has been given a new order since
        for seconds, after_step in ((patience, True), (grace, False)):
            if seconds and self.generation == generation and not self.at_rest:
                self._send(Rest(generation, after_step))
                resting = asyncio.create_task(self._resting.wait())
                await asyncio.wait({resting, self._ending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                resting.cancel()
        if not self.at_rest:
            await self.stop(f"was killed by its agent: it did not stop within {grace + patience:.0f} s")
        return self.at_rest

    def assign_rank(self, rank: int, log: LineSink) -> None:
        """From now on the trainer's output and reports are those of `rank`."""
        self._rank, self._log = rank, log

    def go(self, order: LaunchOrder) -> None:
        """Hand the next generation's order to the trainer, which is at rest."""
        self._resting.clear()
        self.generation = order.generation
        self._send(Go(order))

    def _send(self, command: Command) -> None:
        self.process.control_writer.write(command_line(command))

    def tell(self, request: RankRequest) -> bool:
        """Have the trainer carry out `request`; returns whether it can: not if it has ended, or if the request is for a
        generation that it is not in, or has left."""
        generation = request.of_generation
        if self.process.ended or (generation is not None and (generation != self.generation or self.at_rest)):
            return False
        self._send(request)
        return True

    async def flight_record(self) -> FlightRecord | None:
        """NCCL's flight record of the process; None if the process does not send it within FLIGHT_RECORD_SECONDS."""
        if self._flight_record is None or self._flight_record.done():
            if self.process.ended:
                return None
            self._flight_record = asyncio.get_running_loop().create_future()
            self._send(DumpFlightRecord())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLIGHT_RECORD_SECONDS):
                return await asyncio.shield(self._flight_record)
        return None

    async def stop(self, why: str = "was stopped by its agent") -> Exit:
        """SIGKILL the process and wait until it is reaped and reported; `why`: what its `exit` report says, unless it
        is killed for another reason or has ended already."""
        self.stopped = True
        if self._killed_for is None and not self.process.ended:
            self._killed_for = KillReason("stopped", why)
        self.process.kill()
        return await self.wait()

    def kill(self, reason: KillReason) -> None:
        """SIGKILL the process, and have its `exit` report say why."""
        self._killed_for = reason
        self.process.kill()

    async def _wait_for_exit(self) -> Exit:
        pumps = [
            asyncio.create_task(self._pump_reports()),
            asyncio.create_task(self._pump_output("stdout", self.process.stdout, LineSplitter())),
            asyncio.create_task(self._pump_output("stderr", self.process.stderr, self._stderr)),
        ]
        ended = await self.process.wait()
        await self._drain(pumps)
        last_output = tuple(self._stderr.tail)
        kills = self._memory_kills() if ended.signal == signal.SIGKILL else None
        exited = Exited(ended.code, ended.signal, last_output, self._failure, self._killed_for, kills)
        self._reports.add(exited, self.generation, self._rank)
        self.process.close()
        return ended

    async def _drain(self, pumps: Collection[asyncio.Task[None]]) -> None:
        """Return once these have read all that a process that has ended has left to read. Where the whole agent stood
        still meanwhile, the time is over and all of it is still there."""
        for _ in range(MAX_DRAINS):
            before = self._received
            _, pumps = await asyncio.wait(pumps, timeout=DRAIN_SECONDS)
            if not pumps or self._received == before:
                break
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    def _memory_kills(self) -> int | None:
        """Number of kills by the kernel since the process began; None if its agent killed it."""
        before, now = self._killed_before, killed_for_memory()
        return None if self._killed_for is not None or before is None or now is None else now - before

    async def _pump_reports(self) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await self._control_line():
                self._received += 1
                self._take(line)

    async def _control_line(self) -> bytes:
        """The next line; an incomplete last line, from a trainer that died, is dropped."""
        try:
            return await self.process.control.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return b""

    def _take(self, line: bytes) -> None:
        """Buffer one report, unless it is invalid or belongs to another generation."""
        try:
            document = json.loads(line)
            if document["generation"] != self.generation or document["kind"] not in PAYLOADS:
                return
            report = Report.from_json(document)
        except (ValueError, KeyError, TypeError, RecursionError, MalformedMessage) as error:
            self._log.write(self.generation, "agent", [f"unreadable report ({error}): {line[:200]!r}"])
            return
        if isinstance(report.payload, FROM_AGENTS):
            return
        match report.payload:
            case Prepared():
                self._prepared.set()
                return
            case FlightRecord() as record:
                if self._flight_record is not None and not self._flight_record.done():
                    self._flight_record.set_result(record)
                return
            case Failure() as failure:
                self._failure = replace(failure, at=report.time)
                return
        self._reports.add(report.payload, self.generation, self._rank, report.time)
        match report.payload:
            case Event(type=kind, data=data) if kind == FAULT_STRUCK:
                self._struck.add(str(data.get("fault")))
            case Resting():
                self._resting.set()

    async def _pump_output(self, stream: str, reader: asyncio.StreamReader, splitter: LineSplitter) -> None:
        chunk = b"start"
        while chunk:
            chunk = await reader.read(CHUNK_BYTES)
            self._received += 1
            if lines := splitter.feed(chunk):
                self._log.write(self.generation, stream, lines)
