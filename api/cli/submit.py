"""`manta submit`: submits a job from a file, optionally with overridden values, or a sweep: one job for each
combination of values, all checked before the first is submitted."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from manta.api.cli import render
from manta.api.cli.main import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Json,
    Url,
    app,
    connect,
    console,
    fail,
    show,
)
from manta.api.cli.progress import follow as follow_progress
from manta.api.client import Client
from manta.api.schemas import DryRun, Job
from manta.service.states import JobState
from manta.workers.config import JobSpec
from manta.workers.config.fields import MAX_CHARACTERS_OF_A_NAME
from manta.workers.spec.changes import changes_in, combinations_in, with_changes
from manta.workers.spec.reading import MAX_BYTES, document_of, read_document, with_absolute_paths

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, such as train.steps=100; may be repeated."),
]
Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label of the job; may be repeated.")
]
LABEL = "sweep"


def read_file(file: Path, changes: Sequence[str] = ()) -> Any:
    """The document in `file`, or in standard input for -, with `changes` (each KEY=VALUE). Relative paths are resolved
    against the file's folder, or the current one for standard input. Raises SpecError."""
    try:
        if file == Path("-"):
            if sys.stdin is None:
                raise fail(
                    "standard input is closed: name a file, or pass the job's document on standard input",
                    EXIT_BAD_INPUT,
                )
            content = typer.get_binary_stream("stdin").read(MAX_BYTES + 1)
            document = document_of(content, "standard input", Path.cwd())
        else:
            document = read_document(file)
    except OSError as error:
        advice = "; give - to read what another command writes" if file.is_fifo() else ""
        raise fail(f"cannot read {file}: {error.strerror or error}{advice}", EXIT_BAD_INPUT) from error
    return with_absolute_paths(with_changes(document, changes_in(changes)), Path.cwd())


def labelled(document: Any, given: Sequence[str]) -> Any:
    """A JobSpec's document with additional labels, each KEY=VALUE."""
    pairs = [text.partition("=") for text in given]
    if not all(equals for _, equals, _ in pairs):
        raise fail("give labels as --label KEY=VALUE", EXIT_BAD_INPUT)
    labels = (document.get("labels") or {}) if isinstance(document, dict) else None
    if not pairs or not isinstance(labels, dict):  # the service reports the problem
        return document
    return {**document, "labels": {**labels, **{key: value for key, _, value in pairs}}}


@app.command()
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
                raise fail(f"the job would fail (bad_data): {checked.data_problem}", EXIT_FAILED)
            return
        job = client.submit(document)
        if follow:
            _follow(client, job, as_json)
        else:
            show(job, as_json, lambda console: console.print(job.id, highlight=False))


def _follow(client: Client, job: Job, as_json: bool) -> None:
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


@dataclass(frozen=True)
class Variant:
    """One job of a sweep."""

    document: Any
    """JobSpec of the job."""
    values: str
    """The values of this job, for users."""


def variants(document: Any, sweeps: Sequence[str], sweep: str) -> list[Variant]:
    """A job for each combination of values, named NAME-1, NAME-2 and so on unless names are swept, with the label
    sweep=`sweep`. Raises SpecError."""
    named = document.get("name") if isinstance(document, dict) else None
    name = named if isinstance(named, str) else JobSpec.model_fields["name"].default
    made = []
    for number, values in enumerate(combinations_in(sweeps), start=1):
        tail = f"-{number}"
        changes = {"name": name[: MAX_CHARACTERS_OF_A_NAME - len(tail)] + tail, **values}
        changed = labelled(with_changes(document, changes), [f"{LABEL}={sweep}"])
        said = ", ".join(f"{path}={render.format_value(value)}" for path, value in values.items())
        made.append(Variant(with_absolute_paths(changed, Path.cwd()), said))
    return made


def submit_sweep(client: Client, document: Any, sweeps: Sequence[str], dry_run: bool, as_json: bool) -> None:
    """Check all jobs of a sweep and, unless it is a `dry_run`, submit them; each is printed as soon as it is
    submitted."""
    sweep = secrets.token_hex(4)
    made = variants(document, sweeps, sweep)
    checked = [client.dry_run(each.document) for each in made]
    if dry_run:
        for each, answer in zip(made, checked, strict=True):
            typer.echo(_line_of(answer) if as_json else f"{_planned(answer)}  {each.values}")
        if problems := {each.data_problem for each in checked if each.data_problem is not None}:
            raise fail(
                "\n".join(f"but jobs would fail (bad_data): {problem}" for problem in sorted(problems)), EXIT_FAILED
            )
        return
    for each in made:
        job = client.submit(each.document)
        typer.echo(_line_of(job) if as_json else f"{job.id}  {job.name}  {each.values}")
    if not as_json:
        typer.echo(f"`manta compare --label {LABEL}={sweep}` compares them", err=True)


def _line_of(answer: BaseModel) -> str:
    return json.dumps(answer.model_dump(mode="json"))


def _planned(checked: DryRun) -> str:
    layout = render.layout_name(checked.layout.parallel)
    time = f"{checked.plan.step_seconds:.4g} s per step" if checked.plan is not None else "not planned"
    return f"{checked.spec['name']}  {layout}  {time}"
