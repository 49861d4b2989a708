"""The order of commands in `manta --help`: those that users need first come first."""

from __future__ import annotations

import typer
from typer.models import CommandInfo, TyperInfo

PANELS = {
    "Jobs": "submit ps status logs events metrics compare pause resume resize edit cancel retry delete",
    "What a job does, and where its time goes": "ranks waits stack trace traces budget ledger recoveries track",
    "Checkpoints and trained models": "export evaluate generate checkpoints",
    "Before a job": "plan calibrate tokenize doctor",
    "The service and its nodes": "up down serve nodes drain link",
    "Administration": "audit inject keys projects db",
}
"""Commands by the name of their panel; those with subcommands last."""


def put_in_order(app: typer.Typer) -> None:
    """Set the panel of each command of `app`, and its position in it."""
    placed = {name: (panel, at) for panel, names in PANELS.items() for at, name in enumerate(names.split())}
    order = [*PANELS]

    def place(name: str) -> tuple[int, int]:
        panel, at = placed[name]
        return order.index(panel), at

    registered: list[CommandInfo | TyperInfo] = [*app.registered_commands, *app.registered_groups]
    for each in registered:
        each.rich_help_panel = placed[name_of(each)][0]
    app.registered_commands.sort(key=lambda each: place(name_of(each)))
    app.registered_groups.sort(key=lambda each: place(name_of(each)))


def name_of(registered: CommandInfo | TyperInfo) -> str:
    """Name of a command."""
    return str(registered.name or getattr(registered.callback, "__name__", ""))
