"""`manta logs` and `manta events`: a job's output and its events, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from manta.api.cli import render
from manta.api.cli.main import (
    EXIT_BAD_INPUT,
    PAGE,
    Follow,
    JobId,
    Json,
    RankNumber,
    Url,
    app,
    connect,
    fail,
    show_lines,
    to_the_last,
)
from manta.api.client import Client
from manta.api.client.calls import EventOptions, LogOptions
from manta.api.schemas import Event, JobEvent

TAIL = 200


@app.command()
def logs(
    job: JobId,
    rank: RankNumber = None,
    follow: Follow = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=1, max=10_000, help=f"How many of the newest lines; default: {TAIL}.")
    ] = None,
    all_lines: Annotated[bool, typer.Option("--all", help="All lines, from the first one.")] = False,
    stream: Annotated[str | None, typer.Option("--stream", help="Only lines of stdout, stderr or agent.")] = None,
    search: Annotated[str | None, typer.Option("--search", help="Only lines that contain this, ignoring case.")] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Only lines with a match of this regular expression.")
    ] = None,
    level: Annotated[
        str | None, typer.Option("--level", help="Only lines of at least this level: debug ... critical.")
    ] = None,
    notices: Annotated[
        bool, typer.Option("--notices", help="Also what PyTorch and Ray print about their sockets and themselves.")
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print the newest output of a job's ranks."""
    if all_lines and tail is not None:
        raise fail("--all and --tail cannot be used together", EXIT_BAD_INPUT)
    wanted = LogOptions(stream=stream, search=search, regex=regex, level=level and level.lower())
    if not all_lines:
        wanted["tail"] = tail or TAIL
    if not notices:
        wanted["notices"] = False
    with connect(url) as client:
        if follow:
            lines = client.follow_logs(job, rank, **wanted)
        elif all_lines:
            job_id = client.id_of(job)
            lines = to_the_last(lambda cursor: client.logs(job_id, rank, cursor, **wanted))
        else:
            page = client.logs(job, rank, **wanted)
            lines = iter(page.items)
            if page.earlier and not as_json:
                typer.echo("earlier lines are left out (--all prints them)", err=True)
        narrowed = rank is not None or any(value is not None for value in (stream, search, regex, level))
        show_lines(lines, as_json, render.log_line, _none_of("line", narrowed))


@app.command()
def events(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Job id or name; default: all jobs.")] = None,
    type: Annotated[str | None, typer.Option("--type", help="Only events of this type, such as recovered.")] = None,
    rank: RankNumber = None,
    generation: Annotated[int | None, typer.Option(min=0, help="Only events of this generation.")] = None,
    follow: Follow = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print the events of a job, or of all jobs."""
    if job is None and (rank is not None or generation is not None):
        raise fail("give a job: ranks and generations belong to a job", EXIT_BAD_INPUT)
    with connect(url) as client:
        if job is None:
            everywhere = client.follow_all_events(type=type) if follow else _events_of_all(client, type)
            show_lines(everywhere, as_json, render.job_event_line, _none_of("event", type is not None))
            return
        wanted = EventOptions(type=type, rank=rank, generation=generation)
        answer = client.follow_events(job, **wanted) if follow else _events_of(client, job, wanted)
        narrowed = any(value is not None for value in wanted.values())
        show_lines(answer, as_json, render.event_line, _none_of("event", narrowed))


def _none_of(what: str, narrowed: bool) -> str:
    """The sentence for an empty list; `narrowed`: whether there are filters."""
    return f"no {what} matches" if narrowed else f"no {what}s yet"


def _events_of(client: Client, job: str, wanted: EventOptions) -> Iterator[Event]:
    job_id = client.id_of(job)
    return to_the_last(lambda cursor: client.events(job_id, cursor, **wanted))


def _events_of_all(client: Client, type: str | None) -> Iterator[JobEvent]:
    return to_the_last(lambda cursor: client.all_events(None, type, cursor, limit=PAGE))
