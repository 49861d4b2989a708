"""Responses of the REST API about a job's history: metrics, events, logs, ledger, recoveries, checkpoints and exports
of their weights."""

from __future__ import annotations

from typing import Any, Literal

from manta.api.schemas.base import Answer, Number, Stream, Time


class MetricSeries(Answer):
    """Metrics over steps."""

    steps: list[int]
    """Committed steps, ascending."""
    series: dict[str, list[Number]]
    """One value per step, by metric name."""


class Event(Answer):
    """Something that happened to a job."""

    id: str
    """Increases with time."""
    time: Time
    """When it happened."""
    type: str
    """Stable code."""
    generation: int | None
    """Generation of the job."""
    rank: int | None
    """Rank that the event is about."""
    step: int | None
    """Step that the event is about."""
    message: str
    """One sentence."""
    data: dict[str, Any]
    """Details of the event."""


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
    """stdout or stderr of the trainer, or agent for output of its agent."""
    text: str
    """The line."""
    level: str | None = None
    """Level given in the line: debug, info, warning, error or critical; null if there is none."""


class LogLines(Stream[LogLine]):
    """Lines that ranks printed."""

    earlier: bool | None = None
    """With `tail`: whether there are, or may be, earlier lines that match."""
    earlier_cursor: str | None = None
    """Pass this as `before`, with `tail`, for the earlier lines; null if there are none."""


class LedgerInterval(Answer):
    """An interval of a job's timeline."""

    begin: Time
    end: Time
    seconds: dict[str, float]
    """Seconds by class: one class, or those of a training loop."""


class Ledger(Answer):
    """How a job spent every second from its submission to its end, or until now."""

    seconds: dict[str, float]
    """By class: queue, start, compute, data_wait, snapshot_stall, checkpoint_stall, detect, re_form, restore, redo,
    idle_without_capacity, pause. They sum to `wall_seconds`."""
    wall_seconds: float
    """From `began_at` to `until`."""
    goodput: float | None
    """Compute / (wall - queue - pause), 0 to 1; null before the first committed step."""
    closed: bool
    """Whether the job has ended, so that the ledger is final."""
    began_at: Time
    """When the job was submitted."""
    until: Time
    """When it ended, or now."""
    intervals: list[LedgerInterval] | None = None
    """The timeline, without gaps; only if requested."""


class Recovery(Answer):
    """A recovery: a failure, and the generation that it started."""

    generation: int
    """The generation that the recovery started."""
    time: Time
    """When the failure happened."""
    kind: str
    """Kind of the failure, such as killed, hung, agent_lost or exception."""
    rank: int
    """The failed rank."""
    node: str | None
    """Node that the failed rank ran on."""
    cause: str
    """What happened to the rank, as one sentence."""
    forked: list[int]
    """Ranks that got a new process."""
    kept: int
    """Number of ranks that kept their process."""
    source: str
    """Source of the state, such as memory, snapshot, peer, replica or checkpoint."""
    resume_step: int
    """Committed step of the state."""
    steps_redone: int | None
    """Committed steps that were redone; null before the first committed step of this generation."""
    wait_seconds: float
    """How long the recovery was delayed because the same failure recurred."""
    seconds: dict[str, float | None]
    """By phase: detect, rest, re_form, restore, redo; null for a phase that has not ended. `redo` ends with the next
    committed step."""
    total_seconds: float | None
    """From the failure to the next committed step; null until then."""


class Checkpoint(Answer):
    """One durable checkpoint."""

    id: str
    """Id."""
    step: int
    """Committed step whose state it contains."""
    state: str
    """saving, complete, failed or deleted."""
    path: str
    """Folder of the checkpoint."""
    bytes: int | None
    """Size on disk; null until it is complete."""
    created_at: Time
    """When the save began."""
    generation: int | None = None
    """Generation that saved it."""
    exists: bool | None = None
    """Whether its files exist, as far as known; null while it is being saved."""
    age_seconds: float | None = None
    """Time since it was completed; null if it is not complete."""
    kept_because: str | None = None
    """Why it is not deleted when the next one is complete, in words; null if unknown."""
    loss: Number | None = None
    """Training loss of its step; null if unknown."""
    validation_loss: Number | None = None
    """Validation loss of its step, of the first validation set if no part of the corpus is held out; null if it was not
    measured then."""


class Export(Answer):
    """An export of a checkpoint's weights to another format."""

    id: str
    """Id."""
    job: str
    """Job id."""
    checkpoint: str
    """Id of the checkpoint, which may have been deleted since."""
    to: str
    """Folder on the machine of the service that received the request."""
    format: str
    """hf or safetensors."""
    dtype: str | None
    """Number format; null: that of the weights that the job started from, or fp32."""
    state: Literal["running", "done", "failed"]
    """The folder appears when it is complete, in state done."""
    message: str | None
    """Why it failed."""
    done_bytes: int
    """Bytes written so far."""
    total_bytes: int | None
    """Bytes of all tensors; null until known."""
    created_at: Time
    """When the export began."""
