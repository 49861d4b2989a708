"""Output of the `manta` command: tables for users, which never break words, so that ids can be copied and numbers stay
correct; JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manta.api import schemas
from manta.api.cli.progress import duration, figure, percent, progress_line
from manta.api.schemas import access as access_schemas
from manta.service.states import HELD, JobState
from manta.service.words import byte_count
from manta.workers.training import metric_names

GAP = 2
SHORT = 20
"""Cells of up to this many characters are kept on one line if there is room."""


def as_json(answer: BaseModel | Sequence[BaseModel]) -> str:
    """An answer, or a list of them, as JSON text."""
    if isinstance(answer, BaseModel):
        return json.dumps(answer.model_dump(mode="json"), indent=2)
    return json.dumps([entry.model_dump(mode="json") for entry in answer], indent=2)


def moment(time: datetime | None) -> str:
    """A time in the local time zone; - if unknown."""
    return "-" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def size(count: float | None) -> str:
    """A number of bytes as text; - if unknown."""
    return "-" if count is None else byte_count(count)


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and a noun."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def format_value(value: Any) -> str:
    """A short form of a spec's value; - for none."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def layout_name(parallel: dict[str, Any]) -> str:
    """A layout in short: tensor x pipeline x data; the context and expert sizes unless they are 1, and ZeRO 2 or
    3."""
    parts = [f"{parallel.get('tensor')}x{parallel.get('pipeline')}x{parallel.get('data')}"]
    parts += [f"{key} {parallel[key]}" for key in ("context", "expert", "zero") if (parallel.get(key) or 1) > 1]
    return ", ".join(parts)


def _described(parallel: dict[str, Any]) -> str:
    """A layout with the names of its axes."""
    shape, *more = layout_name(parallel).split(",")
    return ",".join([f"{shape} (tensor x pipeline x data)", *more])


def job_list(console: Console, jobs: Sequence[schemas.Job], filtered: bool = False) -> None:
    """The table of `manta ps`; `filtered`: whether it may have left jobs out."""
    rows = [
        (
            job.id,
            job.name,
            job.state,
            f"{job.step}/{job.steps}",
            figure(job.metrics.latest.get("loss"), 4),
            figure(job.metrics.mean.get("tokens_per_second"), 0),
            duration(job.running_seconds),
            job.owner or "-",
            layout_name(job.parallel),
            job.restarts,
            moment(job.created_at),
            labels_of(job) or "-",
            _why(job) or "-",
        )
        for job in jobs
    ]
    headings = ("JOB", "NAME", "STATE", "STEP", "LOSS", "TOKENS/S", "TIME", "OWNER", "LAYOUT", "RESTARTS", "SUBMITTED",
                "LABELS", "WHY")  # fmt: skip
    none = "no job matches" if filtered else "no jobs yet; submit one with `manta submit FILE`"
    spare = ("LABELS", "SUBMITTED", "RESTARTS", "LAYOUT", "OWNER", "TOKENS/S", "TIME")
    if not console.is_terminal:
        table(console, headings, rows, none)
        return
    table(console, headings[:-1], [row[:-1] for row in rows], none, spare)
    for job in jobs:
        if why := _why(job):
            console.print(Text(f"{job.name} ({job.id}): ", "bold").append(why, "not bold"), soft_wrap=True)


def _why(job: schemas.Job) -> str:
    """Why a job is not running, for users; empty for one that does, and for one that was stopped on request."""
    if job.state in (JobState.RUNNING, JobState.SUCCEEDED, JobState.CANCELLED, JobState.CANCELLING):
        return job.message or "" if job.reason == HELD else ""
    position = "" if job.queue.position is None else f"position {job.queue.position} in the queue"
    return ": ".join(part for part in (position, job.message) if part)


