"""A trainer's end of the commands from its agent: read from the control socket by a thread of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable

from workers.protocol.messages import Fault, LaunchOrder, TraceOrder
from workers.rank.commands import Arm, DumpFlightRecord, Go, Rest, SaveAndEnd, Trace, read_command

EXIT_ORPHANED = 76


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
