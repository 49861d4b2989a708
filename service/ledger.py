"""How every second of a job was spent, from its submission to its end or to now. Pure Python.

The time line consists of three layers. The lowest are the states of the job. Above them are the generations: a
recovery's phases, then the training loop from its beginning to its last commit, then what came after that. Waiting in
the queue and pauses are above everything except training. Every second belongs to the class of the highest layer, so
the classes sum to the wall time whatever the rows contain; the seconds of a training loop are divided in proportion to
the sums that its steps reported, which differ from the loop's length only if clocks do.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from manta.service.recovery.timeline import RecoveryTimeline
from manta.service.states import SUPERVISED, JobState, is_final

LedgerClass = Literal[
    "queue",
    "start",
    "compute",
    "data_wait",
    "snapshot_stall",
    "checkpoint_stall",
    "detect",
    "re_form",
    "restore",
    "redo",
    "idle_without_capacity",
    "pause",
]
CLASSES: tuple[LedgerClass, ...] = get_args(LedgerClass)
STEP_CLASSES: tuple[LedgerClass, ...] = ("compute", "data_wait", "snapshot_stall", "checkpoint_stall", "redo")
"""The classes into which the seconds of a training loop are divided."""

# A step in progress counts as compute for this many mean steps, and after that as a failure not yet noticed.
GRACE_STEPS = 10


@dataclass(frozen=True)
class StateEntry:
    """A job's entry into a state."""

    at: float
    state: str


@dataclass(frozen=True)
class Training:
    """One generation, with the running sums of its training loop. Times are Unix seconds."""

    began_at: float
    ended_at: float | None = None
    trained_from: float | None = None
    """When its loop began; None before its first committed step."""
    trained_until: float | None = None
    """When its last step was committed."""
    steps: int = 0
    """Steps that it committed, for the first time or again."""
    seconds: Mapping[LedgerClass, float] | None = None
    """Sums over its steps, by class in STEP_CLASSES."""
    recovery: RecoveryTimeline | None = None
    """The recovery that led to it, if a failure made it necessary."""
    outcome: str | None = None
    """State in which the job ended with it."""


@dataclass(frozen=True)
class Interval:
    """A part of the time line that belongs to one class, or to one training loop."""

    begin: float
    end: float
    seconds: Mapping[LedgerClass, float]
    """Seconds by class; they sum to its length."""


@dataclass(frozen=True)
class Ledger:
    """The result."""

    began_at: float
    """When the job was submitted."""
    until: float
    """When it ended, or now."""
    closed: bool
    """Whether the job is over, so that nothing will change any more."""
    seconds: Mapping[LedgerClass, float]
    """Seconds of every class; they sum to `wall_seconds`."""
    intervals: Sequence[Interval] = ()
    """From `began_at` to `until` without gaps; together their seconds are `seconds`."""

    @property
    def wall_seconds(self) -> float:
        """From submission to the end, or to now."""
        return self.until - self.began_at

    @property
    def goodput(self) -> float | None:
        """Compute / (wall - queue - pause), 0 to 1; None before the first committed step."""
        able, compute = self.running_seconds, self.seconds["compute"]
        return min(1.0, compute / able) if compute > 0 and able > 0 else None

    @property
    def running_seconds(self) -> float:
        """Without the queue and pauses."""
        return self.wall_seconds - self.seconds["queue"] - self.seconds["pause"]


Label = LedgerClass | int | None
"""A class, the index of the generation whose training this is, or None if this layer says nothing."""


class _Layer:
    """A function of time that is constant between marks."""

    def __init__(self, until: float):
        self._until = until
        self.times: list[float] = []
        self._labels: list[Label] = []

    def mark(self, at: float | None, label: Label) -> None:
        """From `at` on, the value is `label`. Time only goes forward: a mark earlier than the last one applies from the
        last one on."""
        if at is None:
            return
        self.times.append(max(self.times[-1] if self.times else at, min(at, self._until)))
        self._labels.append(label)

    def at(self, moment: float) -> Label:
        """The label at `moment`."""
        place = bisect_right(self.times, moment) - 1
        return self._labels[place] if place >= 0 else None


def ledger(changes: Sequence[StateEntry], trainings: Sequence[Training], now: float) -> Ledger:
    """The ledger of a job with these state changes, its submission first, and these generations, in order. `now` is
    Unix seconds; it is the end of the ledger of a job that is not over. Raises ValueError if there are no changes."""
    if not changes:
        raise ValueError("a job without any state change has no ledger")
    closed = is_final(changes[-1].state)
    began_at = changes[0].at
    until = max(began_at, *(change.at for change in changes), *([] if closed else [now]))
    states, generations = _state_layer(changes, trainings, until), _generation_layer(trainings, changes, until)
    painted = [
        (start, end, _above(generations.at(start), states.at(start)))
        for start, end in itertools.pairwise(_edges(began_at, until, (*states.times, *generations.times)))
    ]
    intervals = _intervals(painted, trainings)
    seconds: dict[LedgerClass, float] = dict.fromkeys(CLASSES, 0.0)
    for interval in intervals:
        for name, part in interval.seconds.items():
            seconds[name] += part
    return Ledger(began_at, until, closed, seconds, intervals)