def job_page(console: Console, job: schemas.Job, plan: schemas.JobPlan | None = None) -> None:
    """Output of `manta status`: what is known."""
    latest, mean, measured = job.metrics.latest, job.metrics.mean, metric_names.validation_losses(job.spec)
    lines = {
        "job": f"{job.id} ({job.name})",
        "progress": progress_line(job),
        "reason": job.message or job.reason or "",
        "queue": "" if job.queue.position is None else f"position {job.queue.position}",
        "layout": layout_of(job),
        "validation loss": figure(latest.get("validation_loss"), 4),
        **{f"validation loss of {name}": figure(latest.get(metric), 4) for name, metric in measured.items()},
        "expert load": figure(latest.get(metric_names.EXPERT_LOAD), 2),
        "MFU": percent(mean.get("mfu_full")),
        "MFU, causal attention": percent(mean.get("mfu_causal")),
        "memory of the largest rank": size(latest.get("memory_bytes")),
        "goodput": percent(job.goodput),
        "steps redone after a crash": _at_most(latest.get("snapshot_every_steps")),
        "generation": f"{job.generation}, after {counted(job.restarts, 'restart')}" if job.restarts else "",
        "planned step": "" if plan is None else planned_line(plan),
        "owner": job.owner or "",
        "labels": labels_of(job),
        "submitted": moment(job.created_at),
        "started": moment(job.started_at),
        "finished": moment(job.finished_at),
        "running time": duration(job.running_seconds),
        "snapshots kept until": moment(job.memory_kept_until),
    }
    _print_pairs(console, {name: value for name, value in lines.items() if value not in ("", "-")})


def _at_most(steps: float | None) -> str:
    return "-" if steps is None else f"at most {steps:.0f}"


def labels_of(job: schemas.Job) -> str:
    """Labels of a job, sorted by key."""
    return ", ".join(f"{key}={value}" for key, value in sorted(job.labels.items()))


def _print_pairs(console: Console, lines: Mapping[str, str]) -> None:
    """Each value on a line of its own, behind its name."""
    width = max(map(len, lines))
    for name, value in lines.items():
        console.print(Text(f"{name:<{width}}", "bold").append(f"  {value}", "not bold"), soft_wrap=True)


def planned_line(plan: schemas.JobPlan) -> str:
    """Planned and measured time of a step."""
    if plan.planned is None:
        return plan.problem or "-"
    if plan.drift is not None:
        return plan.drift.message
    planned = plan.planned.step_seconds
    text = f"{planned:.3g} s"
    if plan.measured is not None:
        took = plan.measured.step_seconds
        text = f"{text}; measured: {took:.3g} s" + ("" if plan.planned.assumed else f" ({took / planned - 1:+.0%})")
    return f"{text} (a rough estimate: `manta calibrate` measures this machine)" if plan.planned.assumed else text


def edited(console: Console, job: schemas.Job) -> None:
    """Output of `manta edit`."""
    text = f"{job.id} has name {job.name}, priority {job.spec.get('priority')}; labels: {labels_of(job) or 'none'}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def deletion(console: Console, answer: schemas.DeletedJob) -> None:
    """Output of `manta delete`."""
    gone = (("checkpoint", answer.checkpoints), ("log file", answer.logs), ("row", sum(answer.rows.values())))
    what = ", ".join(counted(count, name) for name, count in gone)
    console.print(f"{answer.id} is deleted: {what}, {size(answer.bytes)}", highlight=False)


def submitted_page(console: Console, job: schemas.Job, address: str, notes: Sequence[str]) -> None:
    """Output of `manta submit` on a terminal; `address`: of the job's page of the dashboard; `notes`: what was decided
    at submission."""
    lines = {
        "submitted": f"{job.name} ({job.id})",
        "layout": layout_of(job),
        "state": state_of(job),
        "dashboard": address,
        "next": f"manta logs -f {job.id}, manta status {job.id}, manta cancel {job.id}",
    }
    _print_pairs(console, lines)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def layout_of(job: schemas.Job) -> str:
    """Layout of a job and its number of ranks."""
    ranks = job.parallel.get("world_size")
    count = "" if ranks is None else f", {counted(ranks, 'rank')}"
    return f"{_described(job.parallel)}{count}"


def state_of(job: schemas.Job) -> str:
    """State of a job, its position in the queue, and why."""
    return f"{job.state}, {why}" if (why := _why(job)) else job.state


def layout_page(console: Console, answer: schemas.DryRun) -> None:
    """Output of `manta submit --dry-run`."""
    layout = answer.layout
    if answer.lacks_slots:
        console.print(answer.plan_note, markup=False, highlight=False, soft_wrap=True)
    shape = _described(layout.parallel)
    counts = f"{counted(layout.world_size, 'rank')}, {counted(layout.micro_batches, 'micro-batch', 'micro-batches')}"
    console.print(f"{'layout' if answer.lacks_slots else 'the spec is valid'}: {shape}, {counts} per step")
    if layout.ranks:
        axes = _axes_of(layout.ranks)
        table(console, ("RANK", *map(str.upper, axes)), [_place_of(place, axes) for place in layout.ranks], "")
    if answer.plan is not None:
        plan, memory = answer.plan, size(answer.plan.memory_bytes.total)
        console.print(
            f"planned: {plan.step_seconds:.4g} s per step, {plan.tokens_per_second:,.0f} tokens/s, {memory} on the "
            f"rank that needs the most, {duration(3600 * plan.hours)} in total",
            highlight=False,
        )
    for note in answer.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if answer.plan_note is not None and not answer.lacks_slots:
        console.print(f"Note: {answer.plan_note}" if answer.plan else answer.plan_note, markup=False, highlight=False)


