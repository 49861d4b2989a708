"""`manta metrics`: a job's metrics by step, once or as they come."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Annotated

import typer

from manta.api.cli import render
from manta.api.cli.main import Follow, JobId, Json, Url, app, connect, show
from manta.api.cli.progress import watch
from manta.api.client import Client, calls
from manta.api.client.retries import RetryPolicy
from manta.api.schemas import MetricSeries

FOLLOWED = ("loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu_full")
"""Metrics that are printed as they come, unless others are requested."""
POLL_SECONDS = 1.0
MAX_STEPS = 10_000


@app.command()
def metrics(
    job: JobId,
    names: Annotated[str | None, typer.Option(help="Metric names, separated by commas.")] = None,
    after_step: Annotated[int, typer.Option(min=0, help="Only steps after this one.")] = 0,
    max_points: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Maximum number of steps shown.")] = 20,
    follow: Follow = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show a job's metrics by step.

    Of more steps than --max-points, the first, the last and those with the highest losses are shown, and those with a
    validation."""
    wanted = names.split(",") if names else None
    with connect(url) as client:
        if follow:
            _follow(client, client.id_of(job), wanted or FOLLOWED, after_step, as_json)
            return
        answer = client.metrics(job, wanted, after_step, max_points)
        unknown = [] if as_json or not names else _without_value(answer)
        near = _nearest(unknown, client.metrics(job, None, after_step, 1).series) if unknown else ""
        shown = answer if as_json or wanted else _with_validations(client, job, answer, after_step, max_points)
    if not (unknown and len(unknown) == len(answer.series)):
        show(shown, as_json, lambda console: render.metric_table(console, shown, after_step))
    if not as_json and shown.steps and shown.steps[-1] - after_step > len(shown.steps):
        steps = f"{len(shown.steps)} of {shown.steps[-1] - after_step} steps are shown"
        typer.echo(f"{steps}; --max-points {MAX_STEPS} shows more", err=True)
    if unknown:
        hint = f"no value of {', '.join(unknown)}{near}: `manta metrics {job}` lists the metrics"
        typer.echo(hint, err=True)


def _without_value(points: MetricSeries) -> list[str]:
    """The requested metrics that do not exist; none before the first step."""
    return [name for name, values in points.series.items() if points.steps and all(value is None for value in values)]


def _nearest(unknown: Iterable[str], there_are: Collection[str]) -> str:
    """Suggestions for unknown names."""
    meant = [match_ for name in unknown for match_ in get_close_matches(name, set(there_are) - {name}, 2, cutoff=0.5)]
    return f" (did you mean {' or '.join(dict.fromkeys(meant))}?)" if meant else ""


def _with_validations(client: Client, job: str, points: MetricSeries, after_step: int, max_points: int) -> MetricSeries:
    """`points`, of a job's metrics, and those of the steps after which it measured a validation loss."""
    every = client.job(job).spec["train"].get("validate_every")
    if not every or not points.steps or points.steps[-1] - after_step == len(points.steps):
        return points
    others = client.send(calls.metrics(job, None, after_step, max_points, every))
    rows = {step: at for at, step in enumerate(others.steps)}
    known = {step: at for at, step in enumerate(points.steps)}
    steps = sorted(rows.keys() | known.keys())
    series = {
        name: [values[known[step]] if step in known else others.series[name][rows[step]] for step in steps]
        for name, values in points.series.items()
    }
    return points.model_copy(update={"steps": steps, "series": series})


def _follow(client: Client, job: str, names: Sequence[str], after_step: int, as_json: bool) -> None:
    """Print the metrics of each step until the job has ended."""
    if not as_json:
        typer.echo(render.metric_line("STEP", [name.upper() for name in names]))
    retries = RetryPolicy()
    for _ in watch(client, job, POLL_SECONDS, retries):
        new = retries.call(lambda: client.metrics(job, names, after_step, MAX_STEPS))  # noqa: B023 - called at once
        for at, step in enumerate(new.steps):
            row = {name: new.series[name][at] for name in names}
            texts = [render.metric_value(name, value) for name, value in row.items()]
            typer.echo(json.dumps({"step": step, **row}) if as_json else render.metric_line(step, texts))
            after_step = step
