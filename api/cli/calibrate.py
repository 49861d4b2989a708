"""`manta calibrate`: measures this machine's performance and stores it for plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console

from manta.api import schemas
from manta.api.cli.main import EXIT_BAD_INPUT, Json, Url, app, connect, fail, show
from manta.api.cli.render import table
from manta.service.planner.machines import (
    Calibrated,
    ignore_earlier_jobs,
    measure,
    refuse_unwritable,
    save,
    with_links_of_before,
)
from manta.service.settings import Settings
from manta.workers.paths import Paths

_UNITS = {
    "product_fp32": (1e9, "GFLOP/s, matmuls in fp32"),
    "product_16bit": (1e9, "GFLOP/s, matmuls in bf16"),
    "attention_width": (1, "elements of head width for the cost of softmax"),
    "memory": (1e9, "GB/s, element-wise kernels"),
    "operation_seconds": (1e-6, "us per operation"),
    "link": (1e9, "GB/s per message at each end"),
    "message_seconds": (1e-6, "us per message, in addition to its bytes"),
    "all_busy": (1, "relative speed of a core while all cores compute"),
}
_UNITS_OF_GPU = {
    "product_16bit": (1e12, "TFLOP/s, matmuls in bf16"),
    "product_fp32": (1e12, "TFLOP/s, matmuls in fp32"),
    "attention": (1e12, "TFLOP/s, attention's forward"),
    "memory": (1e9, "GB/s, element-wise kernels"),
    "update": (1e9, "GB/s, the update at the end of a step"),
    "kernel_seconds": (1e-6, "us per kernel, in addition to its work"),
    "host_seconds": (1e-6, "us per operation launched by the host"),
    "copy": (1e9, "GB/s to and from pinned host memory"),
}
_UNITS_OF_LINKS = {
    "bandwidth": (1e9, "GB/s, links between GPUs"),
    "hop_seconds": (1e-6, "us, a hop between GPUs"),
    "error": (1e-2, "%, mean error of both against the measurements"),
}


class Device(Enum):
    """Devices that can be measured."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.command()
def calibrate(
    device: Annotated[
        Device, typer.Option("--device", help="Device to measure; auto: a GPU if the machine has one.")
    ] = Device.auto,
    listed: Annotated[
        bool, typer.Option("--list", help="Do not measure; show the service's data about types of machines.")
    ] = False,
    forget_jobs: Annotated[
        bool,
        typer.Option("--forget-jobs", help="Do not measure; discard refinements from jobs that have begun until now."),
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Measure this machine for plans and for `parallel: auto`.

    This takes about a minute (slightly longer with several GPUs), during which nothing else should run on it. The
    results are stored in MANTA_HOME for all nodes with the same processor and number of cores, or the same type of GPU,
    and replace earlier results. Needs no service."""
    folder = Paths.of(Settings.from_environment().home).machines
    if listed and forget_jobs:
        raise fail("--list and --forget-jobs cannot be used together", EXIT_BAD_INPUT)
    if forget_jobs:
        path = ignore_earlier_jobs(folder)
        undo = f"jobs that began before now no longer refine machines; delete {path} to undo this"
        typer.echo(json.dumps({"file": str(path)}) if as_json else undo)
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
    typer.echo(f"{calibration.name}: {calibration.device}, {calibration.cores} cores; stored in {path}")
    for line in _lines(calibration):
        typer.echo(line)
    if calibration.links_note is not None:
        typer.echo(f"Note: {calibration.links_note}", err=True)
    if calibration.warning is not None:
        typer.echo(f"Warning: {calibration.warning}", err=True)


def _table(console: Console, machines: Sequence[schemas.Machine]) -> None:
    rows = [
        (
            machine.name,
            machine.device or "not calibrated",
            f"{machine.links['bandwidth'] / 1e9:.0f} GB/s" if machine.links else "-",
            ", ".join(f"{name} x {factor:.2f}" for name, factor in machine.refined.items()) or "-",
            f"{machine.refined_by_jobs}",
            machine.problem or machine.warning or machine.links_note or "",
        )
        for machine in machines
    ]
    heads = ("TYPE", "DEVICE", "LINKS", "REFINED", "BY JOBS", "PROBLEM")
    table(console, heads, rows, "no calibrations, and no refinements from jobs")


def _lines(calibration: Calibrated) -> list[str]:
    units = _UNITS if calibration.gpu is None else _UNITS_OF_GPU | _UNITS_OF_LINKS
    known = calibration.constants | calibration.between
    return [f"  {known[name] / unit:10.3f} {what}" for name, (unit, what) in units.items() if name in known]
