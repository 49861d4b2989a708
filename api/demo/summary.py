"""The table at the demo's end."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from manta.api.cli.progress import figure, percent
from manta.api.client import Client
from manta.api.demo.failure import Comparison, Outcome, described
from manta.api.schemas import Job
from manta.service.states import JobState


def show(
    console: Console, client: Client, job: Job, outcome: Outcome | None, same_bits: Comparison | None, root: Path
) -> None:
    """Print what the job did and what the failure cost. `root`: the folder that paths are shown from."""
    table = Table(title=f"{job.name}: {job.state}", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in {**_training(client, job), **_failure(outcome, same_bits), **_places(client, job, root)}.items():
        table.add_row(name, value)
    console.print(table)
    if job.state != JobState.SUCCEEDED:
        console.print(job.message or job.reason or "no reason given", style="red", highlight=False)


def _training(client: Client, job: Job) -> dict[str, str]:
    metrics, latest, layout = client.metrics(job.id), job.metrics.latest, job.parallel
    losses = [loss for loss in metrics.series["loss"] if isinstance(loss, float)]
    on_cpu = all(rank.device in (None, "cpu") for rank in client.ranks(job.id).items)
    against = "a matrix product on one core of this machine for each rank" if on_cpu else "the device's peak"
    return {
        "layout": f"tensor {layout['tensor']} x pipeline {layout['pipeline']} x data {layout['data']}",
        "loss, first step": figure(losses[0], 4) if losses else "-",
        "loss, last step": figure(losses[-1], 4) if losses else "-",
        "validation loss": figure(_number(latest.get("validation_loss")), 4),
        "tokens/s, median": figure(_median(metrics.series["tokens_per_second"]), 0),
        "MFU, attention in full, median": percent(_median(metrics.series["mfu_full"])),
        "MFU, causal half, median": percent(_median(metrics.series["mfu_causal"])),
        "MFU is measured against": against,
        "goodput": percent(job.goodput),
    }


def _failure(outcome: Outcome | None, same_bits: Comparison | None) -> dict[str, str]:
    if outcome is None:
        return {"killed": "nothing: the job ended before"}
    killed = outcome.killed
    return {
        "killed": f"process {killed.rank.pid}, {described(killed.rank)}, with kill -9 after step {killed.step}",
        "next committed step": f"{outcome.seconds:.2f} s after the kill",
        "kept process and weights": f"{outcome.kept} of {killed.ranks} ranks",
        "steps done again": str(outcome.steps_redone),
        "the curve": str(same_bits) if same_bits is not None else "not compared",
    }


def _places(client: Client, job: Job, root: Path) -> dict[str, str]:
    saved = [entry for entry in client.checkpoints(job.id).items if entry.state == "complete"]
    manta = _short(Path(sys.executable).parent / "manta", root)
    return {
        "checkpoint": _short(Path(saved[0].path), root) if saved and saved[0].path else "none",
        "open the dashboard": f"MANTA_HOME=.demo {manta} up",
    }


def _short(path: Path, root: Path) -> str:
    """`path` as seen from `root`, where the demo is run."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _median(values: Sequence[object]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return statistics.median(numbers) if numbers else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
