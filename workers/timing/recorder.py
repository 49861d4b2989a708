"""Records what a rank does in the steps of a trace: on its training thread, and, if autograd runs backward on a
separate thread, there while the training thread waits for it.

On a CPU times are read from the clock. On a GPU they are those of events on the compute stream, which are read when
everything is over: a host that runs ahead would record when work was queued, not when it was done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from manta.workers.liveness.device_trail import DeviceEvent
from manta.workers.timing.recording import KINDS, Recording, Slice, SliceKind, TracedStep, clock_of_machine

MAX_SLICES = 50_000
"""The most slices that are kept of one rank."""
_OTHERS: dict[str, SliceKind] = {"data": "loader", "replica_check": "agreement"}
_COMMUNICATION = ("send", "receive", "collective")
_KINDS = {kind: kind for kind in KINDS if kind not in ("loader", *_COMMUNICATION)} | _OTHERS
"""By the name of a phase, the kind of slice that it is recorded as; other phases have no slice of their own."""


class Handle(Protocol):
    """A communication in progress."""

    def wait(self) -> None: ...


class Moments(Protocol):
    """The source of times."""

    device: bool
    """Whether they are the device's times."""

    def begin(self) -> None:
        """The recording begins."""
        ...

    def now(self) -> Any:
        """The current moment."""
        ...

    def seconds(self, moments: list[Any]) -> list[float]:
        """Seconds of CLOCK_MONOTONIC of past moments."""
        ...

    @property
    def error_seconds(self) -> float:
        """By how much all of them together may be early or late."""
        ...


class HostMoments:
    """The host's clock."""

    device = False
    error_seconds = 0.0
    now = staticmethod(time.monotonic)

    def begin(self) -> None:
        """Nothing to do."""

    def seconds(self, moments: list[float]) -> list[float]:
        """The moments are already seconds."""
        return moments


class DeviceMoments:
    """Events of a device, which are related to the host's clock once."""

    device = True

    def __init__(self, new_event: Callable[[], DeviceEvent], settle: Callable[[], None]):
        """`settle` returns once the device has finished what was queued."""
        self._new_event, self._settle = new_event, settle
        self._first: DeviceEvent | None = None
        self._began = self.error_seconds = 0.0

    def begin(self) -> None:
        """Determine what the clock says when the device passes an event."""
        self._settle()
        before = time.monotonic()
        self._first = self.now()
        self._settle()
        self.error_seconds = (time.monotonic() - before) / 2
        self._began = before + self.error_seconds

    def now(self) -> DeviceEvent:
        """An event that the device passes when it has finished what was queued so far."""
        event = self._new_event()
        event.record()
        return event

    def seconds(self, moments: list[DeviceEvent]) -> list[float]:
        """What the clock said when the device passed them."""
        first = self._first
        assert first is not None
        self._settle()
        return [self._began + first.elapsed_time(moment) / 1000 for moment in moments]


class _Open:
    """A phase that is being recorded, or that only determines the micro-batch and stage of what is inside it."""

    __slots__ = ("_began", "_inner", "_recorder", "kind", "micro_batch", "stage")

    def __init__(
        self,
        recorder: Recorder,
        inner: AbstractContextManager[None],
        kind: SliceKind | None,
        micro_batch: int | None,
        stage: int | None,
    ):
        self._recorder, self._inner, self.kind = recorder, inner, kind
        self.micro_batch, self.stage = micro_batch, stage

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._recorder.open.append(self)
        self._began = self._recorder.moments.now() if self.kind is not None else None

    def __exit__(self, *error: Any) -> None:
        if self.kind is not None:
            self._recorder.add(self.kind, self._began, self.stage, self.micro_batch)
        self._recorder.open.pop()
        self._inner.__exit__(*error)


