"""`manta calibrate`: what this machine reaches, measured and kept for plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console

from api import schemas
from api.cli.main import EXIT_BAD_INPUT, Json, Url, connect, fail, show
from api.cli.tables import table
from service.machines import Calibrated, forget_jobs_before_now, measure, refuse_unwritable, save, with_links_of_before
from service.settings import Settings
from workers.paths import Paths

_UNITS = {
    "product_fp32": (1e9, "GFLOP/s, products in fp32"),
    "product_16bit": (1e9, "GFLOP/s, products in bf16"),
    "attention_width": (1, "elements of a head's width, softmax"),
    "memory": (1e9, "GB/s, element-wise kernels"),
    "operation_seconds": (1e-6, "us, an operation"),
    "link": (1e9, "GB/s, a message at either end"),
    "message_seconds": (1e-6, "us, a message beside its bytes"),
    "all_busy": (1, "of its speed, a core while all compute"),
}
_UNITS_OF_GPU = {
    "product_16bit": (1e12, "TFLOP/s, products in bf16"),
    "product_fp32": (1e12, "TFLOP/s, products in fp32"),
    "attention": (1e12, "TFLOP/s, attention's forward"),
    "memory": (1e9, "GB/s, element-wise kernels"),
    "update": (1e9, "GB/s, the update at the end of a step"),
    "kernel_seconds": (1e-6, "us, a kernel beside its work"),
    "host_seconds": (1e-6, "us, an operation's launch by the host"),
    "copy": (1e9, "GB/s, to and from pinned memory of the host"),
}
_UNITS_OF_LINKS = {
    "bandwidth": (1e9, "GB/s, links between GPUs"),
    "hop_seconds": (1e-6, "us, a hop between GPUs"),
    "error": (1e-2, "%, mean error of both beside what was measured"),
}


class Device(Enum):
    """What can be measured."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(calibrate)


def calibrate(
    device: Annotated[
        Device, typer.Option("--device", help="What to measure; auto: its GPUs where it has any.")
    ] = Device.auto,
    listed: Annotated[
        bool, typer.Option("--list", help="Measure nothing; show what the service knows of types of machines.")
    ] = False,
    forget_jobs: Annotated[
        bool,
        typer.Option("--forget-jobs", help="Measure nothing; from now on only jobs that begin later refine machines."),
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Measure this machine for plans and for `parallel: auto`.

    It takes about a minute, with several GPUs a little more, in which nothing else should run here. What is found is
    kept in MANTA_HOME, for all nodes of the same processor and number of cores or of the same type of GPU, and takes
    the place of what was found before.
    Needs no service."""
    folder = Paths.of(Settings.from_environment().home).machines
    if listed and forget_jobs:
        raise fail("--list and --forget-jobs: one at a time", EXIT_BAD_INPUT)
    if forget_jobs:
        path = forget_jobs_before_now(folder)
        typer.echo(f"jobs that began before now refine nothing any more; without {path} they do again")
        return
    if listed:
        with connect(url) as client:
            answer = client.machines()
        show(answer, as_json, lambda console: _table(console, answer.items))
        return
    refuse_unwritable(folder)
    calibration = with_links_of_before(folder, measure(device.value, lambda line: typer.echo(line, err=True)))
    path = save(folder, calibration)
    if as_json:
        typer.echo(json.dumps(calibration.to_json()))
        return
    typer.echo(f"{calibration.name}: {calibration.device}, {calibration.cores} cores; kept in {path}")
    for line in _lines(calibration):
        typer.echo(line)
    if calibration.links_note is not None:
        typer.echo(f"Note: {calibration.links_note}", err=True)
    if calibration.warning is not None:
        typer.echo(f"Warning: {calibration.warning}", err=True)


def _table(console: Console, machines: Sequence[schemas.Machine]) -> None:
    rows = [
        (
            each.name,
            each.device or "not calibrated",
            f"{each.links['bandwidth'] / 1e9:.0f} GB/s" if each.links else "-",
            ", ".join(f"{name} x {factor:.2f}" for name, factor in each.refined.items()) or "-",
            f"{each.refined_by_jobs}",
            each.problem or each.warning or each.links_note or "",
        )
        for each in machines
    ]
    heads = ("TYPE", "DEVICE", "LINKS", "REFINED", "BY JOBS", "PROBLEM")
    table(console, heads, rows, "nothing was calibrated, and no jobs have refined anything")


def _lines(calibration: Calibrated) -> list[str]:
    units = _UNITS if calibration.gpu is None else _UNITS_OF_GPU | _UNITS_OF_LINKS
    known = calibration.constants | calibration.between
    return [f"  {known[name] / unit:10.3f} {what}" for name, (unit, what) in units.items() if name in known]
