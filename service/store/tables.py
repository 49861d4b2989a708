"""The tables of the job database. Times are Unix seconds; rows have no relationships, so nothing is loaded
implicitly."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from manta.service.identity import DEFAULT_PROJECT
from manta.service.store.types import AnyText, BigKey, Document, Numbers, Real, ShortText

METRIC_NAMES = (
    "loss",
    "validation_loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "tokens_per_second",
    "step_seconds",
    "mfu_full",
    "mfu_causal",
    "hfu_full",
    "memory_bytes",
)
"""Metric names of the contract except `step`; each has a column of its own."""


class Base(DeclarativeBase):
    """Base of all tables. Constraints get predictable names, so that migrations can name them on any database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def _job_key(primary: bool = True) -> Mapped[str]:
    return mapped_column(String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=primary)


class Job(Base):
    """One submitted training job."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "state", "id"),
        Index(None, "state", "priority", "id"),
        Index(None, "name", "id"),
        Index(None, "project", "id"),
        Index(None, "project", "state", "id"),
        Index(None, "owner", "id"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """`job_` and 12 characters that sort by time of submission."""
    project: Mapped[str] = mapped_column(String(64), default=DEFAULT_PROJECT, server_default=DEFAULT_PROJECT)
    """Project that it belongs to, permanently. Earlier releases have none; their jobs belong to the default one."""
    owner: Mapped[str | None] = mapped_column(ShortText(100))
    """The user who submitted it, or the name of the key; None: an earlier release did not record it."""
    name: Mapped[str] = mapped_column(ShortText(100))
    """The spec's name; need not be unique."""
    state: Mapped[str] = mapped_column(String(16))
    """A `JobState`."""
    reason: Mapped[str | None] = mapped_column(ShortText(64))
    """Stable code that says why the job is in this state."""
    message: Mapped[str | None] = mapped_column(AnyText)
    """The reason as a sentence."""
    spec: Mapped[dict[str, Any]] = mapped_column(Document)
    """The checked JobSpec with all defaults."""
    submitted: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The user's own document; None: unknown."""
    not_default: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The spec's differences from the defaults of the release that stored it; None: unknown."""
    step: Mapped[int] = mapped_column(BigInteger, default=0)
    """Last committed step; the first is 1."""
    steps: Mapped[int] = mapped_column(BigInteger)
    """Steps of the whole job."""
    replicas: Mapped[int | None] = mapped_column()
    """Data-parallel replicas in use; None: as in the spec."""
    tensor: Mapped[int | None] = mapped_column()
    """Tensor-parallel size in use; None: as in the spec."""
    pipeline: Mapped[int | None] = mapped_column()
    """Pipeline-parallel size in use; None: as in the spec."""
    context: Mapped[int | None] = mapped_column()
    """Context-parallel size in use; None: as in the spec."""
    expert: Mapped[int | None] = mapped_column()
    """Expert-parallel size in use; None: as in the spec."""
    wanted_replicas: Mapped[int | None] = mapped_column()
    """Data-parallel replicas that the user last asked for; None: as in the spec."""
    generation: Mapped[int] = mapped_column(default=0)
    """Number of the newest generation; 0 before the first. Messages of lower ones are refused."""
    restarts: Mapped[int] = mapped_column(default=0)
    """Automatic restarts so far."""
    priority: Mapped[int] = mapped_column(default=0)
    """Higher starts first among queued jobs."""
    idempotency_key: Mapped[str | None] = mapped_column(String(200), unique=True)
    """The submitter's key for this request, bound to the project; see `jobs.bound_key`."""
    body_digest: Mapped[str | None] = mapped_column(String(64))
    """SHA-256 of the submitted body, to distinguish a repeated request from a different one with the same key."""
    waiting_for: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """What a queued job lacks, such as `{"unit": "slots", "needed": 8, "available": 4}`: `available` is what is free,
    or what exists if the cluster could never hold the job."""
    metrics: Mapped[dict[str, Any]] = mapped_column(Numbers, default=dict)
    """Latest known value of every metric, with the `step` of the newest row."""
    report_cursor: Mapped[dict[str, int]] = mapped_column(Document, default=dict)
    """Rank (as text) -> sequence number of the last report of this generation that was stored."""
    created_at: Mapped[float] = mapped_column(Real)
    """When it was submitted."""
    started_at: Mapped[float | None] = mapped_column(Real)
    """When it first left the queue to start."""
    finished_at: Mapped[float | None] = mapped_column(Real)
    """When it reached a final state."""
    updated_at: Mapped[float] = mapped_column(Real)
    """When this row last changed."""
    retried_at: Mapped[float | None] = mapped_column(Real)
    """When a user last retried it; earlier failures no longer count."""
    binned_until: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """Metrics of steps below this one are in bins; see `metric_bins`."""
    binned_generation: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """The newest generation whose metrics are in bins."""
    memory_kept_until: Mapped[float | None] = mapped_column(Real)
    """Failed jobs: until when its snapshots stay in shared memory for a retry."""
    deletion_began_at: Mapped[float | None] = mapped_column(Real)
    """Since when it is being deleted: it can no longer be retried; the deletion can be repeated until it is gone."""


