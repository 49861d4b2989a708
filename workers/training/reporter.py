"""Ships a rank's reports in batches, on a thread of its own: the training thread only puts into a queue. Those that
people read are also lines of the job's log (`log_lines.py`)."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manta.workers.comm.comm import Comm
from manta.workers.data.token_cache import Watcher
from manta.workers.liveness.rank_samples import RankSample
from manta.workers.protocol.reports import Event, Message, Metrics, Payload

BATCH_SECONDS = 0.1

Sink = Callable[[list[Message]], None]
"""Takes messages in order; may block, may raise OSError when the other side is gone."""


@dataclass(frozen=True)
class _Deferred:
    make: Callable[[], Payload]
    time: float


class Reporter:
    """Queue and shipping thread of one rank."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._queue: queue.SimpleQueue[Message | _Deferred | None] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._ranks: RankSample | None = None
        self._thread = threading.Thread(target=self._ship, name="reporter", daemon=True)
        self._thread.start()

    def metrics(self, row: dict[str, Any]) -> None:
        """The numbers of one committed step, by the names of the REST contract."""
        ranks, self._ranks = self._ranks, None
        self._put(Metrics((row,), ranks))

    def ranks(self, sample: RankSample) -> None:
        """Numbers of all ranks, which are sent with the next row."""
        self._ranks = sample

    def event(self, kind: str, step: int, message: str, data: dict[str, Any]) -> None:
        """An event for the user."""
        self._put(Event(kind, message, step, data))

    def send(self, payload: Payload) -> None:
        """Something else, which a reader waits for: it is sent without waiting for a batch."""
        self._put(payload)
        self._urgent.set()

    def deferred(self, make: Callable[[], Payload]) -> None:
        """Something that takes a while to be built, which is done on the reporter's thread. Left out if that fails."""
        self._queue.put(_Deferred(make, time.time()))

    def _put(self, payload: Payload) -> None:
        self._queue.put(Message(payload, time.time()))

    def close(self, timeout: float = 5.0) -> None:
        """Ship what is queued and stop. Gives up after `timeout` seconds."""
        self._queue.put(None)
        self._urgent.set()
        self._thread.join(timeout)

    def _ship(self) -> None:
        while True:
            batch = [self._queue.get()]
            self._urgent.clear()
            while not self._queue.empty():
                batch.append(self._queue.get())
            messages = [message for entry in batch if entry is not None and (message := _built(entry)) is not None]
            try:
                if messages:
                    self._sink(messages)
            except OSError:
                return  # the reader is gone, and the process is about to end because of that
            if None in batch:
                return
            self._urgent.wait(BATCH_SECONDS)


def _built(message: Message | _Deferred) -> Message | None:
    """The message; None if it cannot be built, which must not keep others from being sent."""
    if isinstance(message, Message):
        return message
    try:
        return Message(message.make(), message.time)
    except Exception:  # noqa: BLE001 - later rows and messages must still be sent
        traceback.print_exc()
        return None


def announce(comm: Comm, reporter: Reporter, kind: str, step: int, message: str, data: dict[str, Any]) -> None:
    """On rank 0, report `message` as an event."""
    if comm.rank == 0:
        reporter.event(kind, step, message, data)


def named_samples(samples: Sequence[range]) -> str:
    """The samples of a step as text, such as `32 to 47`."""
    return " and ".join(f"{sample.start} to {sample.stop - 1}" for sample in samples)


def sample_data(samples: Sequence[range]) -> dict[str, Any]:
    """The samples of a step as an event's data: the first and the last, and [first, one past the last] of each
    range."""
    return {
        "first_sample": samples[0].start,
        "last_sample": samples[-1].stop - 1,
        "samples": [[sample.start, sample.stop] for sample in samples],
    }


class DataWatch(Watcher):
    """The watcher of a rank."""

    def __init__(self, comm: Comm, reporter: Reporter):
        self._comm, self._reporter = comm, reporter

    def alive(self) -> None:
        """Record progress where the rank's agent reads it."""
        self._comm.step.enter("preparing")

    def report(self, kind: str, message: str, data: dict[str, Any]) -> None:
        """Report an event of the job."""
        self.alive()
        self._reporter.event(kind, 0, message, data)
