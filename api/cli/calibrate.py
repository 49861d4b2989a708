"""`manta calibrate`: what this machine reaches, measured and kept for plans."""

from __future__ import annotations

import dataclasses
import json

import typer

from api.cli.main import Json
from service.machines import Calibrated, measure, save
from service.settings import Settings
from workers.paths import Paths
from workers.system.processor import node_type

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


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(calibrate)


def calibrate(as_json: Json = False) -> None:
    """Measure this machine for plans and for `parallel: auto`: about a minute in which nothing else should run here.
    What is found is kept in MANTA_HOME, for all nodes of the same processor and number of cores, and takes the place of
    what was found before. Ranks on CPUs; for GPUs plans go by published measurements. Needs no service."""
    folder = Paths.of(Settings.from_environment().home).machines
    found = measure(node_type(), lambda line: typer.echo(line, err=True))
    path = save(folder, found)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    typer.echo(f"{found.name}: {found.device}, {found.cores} cores; kept in {path}")
    for line in _lines(found):
        typer.echo(line)


def _lines(found: Calibrated) -> list[str]:
    values = dataclasses.asdict(found.core)
    return [f"  {values[name] / unit:10.3f} {what}" for name, (unit, what) in _UNITS.items()]
