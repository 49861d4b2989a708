"""Whether the commands of containers are ones that our programs take, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_command(command: Sequence[str]) -> None:
    """Raises click.UsageError, or KeyError for a command that there is not."""
    program, *words = command
    if program == "manta":
        _parse(_manta(), words)
    elif program == "ray":
        from ray.scripts.scripts import cli

        _parse(cli, words)
    elif program == "python":
        compile(words[-1], "command", "exec")
    else:
        assert program == "true", f"{program} is no program of the image"


def _manta() -> Any:
    import typer

    from manta.api.cli.main import command_line

    return typer.main.get_command(command_line())


def _parse(command: Any, words: list[str]) -> None:
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    if words != ["--help"]:  # which would print it and end this process
        command.make_context("command", words)