def _edges(began_at: float, until: float, times: Iterable[float]) -> list[float]:
    return sorted({began_at, until, *(at for at in times if began_at <= at <= until)})


def _intervals(
    painted: Iterable[tuple[float, float, LedgerClass | int]], trainings: Sequence[Training]
) -> list[Interval]:
    """The time line with neighbours of the same class merged; each part of a training loop has its share of the sums
    that the loop's steps reported."""
    intervals = []
    for label, run in itertools.groupby(painted, key=lambda part: part[2]):
        parts = list(run)
        begin, end = parts[0][0], parts[-1][1]
        length = end - begin
        shared = _shared(trainings[label].seconds or {}, length) if isinstance(label, int) else {label: length}
        intervals.append(Interval(begin, end, shared))
    return intervals


def _above(generation: Label, state: Label) -> LedgerClass | int:
    """The value of the highest layer."""
    if isinstance(generation, int):
        return generation
    if generation is None or state in ("queue", "pause", "idle_without_capacity"):
        assert state is not None and not isinstance(state, int)
        return state
    return generation


def _state_layer(changes: Sequence[StateEntry], trainings: Sequence[Training], until: float) -> _Layer:
    layer = _Layer(until)
    first = min((training.began_at for training in trainings), default=None)
    for change in changes:
        layer.mark(change.at, _class_of_state(JobState(change.state), first is not None and first < change.at))
    return layer


def _class_of_state(state: JobState, has_run: bool) -> LedgerClass:
    """What a second in `state` counts as if nothing more is known."""
    if state == JobState.QUEUED:
        return "idle_without_capacity" if has_run else "queue"
    if state == JobState.STARTING:
        return "re_form" if has_run else "start"
    if state == JobState.RUNNING:
        return "detect"
    # A user who cancels, pauses, or retries after the end stops the job on purpose.
    on_purpose = (JobState.CANCELLING, JobState.PAUSING, JobState.PAUSED)
    return "pause" if is_final(state) or state in on_purpose else "re_form"


def _generation_layer(trainings: Sequence[Training], changes: Sequence[StateEntry], until: float) -> _Layer:
    layer = _Layer(until)
    for place, training in enumerate(trainings):
        recovery = training.recovery
        if recovery is not None:
            layer.mark(recovery.began_at, "detect")
            layer.mark(recovery.noticed_at, "re_form")
        layer.mark(training.began_at, None if recovery is None else "re_form")
        if recovery is not None:
            layer.mark(recovery.connected_at, "restore")
        if training.trained_from is not None and training.trained_until is not None:
            # Its steps cannot have taken longer than the loop.
            length = sum((training.seconds or {}).values())
            layer.mark(min(training.trained_from, training.trained_until - length), place)
            after = trainings[place + 1] if place + 1 < len(trainings) else None
            for at, label in _after_training(training, changes, length, after):
                layer.mark(at, label)
    return layer


def _after_training(
    training: Training, changes: Sequence[StateEntry], length: float, after: Training | None
) -> list[tuple[float, Label]]:
    """What the time after a generation's last commit counts as, until the next generation says more."""
    done = training.trained_until
    assert done is not None
    if training.outcome == JobState.SUCCEEDED:
        return [(done, "start")]  # processes end and places are given back
    if after is not None and after.recovery is not None:  # the recovery knows when the generation was lost
        return [(done, "redo")]
    state = next((change.state for change in reversed(changes) if change.at <= done), None)
    if state in ("RESIZING", "PAUSING"):
        return [(done, None)]  # it came to rest on purpose
    noticed = _next((change.at for change in changes if change.state != JobState.RUNNING), done)
    if after is None and training.ended_at is None and noticed is None:  # a step is in progress
        return [(done, "compute"), (done + GRACE_STEPS * length / max(1, training.steps), None)]
    # A step was in progress, and is lost.
    return [(done, "redo"), *([] if noticed is None else [(noticed, None)])]


def _next(times: Iterable[float], after: float) -> float | None:
    return min((at for at in times if at >= after), default=None)


def _shared(sums: Mapping[LedgerClass, float], length: float) -> dict[LedgerClass, float]:
    """Divides `length` seconds in proportion to `sums`."""
    total = sum(sums.values())
    if total <= 0:
        return {"compute": length}
    # Divide first: a product of the smallest possible numbers loses its last digits, which are the only ones they have.
    return {name: length * (part / total) for name, part in sums.items()}


def seconds_taken(changes: Sequence[StateEntry], now: float, since: float) -> float:
    """Seconds up to `now` that a job was in states in which it may hold places, not counting those before `since`.
    `changes`: its entries into states, in order; times are Unix seconds."""
    following = [*(change.at for change in changes[1:]), now]
    spans = zip(changes, following, strict=True) if changes else itertools.chain()
    return sum(max(0.0, end - max(change.at, since)) for change, end in spans if JobState(change.state) in SUPERVISED)
