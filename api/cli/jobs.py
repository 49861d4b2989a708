"""`manta ps`, `edit`, `ranks`, `waits`, `stack`: listing and editing jobs; placement and state of a job's ranks, and
which ranks wait for which."""

from __future__ import annotations

from typing import Annotated

import typer

from manta.api.cli import render
from manta.api.cli.main import EXIT_BAD_INPUT, JobId, Json, Url, app, connect, fail, show, show_page
from manta.api.client import calls
from manta.api.schemas import Direction, JobSort
from manta.service.states import STATE_NAMES

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
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with connect(url) as client:
        page = client.jobs(
            state.upper() if state else None,
            name,
            limit,
            search=search,
            labels=label,
            owner=owner,
            sort=sort,
            order=order,
        )
    filtered = bool(label) or any(each is not None for each in (state, name, search, owner))
    show_page(page, as_json, lambda console: render.job_list(console, page.items, filtered))


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
