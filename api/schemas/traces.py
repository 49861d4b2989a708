"""What the REST API answers about traces and budgets, as data."""

from __future__ import annotations

from typing import Any, Literal

from api.schemas import Answer, RankPlace, Time
from workers.timing.recording import SliceKind

TraceState = Literal["requested", "recording", "complete", "partial", "failed"]


class TraceClock(Answer):
    """The clock behind a trace's times."""

    error_seconds: float | None
    """Uncertainty of times between two ranks; null before there are any."""
    device: bool
    """Whether times were taken on the devices, by events; else on the hosts."""


class RankBubble(Answer):
    """The bubble of one rank."""

    rank: int
    fraction: float
    """Part of its steps in which it neither computes nor communicates because of the pipeline."""


class Bubble(Answer):
    """Idle time that the pipeline causes."""

    mean: float | None
    """Over the ranks."""
    ranks: list[RankBubble]


class BudgetPart(Answer):
    """A part of a step."""

    name: Literal[
        "arithmetic",
        "products",
        "recomputation",
        "bubble",
        "tensor",
        "pipeline",
        "data",
        "optimizer",
        "loader",
        "snapshot",
        "rest",
    ]
    seconds: float
    """Mean over the ranks; may be negative, where the peak is reached or phases overlap."""
    fraction: float
    """Of the step."""
    how: str
    """How it was measured, as a sentence."""
    help: str
    """What would make it smaller; empty where nothing does."""


class StepBudget(Answer):
    """Where a step's time goes, from the device's peak on; the parts add up to the step."""

    step_seconds: float
    parts: list[BudgetPart]
    planned: list[BudgetPart] | None
    """The same parts as the planner expects them; null where it cannot plan the job."""
    measured_from: str
    """Id of a trace, or `phases`."""


class Trace(Answer):
    """Single steps of a job, recorded action by action; without what each rank did."""

    id: str
    """trace_ and its number in the job."""
    job_id: str
    state: TraceState
    message: str | None
    """Why it is partial or has failed, as a sentence."""
    generation: int | None
    """Of the ranks that record it; null before they begin, as the next three."""
    schedule: str | None
    parallel: dict[str, Any] | None
    """The layout that the job runs in."""
    first_step: int | None
    steps: int
    """How many were requested."""
    requested_at: Time
    finished_at: Time | None
    clock: TraceClock
    bubble: Bubble | None
    """Null before something is recorded, as the budget."""
    critical_path: list[tuple[int, int]]
    """Pairs of a rank and an index into its slices: the critical path, backwards from the end of the steps."""
    budget: StepBudget | None
    profiles: list[int]
    """Ranks that have a profile."""


class TracedStep(Answer):
    """A step of a rank, in seconds from the trace's start."""

    step: int
    start: float
    end: float


class TraceSlice(Answer):
    """One thing that a rank did. Slices of a rank are nested or disjoint; what does not apply is null."""

    kind: SliceKind
    name: str
    """A short description."""
    start: float
    """Seconds from the trace's start."""
    end: float
    step: int
    stage: int | None
    """Virtual stage, in the model's order."""
    micro_batch: int | None
    bytes: int | None
    """Bytes of a message; of a collective, those of the whole tensor."""
    axis: str | None
    """Axis of the layout along which its ranks lie."""
    wait: float | None
    """Seconds of it in which nothing moved; null where that is not known."""


class TracedRank(RankPlace):
    """What one rank did."""

    node: str | None
    steps: list[TracedStep]
    slices: list[TraceSlice]
    """By their start, outer ones first."""


class PlannedBubble(Answer):
    """Of a planned step."""

    mean: float


class PlannedTrace(Answer):
    """The same step, as the planner expects it."""

    step_seconds: float
    bubble: PlannedBubble
    ranks: list[TracedRank] | None
    """A rank of each stage of one replica; null where there are more than 20,000 passes."""


class TraceDocument(Trace):
    """A trace in full."""

    ranks: list[TracedRank]
    planned: PlannedTrace | None
    """Null where the planner cannot plan the job."""
