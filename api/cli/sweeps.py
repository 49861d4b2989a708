"""Sweeps: one job for each combination of values, all checked before the first is submitted."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from api.cli import render
from api.cli.job_files import labelled
from api.cli.main import EXIT_FAILED, fail
from api.client import MantaClient
from api.schemas import DryRun
from workers.config import JobSpec
from workers.config.fields import MAX_CHARACTERS_OF_A_NAME
from workers.spec.changes import combinations_in, with_changes
from workers.spec.reading import with_absolute_paths

LABEL = "sweep"


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
        said = ", ".join(f"{path}={render.value_in_words(value)}" for path, value in values.items())
        made.append(Variant(with_absolute_paths(changed, Path.cwd()), said))
    return made


def submit_sweep(client: MantaClient, document: Any, sweeps: Sequence[str], dry_run: bool, as_json: bool) -> None:
    """Check all jobs of a sweep and, unless it is a `dry_run`, submit them; each is printed as soon as it is
    submitted."""
    sweep = secrets.token_hex(4)
    made = variants(document, sweeps, sweep)
    checked = [client.dry_run(each.document) for each in made]
    if dry_run:
        for each, answer in zip(made, checked, strict=True):
            typer.echo(_line_of(answer) if as_json else f"{_planned(answer)}  {each.values}")
        if problems := {each.data_problem for each in checked if each.data_problem is not None}:
            raise fail("\n".join(f"but jobs would fail (bad_data): {each}" for each in sorted(problems)), EXIT_FAILED)
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
