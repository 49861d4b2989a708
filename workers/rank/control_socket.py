"""What passes between an agent and its running trainer, one JSON line each: commands in one direction, which a thread
of the trainer's own reads, and reports in the other. Pure Python."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from manta.workers.protocol.json_codec import MalformedMessage, from_json, to_json
from manta.workers.protocol.messages import Fault, LaunchOrder, TraceOrder
from manta.workers.protocol.reports import Message, Metrics, Report

EXIT_ORPHANED = 76


@dataclass(frozen=True)
class Go:
    """Leave rest and carry out an order."""

    order: LaunchOrder


@dataclass(frozen=True)
class Rest:
    """Leave a generation and come to rest."""

    generation: int
    after_step: bool = False
    """Only after the present step."""


@dataclass(frozen=True)
class SaveAndEnd:
    """Together with all other ranks of a generation: save the state after a step, and exit."""

    generation: int


@dataclass(frozen=True)
class Arm:
    """Carry out a fault when its step and phase are reached."""

    fault: Fault


@dataclass(frozen=True)
class Trace:
    """Have all ranks of the job record steps."""

    order: TraceOrder


@dataclass(frozen=True)
class DumpFlightRecord:
    """Report the contents of NCCL's flight recorder."""


Command = Go | Rest | SaveAndEnd | Arm | Trace | DumpFlightRecord
_COMMANDS: dict[str, Any] = {
    "go": Go,
    "rest": Rest,
    "save_and_end": SaveAndEnd,
    "fault": Arm,
    "trace": Trace,
    "tell_flight": DumpFlightRecord,
}
_WORDS = {command: word for word, command in _COMMANDS.items()}


def command_line(command: Command) -> bytes:
    """The command as a line for the control socket."""
    return json.dumps({"do": _WORDS[type(command)], **to_json(command)}).encode() + b"\n"


def read_command(line: bytes) -> Command:
    """The command in a line of `command_line`. Raises MalformedMessage and ValueError."""
    document = json.loads(line)
    if not isinstance(document, dict) or document.get("do") not in _COMMANDS:
        raise MalformedMessage(f"{line[:80]!r} is not a command")
    command: Command = from_json(_COMMANDS[document["do"]], document)
    return command


def exit_orphaned() -> None:
    """End this process at once: its agent is gone, and nobody would get its results."""
    os._exit(EXIT_ORPHANED)


class CommandReader:
    """Takes the commands for one trainer."""

    def __init__(
        self,
        control: socket.socket,
        end: Callable[[int, bool], None],
        save_and_end: Callable[[int], None],
        arm: Callable[[Fault], None],
        trace: Callable[[TraceOrder], None],
        send_flight_record: Callable[[], None],
        orphaned: Callable[[], object] = exit_orphaned,
    ):
        """All are called on the reader's thread: `end` with a generation that is over, as far as the agent knows, and
        whether only after the present step; `save_and_end` with a generation whose ranks should do that; `arm` with a
        fault; `trace` with a request to record steps; `send_flight_record` when that is requested; `orphaned` when the
        agent has disconnected."""
        self._control, self._end, self._save_and_end = control, end, save_and_end
        self._arm, self._trace, self._send_flight_record, self._orphaned = arm, trace, send_flight_record, orphaned
        self._orders: queue.SimpleQueue[LaunchOrder] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next_order(self, after: int) -> LaunchOrder:
        """Wait for the order of a generation above `after`."""
        while (order := self._orders.get()).generation <= after:
            continue
        return order

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError), self._control.makefile("rb") as lines:
                for line in lines:
                    self._take(line)
        finally:
            self._orphaned()

    def _take(self, line: bytes) -> None:
        match read_command(line):
            case Go(order):
                self._orders.put(order)
            case Rest(generation, after_step):
                self._end(generation, after_step)
            case SaveAndEnd(generation):
                self._save_and_end(generation)
            case Arm(fault):
                self._arm(fault)
            case Trace(order):
                self._trace(order)
            case DumpFlightRecord():
                self._send_flight_record()


def reports_of(order: LaunchOrder, messages: list[Message]) -> list[Report]:
    """The reporter's `messages` as reports of the order's rank and generation; consecutive rows of metrics become one
    report, with the newest numbers of all ranks among them."""
    reports = []
    for are_metrics, neighbours in groupby(messages, lambda message: isinstance(message.payload, Metrics)):
        if are_metrics:
            payloads = [message.payload for message in neighbours if isinstance(message.payload, Metrics)]
            samples = [payload.ranks for payload in payloads if payload.ranks is not None]
            rows = tuple(row for payload in payloads for row in payload.rows)
            metrics = Metrics(rows, samples[-1] if samples else None)
            reports.append(Report(metrics, order.generation, order.rank, time.time()))
        else:
            reports += [
                Report(neighbour.payload, order.generation, order.rank, neighbour.time) for neighbour in neighbours
            ]
    return reports


def report_lines(reports: list[Report]) -> bytes:
    """The reports as lines for the agent."""
    return "".join(json.dumps(report.to_json()) + "\n" for report in reports).encode()
