"""`manta plan`: finds the best layouts of a job, or estimates the time and memory of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from manta.api import schemas
from manta.api.cli import render
from manta.api.cli.main import EXIT_BAD_INPUT, Json, Url, app, connect, fail, show
from manta.api.cli.render import table
from manta.api.cli.submit import Changes, naming_lines, read_file
from manta.api.client.plan import plan as plan_here
from manta.service.planner.pictures import picture
from manta.service.planner.stage_shares import format_counts
from manta.workers.accounting.activation_bytes import IMBALANCE


@app.command()
def plan(
    file: Annotated[
        Path,
        typer.Argument(
            help="YAML file with model, train, cluster, and parallel (a layout, or auto); a JobSpec also works. -: "
            "standard input.",
            dir_okay=False,
            allow_dash=True,
        ),
    ],
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Explain the best plan: its time by part, and the effects of single changes."),
    ] = False,
    picture_file: Annotated[
        Path | None,
        typer.Option(
            "--picture", help="Draw the best plan's pipeline, step and memory to this SVG file.", dir_okay=False
        ),
    ] = None,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Also find the best layout for every smaller number of GPUs.")
    ] = False,
    changes: Changes = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Find the best layouts of a job, or estimate the time and memory of its layout, before it runs.

    For a cluster described in the file no service is needed; otherwise the service plans for its own cluster."""
    document = read_file(file, changes or ())
    if isinstance(document, dict) and (explain or picture_file is not None):
        document = {**document, "explain": True}
    if isinstance(document, dict) and sizes:
        document = {**document, "sizes": True}
    with naming_lines(file, changes or ()):
        answer = _answer(document, url)
    if picture_file is not None and answer.explanation is not None:
        best = answer.plans[0]
        title = f"{render.layout_name(best.parallel)}, micro-batch {best.micro_batch_size}, {best.gpus} ranks"
        if best.parallel.get("stage_layers"):
            title += f", stages of {format_counts(best.parallel['stage_layers'])} layers"
        _write(picture_file, picture(title, answer.explanation.model_dump(mode="json")))
    show(answer, as_json, lambda console: plans_page(console, answer))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise fail(f"cannot write {file}: {error.strerror or error}", EXIT_BAD_INPUT) from error


def _answer(document: Any, url: str | None) -> schemas.Plans:
    cluster = document.get("cluster", {"current": True}) if isinstance(document, dict) else None
    if isinstance(cluster, dict) and cluster.get("current") is True:
        with connect(url) as client:
            return client.plans({**document, "cluster": cluster})
    return plan_here(document)


def plans_page(console: Console, answer: schemas.Plans) -> None:
    """Output of `manta plan` for users."""
    rows = [
        (
            render.layout_name(each.parallel),
            _schedule(each.parallel),
            each.micro_batch_size,
            each.parallel["recompute"],
            f"{each.step_seconds:.4g} s",
            f"{each.tokens_per_second:,.0f}",
            f"{each.mfu_full:.1%}",
            f"{each.bubble_ratio:.1%}",
            render.size(each.memory_bytes.total),
        )
        for each in answer.plans
    ]
    heads = ("LAYOUT", "SCHEDULE", "MICRO-BATCH", "RECOMPUTE", "STEP", "TOKENS/S", "MFU", "BUBBLE", "MEMORY")
    table(console, heads, rows, "no layout fits", spare=("BUBBLE", "RECOMPUTE"))
    if answer.plans:
        console.print(f"Computed in {answer.plans[0].precision} (train.precision).", highlight=False)
    for number, plan in enumerate(answer.plans, start=1):
        if plan.parallel.get("stage_layers"):
            counts = format_counts(plan.parallel["stage_layers"])
            console.print(f"Layers of the virtual stages of plan {number}: {counts}.", highlight=False)
        if types := plan.parallel.get("stage_accelerators"):
            console.print(f"Its stages are on {format_counts(types)}.", highlight=False)
    _context_methods(console, answer.plans)
    if answer.plans and (worst := answer.plans[0].worst_memory_bytes) is not None:
        expected = f"the experts of its busiest rank to get {IMBALANCE} times as many tokens as those of the mean rank"
        console.print(f"The best plan expects {expected}.", highlight=False)
        console.print(f"With all tokens of its expert group it would take {render.size(worst)}.", highlight=False)
    if answer.plans and answer.plans[0].host_memory_bytes:
        taken = f"{render.size(answer.plans[0].host_memory_bytes)} of a node's memory"
        what = "snapshots (checkpoint.snapshots) and offloaded state"
        console.print(f"The best plan uses {taken} for {what}.", highlight=False)
    for each in answer.rejected:
        console.print(f"{render.layout_name(each.parallel)}: {each.reason}", highlight=False)
    if answer.note is not None:
        console.print(f"Note: {answer.note}", highlight=False)
    if answer.sizes is not None:
        _sizes(console, answer.sizes)
    if answer.explanation is not None:
        _explanation(console, answer.explanation, answer.plans[0].step_seconds)


