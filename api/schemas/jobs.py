"""Jobs, and lists of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Answer, Number, Time
from api.schemas.plans import Plan
from api.schemas.ranks import RankPlace

JobSort = Literal["created", "name", "state", "step", "loss", "priority", "finished"]
"""What jobs are ordered by."""


class LatestMetrics(Answer):
    """Latest known value of each metric."""

    latest: dict[str, Number]
    """By metric name, `step` included; null where it is not known yet."""


class Queue(Answer):
    """A queued job's place."""

    position: int | None = None
    """From 1; null for a job that is not QUEUED."""
    waiting_for: dict[str, Any] | None = None
    """What is missing, such as needed and available slots."""


class Job(Answer):
    """One training job."""

    id: str
    """Its id."""
    project: str | None = None
    """The project that it belongs to; null from a service of a release without projects."""
    etag: str | None = None
    """For If-Match: changes whenever anything changes that a PATCH can change."""
    name: str
    """Its name, not necessarily unique."""
    labels: dict[str, str] = Field({})
    """By key."""
    owner: str | None = None
    """The user who submitted it, else the name of the key; null for a job that an older release stored."""
    state: str
    """Its state."""
    reason: str | None
    """Stable code that says why it is in this state."""
    message: str | None
    """The same as a sentence."""
    spec: dict[str, Any]
    """The checked JobSpec with all defaults."""
    step: int
    """Last committed step."""
    steps: int
    """Steps of the whole job."""
    eta_seconds: float | None
    """Expected time to the last step, from the newest steps' duration; null where nothing is running."""
    parallel: dict[str, Any]
    """The layout in use, with its world_size."""
    generation: int
    """Starts of the gang so far."""
    restarts: int
    """Automatic restarts so far."""
    metrics: LatestMetrics
    """Latest known numbers."""
    goodput: float | None
    """Compute / (wall - queue - pause) by the job's ledger, 0 to 1; null before the first committed step."""
    queue: Queue
    """Its place in the queue."""
    created_at: Time
    """When it was submitted."""
    started_at: Time | None
    """When it first left the queue."""
    finished_at: Time | None
    """When it reached its final state."""
    memory_kept_until: Time | None = None
    """Of a job that failed: until when its snapshots stay in memory for a retry."""
    deletion_began_at: Time | None = None
    """Since when it is being deleted, where that could not be finished: delete it again."""


class JobCounts(Answer):
    """How many jobs there are."""

    total: int
    """All jobs."""
    by_state: dict[str, int]
    """In each state, zeros included."""


class Sparkline(Answer):
    """A job's loss, as a short series."""

    job: str
    """Job id."""
    loss: list[Number]
    """At most 32 values over its steps, by `get_metrics`'s choice of steps; empty before the first."""


class DeletedJob(Answer):
    """What was deleted with a job."""

    id: str
    """The id that the job had."""
    rows: dict[str, int]
    """Rows of the database, by table: events, metrics and so on."""
    checkpoints: int
    """Durable checkpoints, whole or not."""
    logs: int
    """Log files of ranks."""
    bytes: int
    """Size of all its files on disk."""


class Layout(Answer):
    """How a spec would be laid out."""

    parallel: dict[str, Any]
    """The layout, with its world_size."""
    world_size: int
    """Number of ranks."""
    micro_batches: int
    """Micro-batches that one replica runs in a step."""
    ranks: list[RankPlace] | None
    """Every rank's place; null for more than 4096 ranks."""


class DryRun(Answer):
    """What a submission would have done."""

    spec: dict[str, Any]
    """The checked JobSpec with all defaults."""
    layout: Layout
    """Its layout."""
    plan: Plan | None = None
    """Predicted time and memory of a step on this cluster."""
    plan_note: str | None = None
    """A caveat about its times, or why there is no plan."""
    data_problem: str | None = None
    """Why the job would fail: its data, tokenizer or weights are not where it looks for them; null where they are, or
    where that is not known."""
