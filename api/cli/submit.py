"""`manta submit`, `wait`: submits a job from a file, optionally with overridden values, or a sweep: one job for each
combination of values, all checked before the first is submitted."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    Failed,
    Json,
    Url,
    app,
    connect,
    console,
    fail,
    problems_in,
    show,
)
from manta.api.cli.progress import follow as follow_progress
from manta.api.client import ApiError, Client
from manta.api.schemas import DryRun, Items, Job, SubmittedJob
from manta.api.security.permissions import DASHBOARD_PATH
from manta.service.states import JobState
from manta.workers.config import JobSpec
from manta.workers.config.fields import LABEL_VALUE, MAX_CHARACTERS_OF_A_NAME
from manta.workers.spec.changes import changes_in, combinations_in, with_changes
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import MAX_BYTES, document_of, read_document, with_absolute_paths
from manta.workers.spec.yaml import line_at
from manta.workers.system.regular_files import read_regular

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, such as train.steps=100; may be repeated."),
]
Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label of the job; may be repeated.")
]
LABEL = "sweep"
START_SECONDS = 1.0
"""How long the answer waits for a job to leave the queue, so that it says whether the job starts, or why it waits."""


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
        advice = "; use - for standard input" if file.is_fifo() else ""
        raise fail(f"cannot read {file}: {error.strerror or error}{advice}", EXIT_BAD_INPUT) from error
    return with_absolute_paths(with_changes(document, changes_in(changes)), Path.cwd())


@contextlib.contextmanager
def naming_lines(file: Path, given: Iterable[str] = ()) -> Iterator[None]:
    """Problems of the spec that the block finds are printed with their lines in `file`, except for those of standard
    input, and of the keys `given` on the command line (each KEY=VALUE)."""
    try:
        yield
    except (ApiError, SpecError) as error:
        problems, text = problems_in(error), ""
        with contextlib.suppress(OSError, UnicodeDecodeError):  # it may have been a pipe
            text = read_regular(file, MAX_BYTES).decode()
        if not problems or not text:
            raise
        others = {each.partition("=")[0] for each in given}
        lines = [None if each.path in others else line_at(text, each.path) for each in problems]
        known = sorted(zip(lines, problems, strict=True), key=lambda each: each[0] or 0)
        sentences = [each.sentence if line is None else f"{file}:{line}: {each.sentence}" for line, each in known]
        problem = error.problem.model_dump(mode="json") if isinstance(error, ApiError) else None
        raise Failed("\n".join(sentences), EXIT_BAD_INPUT, problem) from error


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
    name: Annotated[str | None, typer.Option("--name", help="Name of the job, instead of the file's.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the job has ended.")] = False,
    wait_: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended, as `manta wait` does.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check the spec and show its layout.")] = False,
    changes: Changes = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE",
            help="Submit a job for each of these values, named NAME-1, NAME-2 ..., with the value as a label; "
            "repeated: for each combination.",
        ),
    ] = None,
    label: Labels = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print only the job's id (the default if the output is not a terminal)."),
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Submit a training job."""
    if follow and sweep:
        raise fail(
            "--follow works for one job only: submit the sweep without it, then use `manta compare`", EXIT_BAD_INPUT
        )
    document = labelled(read_file(file, changes or ()), label or ())
    document = with_changes(document, {} if name is None else {"name": name})
    with connect(url) as client, naming_lines(file, [*(changes or ()), *(sweep or ()), *(["name"] if name else [])]):
        if sweep:
            jobs = submit_sweep(client, document, sweep, dry_run, as_json)
        elif dry_run:
            _check(client, document, as_json)
            return
        else:
            job = client.submit(document)
            if follow:
                _follow(client, job, as_json)
                return
            if not (as_json and wait_):
                show(job, as_json, lambda console: _say(console, client, job, quiet))
            jobs = [job]
        if wait_:
            _wait_for(client, jobs, as_json)


def _check(client: Client, document: Any, as_json: bool) -> None:
    checked = client.dry_run(document)
    show(checked, as_json, lambda console: render.layout_page(console, checked))
    if checked.lacks_slots:
        raise typer.Exit(EXIT_BAD_INPUT)
    if checked.data_problem is not None:
        raise fail(f"the job would fail: {checked.data_problem}", EXIT_FAILED)


def _say(console: Console, client: Client, job: SubmittedJob, quiet: bool) -> None:
    if quiet or not console.is_terminal:
        typer.echo(job.id)
        for note in () if quiet else job.notes:
            typer.echo(note, err=True)
        return
    started = client.job(job.id, START_SECONDS, JobState.QUEUED)
    render.submitted_page(console, started, f"{client.url}{DASHBOARD_PATH}/jobs/{job.id}", job.notes)