class JobLabel(Base):
    """A label of a job, which is also in its spec; here for filtering lists."""

    __tablename__ = "job_labels"
    __table_args__ = (Index(None, "key", "value", "job_id"),)

    job_id: Mapped[str] = _job_key()
    """The job."""
    key: Mapped[str] = mapped_column(String(320), primary_key=True)
    """Key of the label, with its prefix."""
    value: Mapped[str] = mapped_column(String(63))
    """Value of the label."""


class DeletedJob(Base):
    """A deleted job. Its remains on a node that did not answer meanwhile can be removed; those of a job that the
    database never knew are left alone."""

    __tablename__ = "deleted_jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Id of the job."""
    deleted_at: Mapped[float] = mapped_column(Real)
    """When its rows were deleted."""


class StateChange(Base):
    """A job's entry into a state, its submission included."""

    __tablename__ = "state_changes"
    __table_args__ = (Index(None, "job_id", "id"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    """Grows with time."""
    job_id: Mapped[str] = _job_key(primary=False)
    """The job."""
    time: Mapped[float] = mapped_column(Real)
    """When it entered the state."""
    state: Mapped[str] = mapped_column(String(16))
    """The `JobState` that it entered."""


class Generation(Base):
    """One start of a job's gang."""

    __tablename__ = "generations"

    job_id: Mapped[str] = _job_key()
    """The job."""
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Number of the generation, from 1."""
    cause: Mapped[str] = mapped_column(AnyText)
    """Why the gang was started, such as `submitted` or `rank_died`."""
    resume_source: Mapped[str] = mapped_column(ShortText(16))
    """Where the state came from: start, snapshot or checkpoint."""
    resume_step: Mapped[int] = mapped_column(BigInteger)
    """Committed step that the state belongs to."""
    started_at: Mapped[float] = mapped_column(Real)
    """When it began."""
    first_step_at: Mapped[float | None] = mapped_column(Real)
    """When its first step was committed."""
    ended_at: Mapped[float | None] = mapped_column(Real)
    """When it ended."""
    trained_from: Mapped[float | None] = mapped_column(Real)
    """When its training loop began with its state restored, by the reporting rank."""
    trained_until: Mapped[float | None] = mapped_column(Real)
    """When its last step was committed; if it was the job's last, when its checkpoint was on disk."""
    committed_steps: Mapped[int] = mapped_column(BigInteger, default=0)
    """Steps that it was the first to commit."""
    redone_steps: Mapped[int] = mapped_column(BigInteger, default=0)
    """Steps that it committed again."""
    compute_seconds: Mapped[float] = mapped_column(Real, default=0.0)
    """Running sum over the steps that it was the first to commit; with the four below, all of its training time."""
    data_wait_seconds: Mapped[float] = mapped_column(Real, default=0.0)
    """The part of those steps spent waiting for data."""
    snapshot_stall_seconds: Mapped[float] = mapped_column(Real, default=0.0)
    """The part of those steps held up by snapshots."""
    checkpoint_stall_seconds: Mapped[float] = mapped_column(Real, default=0.0)
    """The part of those steps held up by durable checkpoints."""
    redo_seconds: Mapped[float] = mapped_column(Real, default=0.0)
    """Running sum over the steps that it committed again."""
    data: Mapped[dict[str, Any]] = mapped_column(Document, default=dict)
    """Additional data."""


class Recovery(Base):
    """The recovery of a generation that a failure made necessary."""

    __tablename__ = "recoveries"

    job_id: Mapped[str] = _job_key()
    """The job."""
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The generation that it began."""
    kind: Mapped[str] = mapped_column(ShortText(32))
    """Kind of the culprit's failure, such as killed, hung or exception."""
    rank: Mapped[int]
    """The culprit."""
    cause: Mapped[str] = mapped_column(AnyText)
    """What happened to it, in one sentence."""
    node: Mapped[str | None] = mapped_column(ShortText(200))
    """Node that it ran on."""
    forked: Mapped[list[int]] = mapped_column(Document, default=list)
    """Ranks that got a new process."""
    kept: Mapped[int] = mapped_column(default=0)
    """Number of ranks that kept theirs."""
    source: Mapped[str] = mapped_column(ShortText(32))
    """Where the state came from, such as memory, snapshot, replica or checkpoint."""
    resume_step: Mapped[int] = mapped_column(BigInteger)
    """Committed step that the state belongs to."""
    steps_redone: Mapped[int | None] = mapped_column(BigInteger)
    """Steps above it that had been committed before; known when the first step is committed."""
    wait_seconds: Mapped[float] = mapped_column(Real, default=0.0)
    """Seconds that it was held back because the same failure kept happening."""
    failed_at: Mapped[float | None] = mapped_column(Real)
    """When it happened, as far as known."""
    noticed_at: Mapped[float] = mapped_column(Real)
    """When the control plane noticed."""
    rested_at: Mapped[float | None] = mapped_column(Real)
    """When all ranks had come to rest or were gone."""
    launched_at: Mapped[float | None] = mapped_column(Real)
    """When all ranks had their orders."""
    connected_at: Mapped[float | None] = mapped_column(Real)
    """When the last rank had its groups."""
    restored_at: Mapped[float | None] = mapped_column(Real)
    """When the last rank had its state."""
    first_step_at: Mapped[float | None] = mapped_column(Real)
    """When the next step was committed."""


class Rank(Base):
    """One rank of a job's current gang: its place in the grid and on the cluster."""

    __tablename__ = "ranks"

    job_id: Mapped[str] = _job_key()
    """The job."""
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Global rank: ((data * pipeline_size + pipeline) * context_size + context) * tensor_size + tensor."""
    tensor: Mapped[int]
    """Place in its tensor group."""
    pipeline: Mapped[int]
    """Pipeline stage."""
    data: Mapped[int]
    """Replica."""
    context: Mapped[int] = mapped_column(default=0)
    """Place in its context group."""
    node: Mapped[str | None] = mapped_column(ShortText(200))
    """Id of the node it runs on."""
    device: Mapped[str | None] = mapped_column(ShortText(100))
    """Device of the rank, such as `cpu` or `cuda:0`."""
    pid: Mapped[int | None]
    """Process id of the trainer on its node."""
    generation: Mapped[int]
    """Generation that this row belongs to."""
    state: Mapped[str] = mapped_column(String(32))
    """What it is doing: starting, running or exited."""
    actor: Mapped[str | None] = mapped_column(ShortText(200))
    """Name of its Ray actor."""


class Export(Base):
    """An export of a checkpoint's weights, in progress or ended."""

    __tablename__ = "exports"
    __table_args__ = (Index(None, "job_id", "id"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """`export_` and random characters."""
    job_id: Mapped[str] = _job_key(primary=False)
    """The job."""
    checkpoint_id: Mapped[str] = mapped_column(String(80))
    """The exported checkpoint; it may be gone."""
    path: Mapped[str] = mapped_column(AnyText)
    """Folder that they are written to, on the machine of the service that received the request."""
    format: Mapped[str] = mapped_column(String(16))
    """hf or safetensors."""
    dtype: Mapped[str | None] = mapped_column(String(16))
    """Data type; None: the exporter decides."""
    state: Mapped[str] = mapped_column(String(16))
    """running, done or failed."""
    message: Mapped[str | None] = mapped_column(AnyText)
    """Why it failed."""
    done_bytes: Mapped[int] = mapped_column(BigInteger)
    """Bytes written so far."""
    total_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Bytes of all tensors; None before that is known."""
    created_at: Mapped[float] = mapped_column(Real)
    """When it began."""
    updated_at: Mapped[float] = mapped_column(Real)
    """When it was last updated."""


class RankNumbers(Base):
    """Numbers of all ranks of a job over a few seconds. Their number is limited; see `ranks.py`."""

    __tablename__ = "rank_numbers"

    job_id: Mapped[str] = _job_key()
    """The job."""
    slot: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Slot of the sample; the next sample in the same slot replaces it."""
    generation: Mapped[int]
    """Generation whose ranks these are."""
    step: Mapped[int] = mapped_column(BigInteger)
    """The last step that they cover."""
    time: Mapped[float] = mapped_column(Real)
    """When they were taken."""
    seconds: Mapped[float] = mapped_column(Real)
    """Seconds of a step, up to its agreement."""
    own_seconds: Mapped[str | None] = mapped_column(AnyText)
    """The part in which each rank did not wait for others, packed (`manta.workers.liveness.rank_samples`); None:
    unknown."""
    memory_bytes: Mapped[str] = mapped_column(AnyText)
    """Memory in use on each rank, packed."""
    stragglers: Mapped[list[dict[str, Any]]] = mapped_column(Document, default=list)
    """Ranks that held up the others: rank, own_seconds, usual_seconds, sentence."""
    expert_tokens: Mapped[str | None] = mapped_column(AnyText)
    """Tokens that chose each expert in the last step, layer by layer, packed; None: not the newest sample, or none."""


class Event(Base):
    """Something that happened to a job and that a user would want to know of."""

    __tablename__ = "events"
    # Otherwise a reader that has read up to an id would miss an event that reuses it.
    __table_args__ = (Index(None, "job_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    """Grows with time over all jobs."""
    job_id: Mapped[str] = _job_key(primary=False)
    """The job."""
    time: Mapped[float] = mapped_column(Real)
    """When it happened."""
    type: Mapped[str] = mapped_column(ShortText(64))
    """Stable code, such as `state_changed`."""
    generation: Mapped[int | None]
    """Generation it belongs to."""
    rank: Mapped[int | None]
    """Rank it is about."""
    step: Mapped[int | None] = mapped_column(BigInteger)
    """Step it is about."""
    message: Mapped[str] = mapped_column(AnyText)
    """One sentence."""
    data: Mapped[dict[str, Any]] = mapped_column(Document, default=dict)
    """Additional data."""


class Metric(Base):
    """The numbers of one committed step. A step that is redone replaces its row."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = _job_key()
    """The job."""
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """The committed step, from 1."""
    generation: Mapped[int]
    """Generation that committed it."""
    time: Mapped[float] = mapped_column(Real)
    """When it was committed."""
    loss: Mapped[float | None] = mapped_column(Real)
    """Training loss, nats per token."""
    validation_loss: Mapped[float | None] = mapped_column(Real)
    """Loss on held-out text, nats per token."""
    grad_norm: Mapped[float | None] = mapped_column(Real)
    """Global L2 norm of the gradient before clipping."""
    learning_rate: Mapped[float | None] = mapped_column(Real)
    """Learning rate of the step."""
    tokens: Mapped[float | None] = mapped_column(Real)
    """Tokens seen since the job's first step."""
    tokens_per_second: Mapped[float | None] = mapped_column(Real)
    """Throughput of the whole job."""
    step_seconds: Mapped[float | None] = mapped_column(Real)
    """Duration of the step, seconds."""
    mfu_full: Mapped[float | None] = mapped_column(Real)
    """Model FLOP utilisation, attention counted in full, 0 to 1."""
    mfu_causal: Mapped[float | None] = mapped_column(Real)
    """Model FLOP utilisation, attention counted half, 0 to 1."""
    hfu_full: Mapped[float | None] = mapped_column(Real)
    """Hardware FLOP utilisation: with recomputation, attention in full, 0 to 1."""
    memory_bytes: Mapped[float | None] = mapped_column(Real)
    """Highest memory use of a rank, bytes."""
    extra: Mapped[dict[str, Any]] = mapped_column(Numbers, default=dict)
    """Metrics by names that have no column."""


class MetricBin(Base):
    """The step with the highest loss in one of equal ranges of steps; see `metric_bins`."""

    __tablename__ = "metric_bins"

    job_id: Mapped[str] = _job_key()
    """The job."""
    level: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Width of the range."""
    bin: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """Index of the range."""
    step: Mapped[int] = mapped_column(BigInteger)
    """The step that represents it."""
    loss: Mapped[float | None] = mapped_column(Real)
    """Loss of the step that represents the range."""


class Checkpoint(Base):
    """One durable checkpoint, from the moment its saving begins."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index(None, "job_id", "step"),)

    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    """Made from job, step and generation."""
    job_id: Mapped[str] = _job_key(primary=False)
    """The job."""
    generation: Mapped[int]
    """Generation that saved it."""
    step: Mapped[int] = mapped_column(BigInteger)
    """Committed step whose state it holds."""
    state: Mapped[str] = mapped_column(String(16))
    """saving, complete, failed or deleted."""
    path: Mapped[str] = mapped_column(AnyText)
    """Folder of the checkpoint."""
    bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Size on disk, once complete."""
    created_at: Mapped[float] = mapped_column(Real)
    """When saving began."""
    completed_at: Mapped[float | None] = mapped_column(Real)
    """When its manifest was written."""
