"""`manta trace`, `manta traces` and `manta budget`: single steps of a job, recorded action by action, and their time by
part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from manta.api.cli import render
from manta.api.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, JobId, Json, Url, app, connect, fail, show
from manta.api.cli.render import table
from manta.api.client import Client, calls
from manta.api.requests import TraceRequest
from manta.api.schemas import traces as trace_schemas
from manta.workers.timing.recording import MAX_STEPS

ENDINGS = (".json", ".pftrace")
_OVER = tuple(f"trace_{state}" for state in ("complete", "partial", "failed"))


@app.command()
def trace(
    job: JobId,
    step: Annotated[
        int,
        typer.Option("--step", min=0, help="First step to record; default: as soon as possible.", show_default=False),
    ] = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, max=MAX_STEPS, help="Number of steps to record.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write the trace to this file: .json, or .pftrace for Perfetto.", dir_okay=False),
    ] = None,
    profiled: Annotated[
        list[int] | None,
        typer.Option(
            "--profile-rank",
            min=0,
            help="Also record this rank with torch's profiler; written next to the output as .json.gz.",
        ),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Record a job's next steps on all of its ranks, wait for them, and show their time by part."""
    if output is not None and output.suffix not in ENDINGS:
        raise fail(f"{output}: a trace file must end in {' or '.join(ENDINGS)}", EXIT_BAD_INPUT)
    if output is not None and not output.parent.is_dir():
        raise fail(f"cannot write {output}: there is no folder {output.parent}", EXIT_BAD_INPUT)
    if profiled and output is None:
        raise fail("--profile-rank needs --output: the profile is written next to it", EXIT_BAD_INPUT)
    with connect(url) as client:
        asked = client.send(
            calls.request_trace(job, TraceRequest(steps=steps, step=step, profiler_ranks=profiled or []))
        )
        try:
            _wait(client, asked)
        except KeyboardInterrupt as error:
            hint = f"{asked.id} of {job} is still being recorded; `manta traces {job}` shows it"
            raise fail(hint, EXIT_INTERRUPTED) from error
        made = client.send(calls.trace(asked.job_id, asked.id))
        if output is not None and made.ranks:
            _write(output, client, made)
            for rank in made.profiles:
                profile = output.with_suffix(f".rank-{rank}.json.gz")
                _write_bytes(profile, client.download(calls.profile(made.job_id, made.id, rank)))
    if made.state == "failed":
        raise fail(f"{made.id} has failed: {made.message}", EXIT_FAILED)
    show(made, as_json, lambda console: _page(console, made, output))


def _wait(client: Client, asked: trace_schemas.Trace) -> None:
    """Return when the trace is final."""
    for event in client.follow_events(asked.job_id):
        if event.type in _OVER and event.data.get("trace") == asked.id:
            return


def _write(file: Path, client: Client, made: trace_schemas.TraceDocument) -> None:
    if file.suffix == ".json":
        _write_bytes(file, json.dumps(made.model_dump(mode="json")).encode())
    else:
        _write_bytes(file, client.download(calls.trace_for_perfetto(made.job_id, made.id)))


def _write_bytes(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise fail(f"cannot write {file}: {error.strerror or error}", EXIT_BAD_INPUT) from error


def _page(console: Console, made: trace_schemas.TraceDocument, output: Path | None) -> None:
    steps = [step.step for step in made.ranks[0].steps] if made.ranks else []
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    slices = sum(len(rank.slices) for rank in made.ranks)
    about = f"{made.id} is {made.state}: {which} of {render.counted(len(made.ranks), 'rank')}, {slices} slices"
    console.print(about + (f"; {made.message}" if made.message else ""), highlight=False)
    if made.bubble is not None and made.bubble.mean is not None:
        console.print(f"bubble {made.bubble.mean:.1%}, mean over the ranks", highlight=False)
    if made.clock.error_seconds:
        console.print(f"clock error between nodes at most {made.clock.error_seconds:.2g} s", highlight=False)
    if made.budget is not None:
        _budget_table(console, made.budget)
    if output is not None:
        console.print(f"written to {output}", highlight=False)


def _budget_table(console: Console, known: trace_schemas.StepBudget) -> None:
    if not known.divided:
        text = "no parts measured; run manta trace to see where the time goes"
        console.print(f"a step takes {known.step_seconds:.4g} s; {text}", highlight=False)
        return
    planned = {part.name: part for part in known.planned or ()}
    rows = [
        (
            part.label or part.name,
            f"{part.fraction:.1%}",
            _time(part.seconds),
            _time(planned[part.name].seconds) if part.name in planned else "-",
            part.help.replace("`", "") or "-",
        )
        for part in sorted(known.parts, key=lambda part: -part.seconds)
    ]
    source = "the steps timed in parts" if known.measured_from == "phases" else known.measured_from
    console.print(f"Time of a step of {known.step_seconds:.4g} s, from {source}:", highlight=False)
    table(console, ("PART", "SHARE", "MEASURED", "PLANNED", "WHAT REDUCES IT"), rows, "")


def _time(seconds: float) -> str:
    """Seconds to the tenth of a millisecond, or 0 s."""
    return f"{seconds:.4f} s" if abs(seconds) >= 0.00005 else "0 s"


@app.command()
def traces(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """List a job's traces, newest first."""
    with connect(url) as client:
        page = client.send(calls.traces(job))
    rows = [
        (
            item.id,
            item.state,
            "-" if item.first_step is None else item.first_step,
            item.steps,
            "-" if item.bubble is None or item.bubble.mean is None else f"{item.bubble.mean:.1%}",
            render.moment(item.requested_at),
            item.message or "",
        )
        for item in page.items
    ]
    heads = ("TRACE", "STATE", "FIRST STEP", "STEPS", "BUBBLE", "REQUESTED", "WHY")
    show(page, as_json, lambda console: table(console, heads, rows, "no traces; record one with `manta trace JOB`"))


@app.command()
def budget(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Show the time of a job's steps by part, starting from the device's peak, next to the plan."""
    with connect(url) as client:
        answer = client.send(calls.budget(job))
    show(answer, as_json, lambda console: _budget_table(console, answer))