def _context_methods(console: Console, plans: list[schemas.Plan]) -> None:
    plans_by: dict[str, list[str]] = {}
    for number, plan in enumerate(plans, start=1):
        if method := plan.parallel.get("context_method"):
            plans_by.setdefault(method, []).append(str(number))
    for method, numbers in plans_by.items():
        of = "" if len(plans_by) == 1 else f" of plan {', '.join(numbers)}"
        console.print(f"Context ranks{of} exchange keys and values by {method}.", highlight=False)


def _schedule(parallel: dict[str, Any]) -> str:
    uneven = ", uneven" if parallel.get("stage_layers") else ""
    return f"{parallel['schedule']} x {parallel['virtual_stages']}{uneven}"


def _sizes(console: Console, sizes: list[schemas.PlanSize]) -> None:
    console.print("\nWith fewer GPUs:")
    rows: list[tuple[Any, ...]] = [
        (
            f"{size.gpus}" if size.gpus == size.up_to else f"{size.gpus} to {size.up_to}",
            render.layout_name(size.parallel),
            _schedule(size.parallel),
            size.micro_batch_size,
            size.parallel["recompute"],
            f"{size.step_seconds:.4g} s",
            f"{size.tokens_per_second:,.0f}",
            render.size(size.memory_bytes) + ("" if size.fits else ", does not fit"),
        )
        for size in sizes
    ]
    heads = ["GPUS", "LAYOUT", "SCHEDULE", "MICRO-BATCH", "RECOMPUTE", "STEP", "TOKENS/S", "MEMORY"]
    if any(size.nodes for size in sizes):
        heads = ["NODES", *heads]
        rows = [(_nodes(each.nodes or {}), *row) for each, row in zip(sizes, rows, strict=True)]
    table(console, heads, rows, "its size is fixed")


def _nodes(nodes: dict[str, int]) -> str:
    return " + ".join(f"{count} {type}" for type, count in nodes.items())


def _explanation(console: Console, explanation: schemas.PlanExplanation, step: float) -> None:
    console.print("\nTime of the best plan's step:")
    shares = [
        (share.label or share.name, f"{share.seconds / step:.1%}", f"{share.seconds:.4g} s", share.what)
        for share in explanation.shares
    ]
    table(console, ("PART", "SHARE", "TIME", "WHAT"), shares, "")
    for sentence in explanation.sentences:
        console.print(sentence, highlight=False)
    if explanation.run is not None:
        console.print(_run(explanation.run), highlight=False)
    console.print("\nEffects of single changes:")
    changes = [
        (
            change.change,
            f"{change.step_seconds:.4g} s",
            f"{change.step_seconds / step - 1:+.1%}",
            render.size(change.memory_bytes) + ("" if change.fits else ", does not fit"),
        )
        for change in explanation.changes
    ]
    table(console, ("CHANGE", "STEP", "DIFFERENCE", "MEMORY"), changes, "no other layout is possible")


def _run(run: schemas.PlannedRun) -> str:
    return (
        f"The whole training, with {run.failures:.0f} failures: {run.hours / 24:.1f} days, {run.gpu_hours:,.0f} "
        f"GPU-hours, goodput {run.goodput:.1%}, with {run.spare_nodes} spare nodes and a checkpoint every "
        f"{run.checkpoint_seconds / 60:.0f} minutes; a system that restarts from checkpoints: "
        f"{run.goodput_with_restarts:.1%}, {run.gpu_hours_with_restarts:,.0f} GPU-hours."
    )
