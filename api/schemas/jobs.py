"""Responses of the REST API about jobs, lists of jobs, and the ranks of a job."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from manta.api.schemas.base import Answer, Number, Time
from manta.api.schemas.plans import Plan


class RankPlace(Answer):
    """A rank's coordinates in the layout."""

    rank: int
    """Global rank."""
    tensor: int
    """Index in its tensor group."""
    pipeline: int
    """Pipeline stage."""
    data: int
    """Index of its replica."""
    context: int
    """Index in its context group."""
    expert: int | None = None
    """Index in its expert group: which of the equal parts of the experts it has; null if it has all."""


class Straggler(Answer):
    """Evidence that a rank slows down the others."""

    own_seconds: float
    """Median time per step of the rank's own work over the last steps."""
    usual_seconds: float
    """Median time per step of the own work of the ranks of the same stage over the last steps."""
    sentence: str
    """Description for users."""


class Rank(RankPlace):
    """A rank's coordinates in the layout and its placement in the cluster."""

    node: str | None
    """Node that it runs on."""
    device: str | None
    """Device that it runs on."""
    pid: int | None
    """Process id of its trainer; null if none runs."""
    generation: int
    """Generation of its trainer."""
    state: str
    """State of the rank."""
    own_seconds: float | None = None
    """Time per step that it did not wait for other ranks: mean over the last seconds; null if unknown."""
    wait_seconds: float | None = None
    """Time per step, of the same steps, that it waited for other ranks until all ranks agreed."""
    memory_bytes: int | None = None
    """Memory in use by the rank, to seven digits."""
    straggler: Straggler | None = None
    """Null if it does not slow down the others."""


class WaitingRank(Answer):
    """State of one rank."""

    rank: int
    phase: str
    """Phase, such as forward, backward, reduction, agreement; exited if it has no trainer, unknown if it did not
    answer."""
    doing: str
    """Description of the phase, with the communication that it waits for."""
    since_seconds: float | None
    """How long it has made no progress; null if unknown."""
    waits_for: list[int]
    """Ranks that it waits for, as far as known."""
    step: int | None
    """Step that it is computing."""


class Waits(Answer):
    """Which ranks wait for which."""

    at: Time
    """When all ranks were queried."""
    ranks: list[WaitingRank]
    """Sorted by rank."""
    culprits: list[int]
    """Ranks that block the others and have made no progress for longer than allowed."""
    sentence: str
    """Summary for users."""


class RankStack(Answer):
    """The stack of a rank's trainer."""

    rank: int
    pid: int
    """Process id of its trainer."""
    at: Time
    """When it was recorded."""
    text: str
    """The Python stacks of all its threads; for a stopped process, what the kernel reports."""


class RankHistory(Answer):
    """Time of all ranks over the last samples."""

    steps: list[int]
    """The last step of each sample, ascending."""
    times: list[Time]
    """Time of each sample."""
    own_seconds: list[list[float]]
    """For each sample and rank: time per step that the rank did not wait for others."""


class ExpertTokens(Answer):
    """How evenly tokens are spread over a job's experts."""

    step: int | None
    """Step whose tokens are counted, the last of the newest sample; null before the first one."""
    layers: list[int]
    """The model's layers that have experts, ascending."""
    tokens: list[list[int]]
    """For each of these layers and each of its experts the tokens that chose it, to seven digits."""
    load: list[float]
    """For each of these layers the tokens of its busiest expert over the mean of its experts."""


class Fault(Answer):
    """A fault to be injected. The event `fault_injected` reports the request, and `fault_struck` that it has
    happened."""

    id: str
    """Id in the job's events."""
    message: str
    """Description for users."""
    confirmed: bool = True
    """False if the rank's agent has not confirmed it in time: it may happen all the same, so do not repeat it."""


JobSort = Literal["created", "name", "state", "step", "loss", "priority", "finished"]
"""Sort key of a list of jobs."""


class LatestMetrics(Answer):
    """Metrics of a job as single numbers."""

    latest: dict[str, Number]
    """The latest known value by metric name, including `step`; null if not known yet."""
    mean: dict[str, Number] = Field({})
    """Means of step_seconds, tokens_per_second, mfu_full, mfu_causal and hfu_full: over the last 20 steps, or over the
    whole run of a job that is over (of some 100 steps of it), without the first step after each start; null if not
    known yet."""


