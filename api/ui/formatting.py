"""What the dashboard writes: jobs, ranks, events and checkpoints as short text. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from api.cli.progress import duration, figure, percent
from api.cli.render import class_name, layout_name, replaced, size
from api.schemas import Checkpoint, Cluster, Event, Job, Ledger, LogLine, Rank, Recovery
from service.states import JobState

UNKNOWN = "–"
_TONES = {
    "RUNNING": "active",
    "STARTING": "busy",
    "RESIZING": "busy",
    "RECOVERING": "warn",
    "PAUSING": "warn",
    "CANCELLING": "warn",
    "SUCCEEDED": "good",
    "FAILED": "bad",
}
_FINE = frozenset({JobState.RUNNING, JobState.SUCCEEDED})


@dataclass(frozen=True)
class JobRow:
    """A job in the list."""

    id: str
    name: str
    state: str
    tone: str
    share: float
    """Progress, 0 to 1."""
    step: str
    loss: str
    tokens_per_second: str
    mfu: str
    restarts: str
    age: str


@dataclass(frozen=True)
class RankCell:
    """A rank in the grid."""

    rank: int
    data: int
    column: int
    """Place among the columns, from 0: pipeline stage."""
    line: int
    """Place among the lines of its replica, from 0: tensor, within context."""
    title: str
    place: str
    state: str
    tone: str
    pid: str
    details: str


def state_tone(state: str) -> str:
    """The colour class of a job state; the state itself is always written too."""
    return _TONES.get(state, "idle")


def rank_tone(state: str, others_run: bool) -> str:
    """The colour class of a rank's state: one that has exited while `others_run` is missing."""
    if state == "running":
        return "active"
    return "bad" if others_run else "idle"


def share_of(job: Job) -> float:
    """Progress, 0 to 1."""
    return min(1.0, job.step / job.steps) if job.steps > 0 else 0.0


def age(moment: datetime, now: datetime) -> str:
    """How long ago `moment` was, coarse enough not to change every second."""
    seconds = max(0.0, (now - moment).total_seconds())
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "just now"


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands separators; a dash where unknown."""
    return UNKNOWN if value is None else figure(value, digits)


def ratio(value: float | None) -> str:
    """A ratio as a percentage; a dash where unknown."""
    return UNKNOWN if value is None else percent(value)


def seconds(value: float | None) -> str:
    """A duration; a dash where unknown."""
    return UNKNOWN if value is None or not math.isfinite(value) else duration(value)


def clock(moment: datetime) -> str:
    """A moment in UTC, without the year."""
    return moment.astimezone(UTC).strftime("%m-%d %H:%M:%S")


def job_row(job: Job, now: datetime) -> JobRow:
    """A job as a row of the list."""
    latest = job.metrics.latest
    return JobRow(
        id=job.id,
        name=job.name,
        state=job.state,
        tone=state_tone(job.state),
        share=share_of(job),
        step=f"{job.step:,} / {job.steps:,}",
        loss=number(latest.get("loss"), 4),
        tokens_per_second=number(latest.get("tokens_per_second")),
        mfu=ratio(latest.get("mfu_full")),
        restarts=str(job.restarts),
        age=age(job.created_at, now),
    )


def job_figures(job: Job, now: datetime) -> dict[str, str]:
    """The figures in a job's header, by label."""
    latest = job.metrics.latest
    until = job.finished_at or now
    return {
        "Train loss": number(latest.get("loss"), 4),
        "Validation loss": number(latest.get("validation_loss"), 4),
        "Tokens/s": number(latest.get("tokens_per_second")),
        "MFU (full)": ratio(latest.get("mfu_full")),
        "Goodput": ratio(job.goodput),
        "Restarts": str(job.restarts),
        "Generation": str(job.generation),
        "Ranks (t × p × d)": layout_name(job.parallel).replace("x", " × "),
        "Running for": seconds(None if job.started_at is None else (until - job.started_at).total_seconds()),
    }


def progress_text(job: Job) -> str:
    """How far a job is, and when it will be done."""
    text = f"step {job.step:,} of {job.steps:,}"
    if job.eta_seconds is None or job.step >= job.steps:
        return text
    return f"{text}, about {seconds(job.eta_seconds)} to go"


def why(job: Job) -> str:
    """Why a job is not simply running well; empty when it is, or when nobody knows."""
    if job.state in _FINE:
        return ""
    parts = [part for part in (job.reason, job.message) if part]
    if job.queue.position is not None:
        parts.insert(0, f"place {job.queue.position} in the queue")
    return ": ".join(parts)


