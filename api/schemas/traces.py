"""Responses of the REST API about traces and step budgets."""

from __future__ import annotations

from typing import Any, Literal

from manta.api.schemas import Answer, RankPlace, Time
from manta.workers.timing.recording import SliceKind

TraceState = Literal["requested", "recording", "complete", "partial", "failed"]


class TraceClock(Answer):
    """Source and accuracy of the times of a trace."""

    error_seconds: float | None
    """Maximum error between the clocks of two ranks; null before there are any times."""
    device: bool
    """Whether the times were measured on the devices, with events; otherwise on the hosts."""


class RankBubble(Answer):
    """Bubble of one rank."""

    rank: int
    fraction: float
    """Fraction of its steps in which it neither computes nor communicates because of the pipeline."""


class Bubble(Answer):
    """Time lost to the pipeline."""

    mean: float | None
    """Mean over the ranks."""
    ranks: list[RankBubble]


class BudgetPart(Answer):
    """A part of a step."""

    name: Literal[
        "arithmetic",
        "products",
        "recomputation",
        "bubble",
        "tensor",
        "context",
        "expert",
        "pipeline",
        "data",
        "optimizer",
        "loader",
        "snapshot",
        "rest",
    ]
    label: str = ""
    """Name for users; empty from a service of an earlier release."""
    seconds: float
    """Mean over the ranks; may be negative if the peak is reached or phases overlap."""
    fraction: float
    """Fraction of the step."""
    how: str
    """How it was measured, as a sentence."""
    help: str
    """What would reduce it; empty if nothing would."""


class StepBudget(Answer):
    """Breakdown of a step, starting from the device's peak; the parts add up to the step."""

    step_seconds: float
    parts: list[BudgetPart]
    planned: list[BudgetPart] | None
    """Parts of the step as estimated by the planner; null if it cannot plan the job."""
    measured_from: str
    """Id of a trace, or `phases`."""
    divided: bool = True
    """Whether passes and communication were measured; false: only the MFU and the waits are known, and the rest is
    `rest`."""


class Trace(Answer):
    """Single steps of a job, recorded action by action; without the actions of each rank."""

    id: str
    """`trace_` and its number in the job."""
    job_id: str
    state: TraceState
    message: str | None
    """Why it is partial or has failed, as a sentence."""
    generation: int | None
    """Generation of the ranks that record it; null before they start, like the next three fields."""
    schedule: str | None
    parallel: dict[str, Any] | None
    """The layout that the job runs in."""
    first_step: int | None
    steps: int
    """Number of requested steps."""
    requested_at: Time
    finished_at: Time | None
    clock: TraceClock
    bubble: Bubble | None
    """Null before anything is recorded, like the budget."""
    critical_path: list[tuple[int, int]]
    """Pairs of a rank and the index of one of its slices: the actions that determine the duration of the steps,
    backwards from their end."""
    budget: StepBudget | None
    profiles: list[int]
    """Ranks with a profile."""


class TracedStep(Answer):
    """A step of a rank, in seconds since the start of the trace."""

    step: int
    start: float
    end: float


class TraceSlice(Answer):
    """One action of a rank. Slices of a rank are nested or disjoint; fields that do not apply are null."""

    kind: SliceKind
    name: str
    """Short description."""
    start: float
    """Seconds since the start of the trace."""
    end: float
    step: int
    stage: int | None
    """Virtual stage, in the model's order."""
    micro_batch: int | None
    bytes: int | None
    """Size of the message, or of the whole tensor of a collective."""
    axis: str | None
    """Axis of the layout that its ranks are on."""
    wait: float | None
    """Seconds in which no data was transferred; null if unknown."""


class TracedRank(RankPlace):
    """The actions of one rank."""

    node: str | None
    steps: list[TracedStep]
    slices: list[TraceSlice]
    """Sorted by start, outer ones first."""


class PlannedBubble(Answer):
    """Bubble of a planned step."""

    mean: float


class PlannedTrace(Answer):
    """A step of the traced job, as estimated by the planner."""

    step_seconds: float
    bubble: PlannedBubble
    ranks: list[TracedRank] | None
    """One rank of each stage of one replica; null if there are more than 20,000 passes."""


class TraceDocument(Trace):
    """A trace with the actions of all ranks."""

    ranks: list[TracedRank]
    planned: PlannedTrace | None
    """Null if the planner cannot plan the job."""