def event_line(event: schemas.Event) -> str:
    """One event in a line."""
    where = " ".join(
        f"{name} {value}"
        for name, value in (("generation", event.generation), ("rank", event.rank), ("step", event.step))
        if value is not None
    )
    return f"{moment(event.time)}  {event.type:<18}  {where:<20}  {event.message}"


def job_event_line(event: schemas.JobEvent) -> str:
    """One event of any job in a line."""
    return f"{event.job}  {event_line(event)}"


def log_line(line: schemas.LogLine) -> str:
    """One log line."""
    return f"{moment(line.time)} [{line.rank}] {line.text}"


def metric_table(console: Console, points: schemas.MetricSeries, after_step: int = 0) -> None:
    """The table of `manta metrics`, of steps above `after_step`: only metrics with values."""
    shown = {name: values for name, values in points.series.items() if any(value is not None for value in values)}
    rows = [
        (step, *(metric_value(name, values[place]) for name, values in shown.items()))
        for place, step in enumerate(points.steps)
    ]
    none = f"no step above {after_step} is committed yet" if after_step else "no step is committed yet"
    table(console, ("STEP", *(name.upper() for name in shown)), rows, none, spare=_SPARE_METRICS)


_SPARE_METRICS = ("HFU_FULL", "MFU_CAUSAL", "TOKENS", "MEMORY_BYTES", "STEP_SECONDS", "LEARNING_RATE", "GRAD_NORM")
"""Columns that are omitted first if there is no room; `--names` selects any."""


_FORMATS: dict[str, Callable[[float | None], str]] = {
    "mfu_full": percent,
    "mfu_causal": percent,
    "hfu_full": percent,
    "memory_bytes": size,
    "tokens": lambda value: figure(value, 0),
    "tokens_per_second": lambda value: figure(value, 0),
    "learning_rate": lambda value: "-" if value is None else f"{value:.3g}",
}


def metric_value(name: str, value: float | None) -> str:
    """A metric as text; - if unknown."""
    return _FORMATS.get(name, lambda known: figure(known, 4))(value)


def metric_line(step: int | str, cells: Sequence[str]) -> str:
    """A line of `manta metrics --follow`."""
    return f"{step:>7}" + "".join(f"  {cell:>12}" for cell in cells)


def _axes_of(ranks: Sequence[schemas.RankPlace]) -> tuple[str, ...]:
    """Axes that a table of ranks has columns of: those of context and experts only if a layout has several ranks along
    them."""
    return (
        "tensor",
        "pipeline",
        "data",
        *(axis for axis in ("context", "expert") if any(getattr(rank, axis) for rank in ranks)),
    )


def _place_of(rank: schemas.RankPlace, axes: Sequence[str]) -> tuple[Any, ...]:
    return rank.rank, *(getattr(rank, axis) for axis in axes)


def rank_table(console: Console, ranks: Sequence[schemas.Rank]) -> None:
    """The table of `manta ranks`."""
    axes = _axes_of(ranks)
    rows = [
        (*_place_of(rank, axes), rank.state, node_name(rank.node), rank.device or "-",
         rank.pid or "-", rank.generation, figure(rank.own_seconds, 3), figure(rank.wait_seconds, 3),
         size(rank.memory_bytes), "yes" if rank.straggler else "")
        for rank in ranks
    ]  # fmt: skip
    headings = ("RANK", *map(str.upper, axes), "STATE", "NODE", "DEVICE", "PID", "GENERATION", "OWN S", "WAIT S",
                "MEMORY", "STRAGGLER")  # fmt: skip
    table(console, headings, rows, "the job has no ranks yet", spare=("GENERATION", "MEMORY", "DEVICE", "WAIT S"))


