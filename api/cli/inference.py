"""`manta evaluate`, `generate`: what a job has learned. The checkpoint is asked of the service, or named as a folder or
URL, and read here, by a process of the engine's own commands, with the credentials of whoever calls."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from api.cli.checkpoints import Source, Step, source_of
from api.cli.main import Url

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(context_settings=PASSED_ON)(evaluate)
    app.command(context_settings=PASSED_ON)(generate)


Help = Annotated[bool, typer.Option("--options", help="Say what else can be given, which is passed on.")]


def evaluate(context: typer.Context, what: Source, step: Step = None, url: Url = None, options: Help = False) -> None:
    """Perplexity of a text (--text FILE), accuracy on last words (--last-word) or multiple choice (--choices)."""
    _run("workers.evaluate", what, step, url, ["--help"] if options else context.args)


def generate(context: typer.Context, what: Source, step: Step = None, url: Url = None, options: Help = False) -> None:
    """Let a job's model continue --prompt TEXT."""
    _run("workers.generate", what, step, url, ["--help"] if options else context.args)


def _run(module: str, what: str, step: int | None, url: str | None, arguments: list[str]) -> None:
    checkpoint = str(source_of(what, step, url)) if "--help" not in arguments else what
    ended = subprocess.run([sys.executable, "-m", module, checkpoint, *arguments], check=False)
    raise typer.Exit(ended.returncode)
