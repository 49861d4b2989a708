"""`manta ranks`, `manta waits` and `manta stack`: placement and state of a job's ranks, and which ranks wait for
which."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli import render
from api.cli.main import JobId, Json, Url, connect, show
from api.client import calls

Rank = Annotated[int, typer.Argument(metavar="RANK", min=0, help="Global rank.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(ranks)
    app.command()(waits)
    app.command()(stack)


def ranks(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Show the placement and state of a job's ranks."""
    with connect(url) as client:
        page = client.ranks(job)
    show(page, as_json, lambda console: render.rank_table(console, page.items))


def waits(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Show which ranks of a running job wait for which."""
    with connect(url) as client:
        answer = client.send(calls.waits(job))
    show(answer, as_json, lambda console: render.waits_page(console, answer))


def stack(job: JobId, rank: Rank, url: Url = None, as_json: Json = False) -> None:
    """Show the current stacks of all threads of a rank's trainer."""
    with connect(url) as client:
        answer = client.send(calls.rank_stack(job, rank))
    show(answer, as_json, lambda console: console.print(answer.text, markup=False, highlight=False, soft_wrap=True))
