"""`manta submit`: submits a job from a file, optionally with overridden values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.cli import render
from api.cli.job_files import Changes, labelled, read_file
from api.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, Json, Url, connect, console, fail, show
from api.cli.progress import follow as follow_progress
from api.cli.sweeps import submit_sweep
from api.client import MantaClient
from api.schemas import Job
from service.states import JobState

Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label of the job; may be repeated.")
]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(submit)


def submit(
    file: Annotated[
        Path, typer.Argument(help="YAML file with a JobSpec; -: standard input.", dir_okay=False, allow_dash=True)
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the job is final.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check the spec and show its layout.")] = False,
    changes: Changes = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE",
            help="Submit a job for each of these values, named NAME-1, NAME-2 ...; repeated: for each combination.",
        ),
    ] = None,
    label: Labels = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Submit a training job."""
    if follow and sweep:
        raise fail(
            "--follow works for one job only: submit the sweep without it, then use `manta compare`", EXIT_BAD_INPUT
        )
    document = labelled(read_file(file, changes or ()), label or ())
    with connect(url) as client:
        if sweep:
            submit_sweep(client, document, sweep, dry_run, as_json)
            return
        if dry_run:
            checked = client.dry_run(document)
            show(checked, as_json, lambda console: render.layout_page(console, checked))
            if checked.data_problem is not None:
                raise fail(f"but the job would fail (bad_data): {checked.data_problem}", EXIT_FAILED)
            return
        job = client.submit(document)
        if follow:
            _follow(client, job, as_json)
        else:
            show(job, as_json, lambda console: console.print(job.id, highlight=False))


def _follow(client: MantaClient, job: Job, as_json: bool) -> None:
    # With --json only the final job is printed to standard output.
    out = Console(stderr=True, markup=False) if as_json else console()
    out.print(f"submitted {job.id}", highlight=False)
    try:
        job = follow_progress(client, job.id, out)
    except KeyboardInterrupt as error:
        hint = f"{job.id} continues to run; `manta status {job.id}` shows it, `manta cancel {job.id}` stops it"
        raise fail(hint, EXIT_INTERRUPTED) from error
    if as_json:
        typer.echo(render.as_json(job))
    if job.state != JobState.SUCCEEDED:
        raise fail(f"{job.id} is {job.state}: {job.message or job.reason or 'no reason given'}", EXIT_FAILED)