def waits_page(console: Console, waits: schemas.Waits) -> None:
    """Output of `manta waits`."""
    console.print(waits.sentence, markup=False, highlight=False, soft_wrap=True)
    rows = [
        (rank.rank, rank.step if rank.step is not None else "-", figure(rank.since_seconds, 1), rank.doing)
        for rank in waits.ranks
    ]
    table(console, ("RANK", "STEP", "FOR S", "DOING"), rows, "the job has no ranks")


def checkpoint_table(console: Console, checkpoints: Sequence[schemas.Checkpoint]) -> None:
    """The table of `manta checkpoints`."""
    rows = [(entry.step, entry.state, size(entry.bytes), moment(entry.created_at), entry.path) for entry in checkpoints]
    table(console, ("STEP", "STATE", "SIZE", "STARTED", "PATH"), rows, "no checkpoints yet")


def class_name(name: str) -> str:
    """Name of a ledger class or recovery phase, for users."""
    return {"re_form": "re-form"}.get(name, name.replace("_", " "))


def ledger_page(console: Console, ledger: schemas.Ledger) -> None:
    """Output of `manta ledger`: every class with any time, largest first."""
    wall = ledger.wall_seconds
    rows = [
        (class_name(name), figure(spent, 2), percent(spent / wall) if wall > 0 else "-")
        for name, spent in sorted(ledger.seconds.items(), key=lambda entry: -entry[1])
        if spent > 0
    ]
    ends = "in all" if ledger.closed else "so far"
    table(console, ("CLASS", "SECONDS", "SHARE"), [*rows, (ends, figure(wall, 2), "")], "")
    console.print(f"goodput {percent(ledger.goodput)} = compute / (wall - queue - pause)", highlight=False)


def recovery_table(console: Console, recoveries: Sequence[schemas.Recovery]) -> None:
    """The table of `manta recoveries`; phases in seconds."""
    rows = [
        (entry.generation, moment(entry.time), entry.cause, replaced(entry), f"{entry.source} {entry.resume_step}",
         "-" if entry.steps_redone is None else entry.steps_redone,
         *(figure(seconds, 2) for seconds in entry.seconds.values()), figure(entry.total_seconds, 2))
        for entry in recoveries
    ]  # fmt: skip
    headings = ("GEN", "TIME", "CAUSE", "REPLACED", "FROM", "REDONE", "DETECT", "REST", "RE-FORM", "RESTORE", "REDO",
                "TOTAL")  # fmt: skip
    table(console, headings, rows, "no recoveries", spare=("REST", "RE-FORM", "RESTORE", "DETECT", "REDO"))


def replaced(entry: schemas.Recovery) -> str:
    """Number of ranks with a new process."""
    return f"{len(entry.forked)} of {len(entry.forked) + entry.kept}"


def node_name(node: str | None) -> str:
    """A prefix of a node's id that identifies it; commands accept it."""
    return "-" if node is None else node[:12]


def node_state(node: schemas.Node) -> str:
    """State as one word."""
    if not node.alive:
        return "dead"
    if node.problem is not None:
        return "problem"
    return "draining" if node.draining else "alive"


def _places_and_slots(node: schemas.Node, places: float, slots: float) -> str:
    """A number of GPUs or slots, and the additional slots of a node with GPUs."""
    more = f" + {figure(slots, 0)} slots" if node.accelerator == "gpu" and node.slots_total else ""
    return f"{figure(places, 0)}{more}"


def node_table(console: Console, cluster: schemas.Cluster) -> None:
    """The table of `manta nodes`."""
    rows = [
        (node_name(node.id), node.address, node_state(node), node.accelerator,
         _places_and_slots(node, node.free, node.slots_free), _places_and_slots(node, node.total, node.slots_total),
         ", ".join(sorted({entry.job for entry in node.ranks})) or "-")
        for node in cluster.nodes
    ]  # fmt: skip
    table(console, ("NODE", "ADDRESS", "STATE", "SLOTS", "FREE", "TOTAL", "JOBS"), rows, "the cluster has no nodes")
    for node in cluster.nodes:
        if node.problem is not None:
            console.print(f"no ranks are placed on {node_name(node.id)}: {node.problem}", style="yellow")


