"""What happened to a job: metrics, events, logs, where its time went, what failed."""

from __future__ import annotations

from typing import Any

from api.schemas.base import Answer, Number, Stream, Time


class MetricSeries(Answer):
    """Metrics over steps."""

    steps: list[int]
    """Committed steps, ascending."""
    series: dict[str, list[Number]]
    """One value a step, by metric name."""


class Event(Answer):
    """Something that happened to a job."""

    id: str
    """Grows with time."""
    time: Time
    """When it happened."""
    type: str
    """Stable code."""
    generation: int | None
    """Generation that it belongs to."""
    rank: int | None
    """Rank that it is about."""
    step: int | None
    """Step that it is about."""
    message: str
    """One sentence."""
    data: dict[str, Any]
    """More about it."""


class JobEvent(Event):
    """An event, and the job that it happened to."""

    job: str
    """Job id."""


class LogLine(Answer):
    """One line that a rank printed."""

    time: Time
    """When it was printed."""
    rank: int
    """The rank that printed it."""
    generation: int
    """Generation of its trainer."""
    stream: str
    """stdout or stderr; agent for what its agent wrote."""
    text: str
    """The line."""
    level: str | None = None
    """The level that it names: debug, info, warning, error or critical; null where it names none."""


class LogLines(Stream[LogLine]):
    """Lines that ranks printed."""

    earlier: bool | None = None
    """With `tail`: whether there are, or may be, earlier lines that match."""
    earlier_cursor: str | None = None
    """Pass this as `before`, with `tail`, to read them; null where there are none."""


class LedgerInterval(Answer):
    """A part of a job's time line."""

    begin: Time
    end: Time
    seconds: dict[str, float]
    """Seconds by class: one class, or those of a training loop."""


class Ledger(Answer):
    """Where every second of a job went, from its submission to its end, or to now."""

    seconds: dict[str, float]
    """By class: queue, start, compute, data_wait, snapshot_stall, checkpoint_stall, detect, re_form, restore, redo,
    idle_without_capacity, pause. They sum to `wall_seconds`."""
    wall_seconds: float
    """From `began_at` to `until`."""
    goodput: float | None
    """Compute / (wall - queue - pause), 0 to 1; null before the first committed step."""
    closed: bool
    """Whether the job is over, so that nothing will change any more."""
    began_at: Time
    """When the job was submitted."""
    until: Time
    """When it ended, or now."""
    intervals: list[LedgerInterval] | None = None
    """The time line, without gaps; where it was asked for."""


class Recovery(Answer):
    """A failure, and the generation that recovered from it."""

    generation: int
    """The generation that it started."""
    time: Time
    """When the failure happened."""
    kind: str
    """Kind of the failure, such as killed, hung, agent_lost or exception."""
    rank: int
    """The rank that failed."""
    node: str | None
    """Node that the failed rank ran on."""
    cause: str
    """What happened to it, in one sentence."""
    forked: list[int]
    """Ranks that got a new process."""
    kept: int
    """Number of ranks that kept theirs."""
    source: str
    """Where the state came from, such as memory, snapshot, peer, replica or checkpoint."""
    resume_step: int
    """Committed step that the state belongs to."""
    steps_redone: int | None
    """Committed steps that were done again; null before the first one of this generation."""
    wait_seconds: float
    """How long it was delayed because the same failure kept recurring."""
    seconds: dict[str, float | None]
    """By phase: detect, rest, re_form, restore, redo; null where a phase has not ended. `redo` ends with the next
    committed step."""
    total_seconds: float | None
    """From the failure to the next committed step; null before that."""