class Queue(Answer):
    """A queued job's position."""

    position: int | None = None
    """Position in the queue, starting from 1; null for a job that is not QUEUED."""
    waiting_for: dict[str, Any] | None = None
    """What the job waits for, such as needed and available slots."""
    expected_start_seconds: float | None = None
    """Estimated seconds until it starts, from the progress of the running jobs and the jobs ahead of it; null if
    unknown."""


class Job(Answer):
    """One training job."""

    id: str
    """Id."""
    project: str | None = None
    """Project of the job; null from a service whose release had no projects."""
    etag: str | None = None
    """For If-Match: changes whenever a field changes that PATCH can change."""
    name: str
    """Name, not necessarily unique."""
    labels: dict[str, str] = Field({})
    """Labels by key."""
    owner: str | None = None
    """The user who submitted it, or the name of the key; null for a job stored by an earlier release."""
    state: str
    """State of the job."""
    reason: str | None
    """Stable code of the reason for this state."""
    message: str | None
    """The reason as a sentence."""
    spec: dict[str, Any] = Field(title="Document")  # generators of clients would name its class JobSpec
    """The validated JobSpec with all defaults."""
    step: int
    """Last committed step."""
    steps: int
    """Number of steps of the job."""
    eta_seconds: float | None
    """Estimated time to the last step, from the duration of the newest steps; null if the job is not running."""
    parallel: dict[str, Any]
    """The current layout, with its world_size."""
    generation: int
    """Number of starts of the gang so far."""
    restarts: int
    """Number of automatic restarts so far."""
    metrics: LatestMetrics
    """Latest metrics."""
    goodput: float | None
    """Compute / (wall - queue - pause) by the job's ledger, 0 to 1; null before the first committed step."""
    running_seconds: float | None = None
    """Time since it was submitted without the queue and pauses; null before its first start."""
    queue: Queue
    """Position in the queue."""
    created_at: Time
    """When it was submitted."""
    started_at: Time | None
    """When it first left the queue."""
    finished_at: Time | None
    """When it reached its final state."""
    memory_kept_until: Time | None = None
    """For a failed job: until when its snapshots are kept in memory for a retry."""
    deletion_began_at: Time | None = None
    """When a deletion began that could not be finished: delete the job again."""


class WrittenSpec(Answer):
    """A job's spec, and which part of it is its user's."""

    spec: dict[str, Any]
    """The validated JobSpec with all defaults."""
    written: dict[str, Any] | None
    """The part that was submitted; null if another release stored the job without it."""


class JobCounts(Answer):
    """Numbers of jobs."""

    total: int
    """Number of all jobs."""
    by_state: dict[str, int]
    """Number of jobs in each state, including zeros."""


class Sparkline(Answer):
    """A short series of a job's loss, for a sparkline."""

    job: str
    """Job id."""
    loss: list[Number]
    """At most 32 values over its steps, selected as in `get_metrics`; empty before the first step."""


class DeletedJob(Answer):
    """What was deleted with a job."""

    id: str
    """Id of the deleted job."""
    rows: dict[str, int]
    """Number of deleted rows of the database, by table: events, metrics and so on."""
    checkpoints: int
    """Number of durable checkpoints, complete or not."""
    logs: int
    """Number of log files of ranks."""
    bytes: int
    """Total size of its files on disk."""


class Layout(Answer):
    """The layout of a spec."""

    parallel: dict[str, Any]
    """The layout, with its world_size."""
    world_size: int
    """Number of ranks."""
    micro_batches: int
    """Number of micro-batches of a replica in a step."""
    ranks: list[RankPlace] | None
    """Position of every rank; null for more than 4096 ranks."""


class SubmittedJob(Job):
    """A job that was just submitted."""

    notes: list[str] = Field([])
    """What the service decided where the document says nothing, and why: layout, precision, micro-batch size."""


class DryRun(Answer):
    """Result of a dry run of a submission."""

    spec: dict[str, Any]
    """The validated JobSpec with all defaults."""
    layout: Layout
    """Layout."""
    plan: Plan | None = None
    """Estimated time and memory of a step on this cluster."""
    plan_note: str | None = None
    """A note about the estimated times, or why there is no plan."""
    lacks_slots: bool = False
    """Whether the layout needs more slots than there are, as `plan_note` says; the job would wait for them."""
    data_problem: str | None = None
    """Why the job would fail because its data, tokenizer or weights are missing; null if they exist or that cannot be
    checked."""
    notes: list[str] = Field([])
    """What the service would decide where the document says nothing, and why."""