def key_table(console: Console, keys: Sequence[access_schemas.ApiKey]) -> None:
    """`manta keys list`."""
    rows = [
        (
            key.id,
            key.name,
            key.user or "-",
            key.project,
            f"{key.scope}{', all projects' if key.installation else ''}"
            + ("" if key.highest_priority is None else f", priority {key.highest_priority} at most"),
            moment(key.created_at),
            "revoked" if key.revoked_at else f"until {moment(key.expires_at)}" if key.expires_at else "good",
        )
        for key in keys
    ]
    table(console, ("ID", "NAME", "USER", "PROJECT", "SCOPE", "CREATED", "STATE"), rows, "There are no keys.")


def project_table(console: Console, projects: Sequence[access_schemas.Project]) -> None:
    """`manta projects list`."""
    rows = [(project.name, moment(project.created_at)) for project in projects]
    table(console, ("NAME", "CREATED"), rows, "There are no projects.")


def audit_table(console: Console, entries: Sequence[access_schemas.AuditEntry]) -> None:
    """`manta audit`."""
    rows = [
        (
            moment(entry.time),
            entry.user or "-",
            entry.key_name,
            entry.project,
            entry.operation,
            entry.target or "-",
            entry.address or "-",
            f"{entry.status} {entry.code or ''}".strip(),
        )
        for entry in entries
    ]
    headings = ("TIME", "USER", "KEY", "PROJECT", "WHAT", "OF", "FROM", "ANSWER")
    table(console, headings, rows, "The audit log is empty.", spare=("FROM", "PROJECT"))


def table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[Any]], empty: str, spare: Sequence[str] = ()
) -> None:
    """Print `rows` under `headings`, or the sentence `empty` when there are none.

    If the terminal is too narrow, the columns `spare` are omitted one by one, which a line below reports; then cells
    are wrapped between words. Lines that still do not fit are wrapped by the terminal.
    """
    if not rows:
        console.print(empty, markup=False)
        return
    columns = [[heading, *(str(row[at]) for row in rows)] for at, heading in enumerate(headings)]
    left_out = spared(columns, spare, console.width) if console.is_terminal else []
    columns = [column for column in columns if column[0] not in left_out]
    widths = widths_of(columns, console.width)
    if _total(widths) > console.width:
        _print_lines(console, columns)
    else:
        _print_folded(console, columns, widths)
    if left_out:
        console.print(f"Columns omitted for lack of room: {', '.join(left_out)}.", style="dim", highlight=False)


def _print_folded(console: Console, columns: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for (heading, *_), width in zip(columns, widths, strict=True):
        grid.add_column(heading, overflow="fold", width=width)
    for cells in zip(*(column[1:] for column in columns), strict=True):
        grid.add_row(*map(Text, cells))
    console.print(grid)


def _print_lines(console: Console, columns: Sequence[Sequence[str]]) -> None:
    """Each row on one line, however long it is."""
    padded = [[set_cell_size(cell, max(map(cell_len, column))) for cell in column] for column in columns]
    for at, cells in enumerate(zip(*padded, strict=True)):
        console.print(Text((" " * GAP).join(cells).rstrip(), "bold" if at == 0 else ""), soft_wrap=True)


def spared(columns: Sequence[Sequence[str]], spare: Sequence[str], width: int) -> list[str]:
    """Headings of the columns that are omitted so that the table fits into `width` characters."""
    left_out: list[str] = []
    for heading in spare:
        if _total([_unbroken(column) for column in columns if column[0] not in left_out]) <= width:
            break
        left_out.append(heading)
    return left_out


def widths_of(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Width of each column (heading and cells), in characters; in total, with gaps, at most `width` unless a word would
    be broken."""
    words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    unbroken = _widened(words, [_unbroken(column) for column in columns], width)
    return _widened(unbroken, [max(map(cell_len, column)) for column in columns], width)


def _unbroken(column: Sequence[str]) -> int:
    """Minimum width of a column that keeps short cells on one line and breaks no word."""
    lengths = map(cell_len, column)
    words = (cell_len(word) for cell in column for word in cell.split())
    return max(*(length for length in lengths if length <= SHORT), *words, 0, 0)


def _total(widths: Collection[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _widened(least: Sequence[int], most: Sequence[int], width: int) -> list[int]:
    """`least`, plus the remaining room in `width`, up to `most`: first for columns that need the least."""
    widths, room = [*least], max(0, width - _total(least))
    lacking = sorted(range(len(widths)), key=lambda at: most[at] - least[at])
    for done, at in enumerate(lacking):
        more = min(most[at] - least[at], room // (len(lacking) - done))
        widths[at] += more
        room -= more
    return widths
