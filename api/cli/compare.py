"""`manta compare`: the differences between jobs, and their losses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from manta.api.cli import render
from manta.api.cli.jobs import Filters
from manta.api.cli.main import EXIT_BAD_INPUT, Json, Url, app, connect, console, fail
from manta.api.cli.render import table
from manta.api.schemas import Items, Job
from manta.workers.protocol.json_codec import spell

MAX_JOBS = 1000
"""Maximum number of jobs with a label: the length of a page of the list."""
FIGURES = ("loss", "validation_loss", "tokens_per_second")
_ABSENT = object()


@app.command()
def compare(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids, or unique job names.")] = None,
    label: Filters = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Compare jobs, given by name or label: the differences of their specs, lowest loss first.

    The validation loss is used if all jobs that have a loss have one."""
    if bool(jobs) == bool(label):
        raise fail("give the jobs: JOB JOB ..., or --label KEY=VALUE", EXIT_BAD_INPUT)
    with connect(url) as client:
        page = (
            client.jobs(labels=label, limit=MAX_JOBS) if label else Items(items=[client.job(job) for job in jobs or ()])
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
    table(console(), heads, [_cells(*each) for each in zip(known, differences, strict=True)], "no job matches")


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


def _row(job: Job, differences: dict[str, Any]) -> dict[str, Any]:
    about = {"id": job.id, "name": job.name, "state": job.state, "step": job.step, "steps": job.steps}
    return {**about, **{name: job.metrics.latest.get(name) for name in FIGURES}, "differences": differences}


def _cells(job: Job, differences: dict[str, Any]) -> tuple[Any, ...]:
    loss, validation, speed = (job.metrics.latest.get(name) for name in FIGURES)
    figures = (render.figure(loss, 4), render.figure(validation, 4), render.figure(speed, 0))
    shown = (render.format_value(difference) for difference in differences.values())
    return (job.id, job.name, job.state, f"{job.step}/{job.steps}", *figures, *shown)