def cluster_text(cluster: Cluster) -> str:
    """The cluster in one line."""
    alive = [node for node in cluster.nodes if node.alive]
    nodes = f"{len(alive)} node{'' if len(alive) == 1 else 's'}"
    lost = len(cluster.nodes) - len(alive)
    gpus = [node for node in alive if node.accelerator == "gpu"]
    total, free = sum(node.total for node in gpus or alive), sum(node.free for node in gpus or alive)
    slots, slots_free = sum(node.slots_total for node in alive), sum(node.slots_free for node in alive)
    places = f"{free:g} of {total:g} {'GPUs' if gpus else 'slots'}"
    beside = f" and {slots_free:g} of {slots:g} slots" if gpus and slots else ""
    return f"{nodes}{f' ({lost} lost)' if lost else ''}, {places}{beside} free"


def rank_cells(ranks: Sequence[Rank]) -> list[RankCell]:
    """The ranks as cells, in order of replica, line and column."""
    tensor_size = 1 + max((rank.tensor for rank in ranks), default=0)
    with_context = any(rank.context for rank in ranks)
    some_run = any(rank.state == "running" for rank in ranks)
    cells = [
        RankCell(
            rank=rank.rank,
            data=rank.data,
            column=rank.pipeline,
            line=rank.context * tensor_size + rank.tensor,
            title=f"rank {rank.rank}",
            place=f"stage {rank.pipeline}, tensor {rank.tensor}" + (f", ctx {rank.context}" if with_context else ""),
            state=rank.state,
            tone=rank_tone(rank.state, some_run),
            pid=f"pid {UNKNOWN if rank.pid is None else rank.pid}",
            details=f"node {rank.node or UNKNOWN}, device {rank.device or UNKNOWN}, generation {rank.generation}",
        )
        for rank in ranks
    ]
    return sorted(cells, key=lambda cell: (cell.data, cell.line, cell.column))


def event_row(event: Event) -> tuple[str, str, str, str]:
    """Time, type, message and generation of an event."""
    generation = UNKNOWN if event.generation is None else str(event.generation)
    return clock(event.time), event.type.replace("_", " "), event.message, generation


def event_tone(event: Event) -> str:
    """The colour class of an event."""
    if event.type == "state_changed":
        return state_tone(str(event.data.get("to")))
    return "bad" if any(word in event.type for word in ("fail", "died", "lost", "error")) else "idle"


def checkpoint_row(checkpoint: Checkpoint) -> tuple[str, str, str, str, str]:
    """Step, state, size, time and folder of a checkpoint."""
    stored = UNKNOWN if checkpoint.bytes is None else size(checkpoint.bytes)
    return f"{checkpoint.step:,}", checkpoint.state, stored, clock(checkpoint.created_at), checkpoint.path


def ledger_rows(ledger: Ledger) -> list[tuple[str, float, str, str]]:
    """Name, share from 0 to 1, duration and colour of each class of the ledger that has any time, in its order."""
    wall = ledger.wall_seconds
    return [
        (class_name(name), spent / wall, duration(spent) if spent >= 60 else f"{spent:.1f} s", _ledger_tone(name))
        for name, spent in ledger.seconds.items()
        if spent > 0 and wall > 0
    ]


def _ledger_tone(name: str) -> str:
    if name == "compute":
        return "good"
    if name in ("detect", "re_form", "restore", "redo", "idle_without_capacity"):
        return "bad"
    return {"queue": "idle", "pause": "idle", "start": "busy"}.get(name, "warn")


def ledger_note(ledger: Ledger | None) -> str:
    """The ledger in one line."""
    if ledger is None:
        return ""
    ends = "in all" if ledger.closed else "so far"
    return f"{duration(ledger.wall_seconds)} {ends}, goodput {ratio(ledger.goodput)}"


def recovery_row(recovery: Recovery) -> tuple[str, ...]:
    """Time, generation, cause, what was replaced, source, phases and total of a recovery."""
    phases = " + ".join(UNKNOWN if spent is None else f"{spent:.2f}" for spent in recovery.seconds.values())
    total = UNKNOWN if recovery.total_seconds is None else f"{recovery.total_seconds:.2f} s"
    source = f"{recovery.source}, step {recovery.resume_step:,}"
    return clock(recovery.time), str(recovery.generation), recovery.cause, replaced(recovery), source, phases, total


def log_text(lines: Iterable[LogLine], with_rank: bool) -> str:
    """Log lines as one text."""
    return "\n".join(f"[{line.rank}] {line.text}" if with_rank else line.text for line in lines)
