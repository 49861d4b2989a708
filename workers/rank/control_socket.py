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
from itertools import groupby

from manta.workers.protocol.messages import LaunchOrder
from manta.workers.protocol.reports import Message, Metrics, Report
from manta.workers.protocol.requests import Command, Go

EXIT_ORPHANED = 76


def command_line(command: Command) -> bytes:
    """The command as a line for the control socket."""
    return json.dumps(command.to_json()).encode() + b"\n"


def read_command(line: bytes) -> Command:
    """The command in a line of `command_line`. Raises MalformedMessage and ValueError."""
    return Command.from_json(json.loads(line))


def exit_orphaned() -> None:
    """End this process at once: its agent is gone, and nobody would get its results."""
    os._exit(EXIT_ORPHANED)


class CommandReader:
    """Takes the commands for one trainer."""

    def __init__(
        self, control: socket.socket, take: Callable[[Command], None], orphaned: Callable[[], object] = exit_orphaned
    ):
        """On the reader's thread `take` is called with each command except for orders, `orphaned` when the agent has
        disconnected."""
        self._control, self._take, self._orphaned = control, take, orphaned
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
                    match command := read_command(line):
                        case Go(order):
                            self._orders.put(order)
                        case _:
                            self._take(command)
        finally:
            self._orphaned()


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