class Recorder:
    """Records the steps of one trace on one rank."""

    def __init__(
        self,
        number: int,
        steps: int,
        moments: Moments,
        idle_seconds: Callable[[], float] | None = None,
        max_slices: int = MAX_SLICES,
    ):
        """`number`: of the trace; `steps`: how many to record; `idle_seconds`: how long this rank has waited for others
        so far while nothing was transferred; None if that is not known."""
        self.number, self._left, self.moments = number, steps, moments
        self._idle_seconds, self._max_slices = idle_seconds, max_slices
        self.open: list[_Open] = []
        """Phases in progress, the innermost last."""
        self._step, self._began = 0, None
        self._issued: Any = None
        self._messages: Counter[tuple[SliceKind, int]] = Counter()
        self._steps: list[tuple[int, Any, Any]] = []
        self._slices: list[tuple[Any, ...]] = []
        self._whole = 0
        """Number of slices in complete steps."""
        self._is_full = False
        """Whether no more slices are kept."""

    @property
    def done(self) -> bool:
        """Whether all steps are over: this becomes true on all ranks at once, however many slices fit on each."""
        return self._left == 0

    @property
    def in_last_step(self) -> bool:
        """Whether the current step is the last one to be recorded."""
        return self._left == 1

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running, so that forward work is recomputation."""
        return bool(self.open) and self.open[-1].kind in ("backward", "backward_input", "backward_weight")

    def begin_step(self, step: int) -> None:
        """A step begins; with the first one, so does the recording."""
        if not self._steps:
            self.moments.begin()
        del self._slices[self._whole :]  # of a step that did not end
        self.open.clear()
        self._step, self._began = step, self.moments.now()

    def end_step(self) -> None:
        """The step is over."""
        self._left -= 1
        if not self._is_full:
            self._steps.append((self._step, self._began, self.moments.now()))
            self._whole = len(self._slices)

    def phase(
        self, name: str, inner: AbstractContextManager[None], micro_batch: int, stage: int
    ) -> AbstractContextManager[None]:
        """`inner`, the context of a phase with that name, with its time recorded."""
        outer = self.open[-1] if self.open else None
        number = micro_batch if micro_batch >= 0 else None if outer is None else outer.micro_batch
        where = stage if stage >= 0 else None if outer is None else outer.stage
        return _Open(self, inner, _KINDS.get(name), number, where)

    def issues(self) -> None:
        """A communication is about to begin."""
        self._issued = self.moments.now()

    def add(self, kind: SliceKind, began: Any, stage: int | None, micro_batch: int | None, *more: Any) -> None:
        """What began at `began` is over. `more`: the other fields of a slice."""
        if not self._is_full:
            self._slices.append((kind, began, self.moments.now(), self._step, stage, micro_batch, *more))
            self._is_full = len(self._slices) > self._max_slices

    def collective(self, work: Handle, operation: str, axis: str, number: int, size: int) -> RecordedWait:
        """Records the wait for `work`, an `operation` on `size` bytes that has begun, the `number`-th along `axis`."""
        return RecordedWait(self, work, "collective", self._issued, (operation, size, axis), (None, number))

    def sent(self, peer: int, size: int) -> None:
        """A message of `size` bytes to `peer` was just sent."""
        ends = peer, self._number("send", peer)
        self.add("send", self._issued, *self.place, None, size, "pipeline", None, self._issued, *ends)

    def received(self, work: Handle, peer: int, size: int) -> RecordedWait:
        """Records the wait for `work`, a message of `size` bytes from `peer` that was just requested."""
        ends = peer, self._number("receive", peer)
        return RecordedWait(self, work, "receive", self._issued, (None, size, "pipeline"), ends)

    def _number(self, kind: SliceKind, peer: int) -> int:
        """Number of the next message, counted at both ends from the recording's beginning, when none is in flight."""
        self._messages[kind, peer] += 1
        return self._messages[kind, peer]

    @property
    def place(self) -> tuple[int | None, int | None]:
        """The stage and micro-batch of what happens now."""
        return (self.open[-1].stage, self.open[-1].micro_batch) if self.open else (None, None)

    def waited(self) -> float | None:
        """How long this rank has waited so far; None: not known."""
        return None if self._idle_seconds is None else self._idle_seconds()

    def recording(self) -> Recording:
        """What was recorded, for any thread, once everything is over. Raises RuntimeError if the device has failed."""
        rows, at = self._slices[: self._whole], self._times()
        steps = tuple(TracedStep(step, at[id(start)], at[id(end)]) for step, start, end in self._steps)
        slices = []
        for row in rows:
            each = Slice(*row)
            issued = None if each.issued is None else at[id(each.issued)]
            slices.append(each._replace(start=at[id(each.start)], end=at[id(each.end)], issued=issued))
        slices.sort(key=lambda each: (each.start, -each.end))
        return Recording(
            steps, tuple(slices), clock_of_machine(), self.moments.device, self.moments.error_seconds, self._problem()
        )

    def _times(self) -> dict[int, float]:
        """Seconds of all moments of complete steps, by the identity of the moment."""
        moments = [moment for _, *ends in self._steps for moment in ends]
        for row in self._slices[: self._whole]:
            each = Slice(*row)
            moments += [moment for moment in (each.start, each.end, each.issued) if moment is not None]
        return dict(zip(map(id, moments), self.moments.seconds(moments), strict=True))

    def _problem(self) -> str:
        if not self._is_full:
            return ""
        if not self._steps:
            return f"a step has more than {self._max_slices:,} slices"
        return (
            f"only the first {len(self._steps)} of its steps are kept, more would have over {self._max_slices:,} slices"
        )


class RecordedWait:
    """A communication in progress, the wait for which is recorded."""

    __slots__ = ("_about", "_ends", "_issued", "_kind", "_recorder", "_work")

    def __init__(
        self,
        recorder: Recorder,
        work: Handle,
        kind: SliceKind,
        issued: Any,
        about: tuple[str | None, int, str],
        ends: tuple[int | None, int],
    ):
        """`about`: operation, bytes and axis; `ends`: peer and number, as in a slice."""
        self._recorder, self._work, self._kind, self._issued = recorder, work, kind, issued
        self._about, self._ends = about, ends

    def wait(self) -> None:
        """Return once the communication is over. Raises PeerLost."""
        recorder = self._recorder
        before, began = recorder.waited(), recorder.moments.now()
        self._work.wait()
        after = recorder.waited()
        waited = None if before is None or after is None else after - before
        recorder.add(self._kind, began, *recorder.place, *self._about, waited, self._issued, *self._ends)
