"""`manta evaluate`, `generate`: what a job has learned. The checkpoint is asked of the service, or named as a folder or
URL, and read here, by a process of the engine's own commands, with the caller's credentials."""

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


def _say_options(context: typer.Context, wanted: bool) -> None:
    """Print what is passed on, which the engine's command knows."""
    if wanted:
        raise typer.Exit(subprocess.run(_engine(str(context.info_name), "--help"), check=False).returncode)


Options = Annotated[
    bool,
    typer.Option("--options", help="Explain these and all others.", callback=_say_options, is_eager=True),
]


def evaluate(
    context: typer.Context, what: Source, step: Step = None, url: Url = None, options: Options = False
) -> None:
    """Say how good a job's model is: perplexity, or accuracy.

    --text FILE (perplexity), --last-word FILE or --choices FILE (accuracy), or --chat FILE (answers in conversations).
    Beside it: --stride, --template, --batch-size, --device, --dtype, --threads, --json."""
    _run("evaluate", what, step, url, context.args)


def generate(
    context: typer.Context, what: Source, step: Step = None, url: Url = None, options: Options = False
) -> None:
    """Let a job's model continue a text, or answer.

    --prompt TEXT or --prompts FILE; with --chat, answer it. Beside it: --tokens, --temperature, --top-k, --top-p,
    --seed, --template, --batch-size, --device, --dtype, --threads, --json."""
    _run("generate", what, step, url, context.args)


def _run(command: str, what: str, step: int | None, url: str | None, arguments: list[str]) -> None:
    checkpoint = str(source_of(what, step, url))
    raise typer.Exit(subprocess.run(_engine(command, checkpoint, *arguments), check=False).returncode)


def _engine(command: str, *arguments: str) -> list[str]:
    """The engine's own command of that name, which says what is wrong as ours would; SIGINT ends it without a word."""
    quiet = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    code = f"{quiet}; from workers.{command} import main; sys.exit(main(called='manta {command}'))"
    return [sys.executable, "-c", code, *arguments]
