"""How far a GPU has got with the work that its host queued.

With NCCL a host queues a step's work and runs ahead, so its own record shows what was queued last, and is the same on
all ranks of a gang that hangs. For that reason events are put into the compute stream between the work: at every phase,
at the start of every communication, and before and after the stream waits for one. Another thread asks the events
whether the device has passed them, which never waits for the device, and writes what was passed into the progress
record.

Two marks around a wait also separate computing from waiting in time: the time that a device did not wait is its own
time, by which stragglers are found. Pure Python: events come from `workers/comm/backend.py`, or from a test.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from manta.workers.liveness.progress import NOBODY, Progress

POLL_SECONDS = 0.1
"""Seconds between two looks at the device; the host gets no event when it moves on."""


class DeviceEvent(Protocol):
    """A point in the work of a device, like `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark the end of the work queued so far."""
        ...

    def query(self) -> bool:
        """Whether the device has reached this point; never waits. Raises RuntimeError if the device has failed."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds from this event to the event `later`; the device has passed both."""
        ...


class _Mark(NamedTuple):
    """An event in the stream, and what to call when it is passed, with the event and `about` as arguments."""

    event: DeviceEvent
    passed: Callable[..., None]
    about: tuple[Any, ...]


class DeviceTrail:
    """The marks of one device. The thread that queues work sets them, one at a time; any thread may call `poll`, which
    waits for neither the device nor that thread."""

    def __init__(self, new_event: Callable[[], DeviceEvent], progress: Progress):
        self._new_event, self._progress = new_event, progress
        self._marks: deque[_Mark] = deque()
        self._free: list[DeviceEvent] = []
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None
        self._lap_began: DeviceEvent | None = None
        self._wait_began: DeviceEvent | None = None
        self._waited = 0.0
        self._lap: tuple[float, float] | None = None
        self.step_seconds: tuple[float, float] | None = None
        """Seconds of the last step that the device had finished when this one began: in total, and without waiting for
        others. None in the first steps of a generation."""

    def begin_step(self) -> None:
        """A step begins. From the first step on, a thread looks at the device. Raises RuntimeError if the device has
        failed."""
        if self._stop is None:
            self._progress.device_at(self._progress.position)
            self._stop = threading.Event()
            threading.Thread(target=self._look_on, args=(self._stop,), name="device trail", daemon=True).start()
        self.poll()
        with self._lock:
            self.step_seconds = self._lap
        self._mark(self._next_lap)

    def at(self, position: int) -> None:
        """From here on the device is at `position`, encoded as in the progress record."""
        self._mark(self._be_at, position)

    def arrives(self, what: str, number: int) -> None:
        """When all earlier work is done, the device is ready for communication `number` of `what`, a name in
        COUNTED."""
        self._mark(self._arrive, what, number)

    def waits(self, channel: int, number: int, peer: int = NOBODY, sending: bool = False) -> None:
        """What is put into the stream from here to `wait_ended` is a wait: for communication `number` along the axis
        with number `channel`, or for `peer` if only one peer is waited for."""
        self._mark(self._wait, channel, number, peer, sending)

    def wait_ended(self) -> None:
        """The whole wait is in the stream."""
        self._mark(self._end_wait)

    def poll(self) -> None:
        """Note what the device has passed. Raises RuntimeError if the device has failed."""
        with self._lock:
            if self._stop is None:
                return
            before = len(self._marks)
            while self._marks and self._marks[0].event.query():
                event, passed, about = self._marks.popleft()
                passed(event, *about)
                if event is not self._lap_began and event is not self._wait_began:
                    self._free.append(event)
            self._progress.device_polled(before - len(self._marks), len(self._marks))

    def forget(self) -> None:
        """The generation is over, and what is queued no longer matters. No marks are set until `begin_step`."""
        with self._lock:
            if self._stop is not None:
                self._stop.set()
            self._stop = None
            self._marks.clear()
            self._lap_began = self._wait_began = self._lap = self.step_seconds = None
            self._waited = 0.0
            self._progress.device_unknown()

    def _mark(self, passed: Callable[..., None], *about: Any) -> None:
        with self._lock:
            if self._stop is None:
                return  # the device is not followed
            event = self._free.pop() if self._free else self._new_event()
        # If the device's queue is full this waits for the device, and a thread that polls must not wait for that.
        event.record()
        with self._lock:
            if self._stop is not None:
                self._marks.append(_Mark(event, passed, about))

    def _be_at(self, event: DeviceEvent, position: int) -> None:
        self._progress.device_at(position)

    def _arrive(self, event: DeviceEvent, what: str, number: int) -> None:
        self._progress.device_arrived(what, number)

    def _wait(self, event: DeviceEvent, channel: int, number: int, peer: int, sending: bool) -> None:
        self._wait_began = event
        self._progress.device_waits(channel, number, peer, sending)

    def _next_lap(self, event: DeviceEvent) -> None:
        began, self._lap_began = self._lap_began, event
        if began is not None:
            seconds = began.elapsed_time(event) / 1000
            self._lap = seconds, max(0.0, seconds - self._waited)
            self._free.append(began)
        self._waited = 0.0

    def _end_wait(self, event: DeviceEvent) -> None:
        began, self._wait_began = self._wait_began, None
        if began is not None:
            self._waited += began.elapsed_time(event) / 1000
            self._free.append(began)
        self._progress.device_wait_ended()

    def _look_on(self, stop: threading.Event) -> None:
        while not stop.wait(POLL_SECONDS):
            try:
                self.poll()
            except RuntimeError:
                return  # the training thread gets the same error and reports it