@app.command()
def wait(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB", help="Job ids, or unique job names.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Wait until jobs have ended; exit code 1 unless all of them succeeded."""
    with connect(url) as client:
        _wait_for(client, [client.job(job) for job in jobs], as_json)


def _wait_for(client: Client, jobs: Sequence[Job], as_json: bool) -> None:
    try:
        ended = [client.wait(job.id) for job in jobs]
    except KeyboardInterrupt as error:
        hint = f"{', '.join(job.id for job in jobs)}: continued by the service; `manta ps` shows jobs"
        raise fail(hint, EXIT_INTERRUPTED) from error
    if as_json:
        typer.echo(render.as_json(ended[0] if len(ended) == 1 else Items(items=ended)))
    unsuccessful = [job for job in ended if job.state != JobState.SUCCEEDED]
    for job in ended:
        if job not in unsuccessful and not as_json:
            typer.echo(f"{job.id} ({job.name}) is {job.state}")
    if unsuccessful:
        raise fail("\n".join(map(_how_it_ended, unsuccessful)), EXIT_FAILED)


def _how_it_ended(job: Job) -> str:
    return f"{job.id} ({job.name}) is {job.state}: {job.message or job.reason or 'no reason given'}"


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
        raise fail(_how_it_ended(job), EXIT_FAILED)


@dataclass(frozen=True)
class Variant:
    """One job of a sweep."""

    document: Any
    """JobSpec of the job."""
    values: str
    """The values of this job, for users."""


def variants(document: Any, sweeps: Sequence[str], sweep: str) -> list[Variant]:
    """A job for each combination of values, named NAME-1, NAME-2 and so on unless names are swept, with the label
    sweep=`sweep` and one for each value that can be a label. Raises SpecError."""
    named = document.get("name") if isinstance(document, dict) else None
    name = named if isinstance(named, str) else JobSpec.model_fields["name"].default
    made = []
    for number, values in enumerate(combinations_in(sweeps), start=1):
        tail = f"-{number}"
        changes = {"name": name[: MAX_CHARACTERS_OF_A_NAME - len(tail)] + tail, **values}
        changed = labelled(with_changes(document, changes), [*_labels_of(values), f"{LABEL}={sweep}"])
        said = ", ".join(f"{path}={render.format_value(value)}" for path, value in values.items())
        made.append(Variant(with_absolute_paths(changed, Path.cwd()), said))
    return made


def _labels_of(values: Mapping[str, Any]) -> list[str]:
    """Labels for the values of a job of a sweep, by the last part of their paths where that is unambiguous."""
    last = Counter(path.rpartition(".")[2] for path in values)
    labels = []
    for path, value in values.items():
        key = path.rpartition(".")[2]
        if re.fullmatch(LABEL_VALUE, text := render.format_value(value)):
            labels.append(f"{key if last[key] == 1 and key != LABEL else path}={text}")
    return labels


def submit_sweep(client: Client, document: Any, sweeps: Sequence[str], dry_run: bool, as_json: bool) -> list[Job]:
    """Check all jobs of a sweep and, unless it is a `dry_run`, submit them; each is printed as soon as it is
    submitted. Returns those submitted."""
    sweep = secrets.token_hex(4)
    made = variants(document, sweeps, sweep)
    checked = [client.dry_run(each.document) for each in made]
    if dry_run:
        for each, answer in zip(made, checked, strict=True):
            typer.echo(_line_of(answer) if as_json else f"{_planned(answer)}  {each.values}")
        if any(each.lacks_slots for each in checked):
            raise typer.Exit(EXIT_BAD_INPUT)
        if problems := {each.data_problem for each in checked if each.data_problem is not None}:
            raise fail("\n".join(f"jobs would fail: {problem}" for problem in sorted(problems)), EXIT_FAILED)
        return []
    jobs: list[Job] = []
    for each in made:
        jobs.append(job := client.submit(each.document))
        typer.echo(_line_of(job) if as_json else f"{job.id}  {job.name}  {each.values}")
    if not as_json:
        typer.echo(f"`manta compare --label {LABEL}={sweep}` compares them", err=True)
    return jobs


def _line_of(answer: BaseModel) -> str:
    return json.dumps(answer.model_dump(mode="json"))


def _planned(checked: DryRun) -> str:
    layout = render.layout_name(checked.layout.parallel)
    time = f"{checked.plan.step_seconds:.4g} s per step" if checked.plan is not None else checked.plan_note
    return f"{checked.spec['name']}  {layout}  {time}"
