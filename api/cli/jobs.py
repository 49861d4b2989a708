"""`manta ps`, `edit`, `compare`, `ranks`, `waits`, `stack`: listing, editing and comparing jobs; placement and state of
a job's ranks, and which ranks wait for which."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from manta.api.cli import render
from manta.api.cli.main import EXIT_BAD_INPUT, JobId, Json, Url, app, connect, console, fail, show, show_page
from manta.api.client import calls
from manta.api.client.calls import JobListOptions
from manta.api.client.retries import RetryPolicy
from manta.api.schemas import Direction, Items, Job, JobSort
from manta.service.states import STATE_NAMES
from manta.workers.protocol.json_codec import spell

MAX_COMPARED = 1000
"""Maximum number of jobs with a label: the length of a page of the list."""
WATCH_SECONDS = 2.0
_ABSENT = object()

Filters = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY[=VALUE]", help="Only jobs with this label; repeated: with all of them."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="KEY=VALUE sets a label, KEY- removes it; may be repeated."),
]
Rank = Annotated[int, typer.Argument(metavar="RANK", min=0, help="Global rank.")]


@app.command("ps")
def list_jobs(
    state: Annotated[
        str | None, typer.Option(help=f"Only jobs in these states, separated by commas: {', '.join(STATE_NAMES)}.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs with this name.")] = None,
    search: Annotated[str | None, typer.Option(help="Only jobs whose name or id contains this.")] = None,
    label: Filters = None,
    owner: Annotated[str | None, typer.Option(help="Only jobs of this user, or submitted with this key.")] = None,
    sort: Annotated[JobSort | None, typer.Option(help="Sort key; default: created.")] = None,
    order: Annotated[Direction | None, typer.Option(help="Default: desc, highest first.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of jobs shown.")] = 50,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the list again every two seconds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only ids, one on each line.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    if watch and (quiet or as_json):
        raise fail("--watch is for users: leave out --quiet and --json", EXIT_BAD_INPUT)
    more = JobListOptions(search=search, labels=label, owner=owner, sort=sort, order=order)
    filtered = bool(label) or any(each is not None for each in (state, name, search, owner))
    with connect(url) as client:

        def read() -> Items[Job]:
            return client.jobs(state.upper() if state else None, name, limit, **more)

        page = read()
        if quiet:
            typer.echo("".join(f"{job.id}\n" for job in page.items), nl=False)
            return
        show_page(page, as_json, lambda console: render.job_list(console, page.items, filtered))
        if watch:
            _watch(read, filtered)


def _watch(read: Callable[[], Items[Job]], filtered: bool) -> None:
    """Show the list of `read` again and again, until the user interrupts it."""
    out, retries = console(), RetryPolicy()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(WATCH_SECONDS)
            page = retries.call(read)
            out.clear()
            render.job_list(out, page.items, filtered)


@app.command()
def edit(
    job: JobId,
    name: Annotated[str | None, typer.Option("--name", help="New name.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="Among queued jobs, higher priorities start first.")
    ] = None,
    label: Changes = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Change a job's name, priority or labels."""
    if name is None and priority is None and not label:
        raise fail("nothing to change; use --name, --priority, --label", EXIT_BAD_INPUT)
    labels = dict(map(_change, label)) if label else None
    with connect(url) as client:
        answer = client.edit(job, name, priority, labels=labels)
    show(answer, as_json, lambda console: render.edited(console, answer))


def _change(text: str) -> tuple[str, str | None]:
    """A label and its new value."""
    key, equals, value = text.partition("=")
    if equals:
        return key, value
    if not text.endswith("-"):
        raise fail(
            f"give a value for label {text!r}: --label {text}=VALUE, or --label {text}- to remove it", EXIT_BAD_INPUT
        )
    return text[:-1], None


@app.command()
def ranks(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Show the placement and state of a job's ranks."""
    with connect(url) as client:
        page = client.ranks(job)
    show(page, as_json, lambda console: render.rank_table(console, page.items))


@app.command()
def waits(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Show which ranks of a running job wait for which."""
    with connect(url) as client:
        answer = client.send(calls.waits(job))
    show(answer, as_json, lambda console: render.waits_page(console, answer))


@app.command()
def stack(job: JobId, rank: Rank, url: Url = None, as_json: Json = False) -> None:
    """Show the current stacks of all threads of a rank's trainer."""
    with connect(url) as client:
        answer = client.send(calls.rank_stack(job, rank))
    show(answer, as_json, lambda console: console.print(answer.text, markup=False, highlight=False, soft_wrap=True))


@app.command()
def compare(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Job ids, or unique job names.")] = None,
    label: Filters = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Compare jobs, given by name or label: the differences of their specs, lowest loss first.

    The validation loss is used if all jobs that have a loss have one."""
    if bool(jobs) == bool(label):
        raise fail("name the jobs to compare, or use --label KEY=VALUE", EXIT_BAD_INPUT)
    with connect(url) as client:
        page = (
            client.jobs(labels=label, limit=MAX_COMPARED)
            if label
            else Items(items=[client.job(job) for job in jobs or ()])
        )
    if page.next_cursor is not None:
        typer.echo(f"Only the newest {len(page.items)} jobs with that label are compared.", err=True)
    known = best_first(page.items)
    differences = differing([job.spec for job in known])
    if as_json:
        rows = [_row(job, each) for job, each in zip(known, differences, strict=True)]
        typer.echo(json.dumps(spell({"items": rows}), indent=2))
        return
    paths = list(differences[0]) if differences else []
    heads = ("JOB", "NAME", "STATE", "STEP", "LOSS", "VALIDATION", "TOKENS/S", *paths)
    render.table(console(), heads, [_cells(*each) for each in zip(known, differences, strict=True)], "no job matches")


def best_first(jobs: Iterable[Job]) -> list[Job]:
    """Sorted by validation loss if all jobs that have a loss have one, otherwise by loss; jobs without a loss last."""
    known = list(jobs)
    latest = [job.metrics.latest for job in known]
    measure = "validation_loss"
    if any(each.get("loss") is not None and each.get(measure) is None for each in latest):
        measure = "loss"

    def key(job: Job) -> float:
        value = job.metrics.latest.get(measure)
        return math.inf if value is None or math.isnan(value) else value

    return sorted(known, key=key)


def differing(specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each spec, its values at the dotted paths where the specs differ, except for names; None if it has no
    value."""
    flat = [dict(_values(spec, "")) for spec in specs]
    paths = {path: None for each in flat for path in each if path != "name"}  # in the order of the specs
    different = [path for path in paths if any(each.get(path, _ABSENT) != flat[0].get(path, _ABSENT) for each in flat)]
    return [{path: each.get(path) for path in different} for each in flat]


def _values(section: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _figures(job: Job) -> dict[str, float | None]:
    speed = "tokens_per_second"
    return {
        **{name: job.metrics.latest.get(name) for name in ("loss", "validation_loss")},
        speed: job.metrics.mean.get(speed),
    }


def _row(job: Job, differences: dict[str, Any]) -> dict[str, Any]:
    about = {"id": job.id, "name": job.name, "state": job.state, "step": job.step, "steps": job.steps}
    return {**about, **_figures(job), "differences": differences}


def _cells(job: Job, differences: dict[str, Any]) -> tuple[Any, ...]:
    loss, validation, speed = _figures(job).values()
    figures = (render.figure(loss, 4), render.figure(validation, 4), render.figure(speed, 0))
    shown = (render.format_value(difference) for difference in differences.values())
    return (job.id, job.name, job.state, f"{job.step}/{job.steps}", *figures, *shown)
