"""`manta run`, `evaluate`, `generate`: the engine's own commands. They run here, in a process of the engine with the
caller's credentials; where a job's checkpoint is, is asked of the service."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from manta.api.cli.checkpoints import Source, Step, source_of
from manta.api.cli.main import Url, app

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _say_options(context: typer.Context, wanted: bool) -> None:
    """Print the engine's help, which describes the options that are passed on."""
    if wanted:
        raise typer.Exit(subprocess.run(_engine(str(context.info_name), "--help"), check=False).returncode)


Options = Annotated[
    bool,
    typer.Option("--options", help="Explain these and all other options.", callback=_say_options, is_eager=True),
]


@app.command(context_settings=PASSED_ON, add_help_option=False)
def run(context: typer.Context) -> None:
    """Train one job on this machine without a service.

    manta run JOB.yaml [--checkpoints FOLDER] [--metrics FILE]; more with --help. For several ranks: torchrun
    --nproc-per-node RANKS -m manta.workers.run JOB.yaml."""
    raise typer.Exit(subprocess.run(_engine("run", *context.args), check=False).returncode)


@app.command(context_settings=PASSED_ON)
def evaluate(
    context: typer.Context, what: Source, step: Step = None, url: Url = None, options: Options = False
) -> None:
    """Evaluate a job's model: perplexity, or accuracy.

    --text FILE (perplexity), --last-word FILE or --choices FILE (accuracy), or --chat FILE (answers in conversations).
    Further options: --stride, --template, --batch-size, --device, --dtype, --threads, --json.
    """
    _run("evaluate", what, step, url, context.args)


@app.command(context_settings=PASSED_ON)
def generate(
    context: typer.Context, what: Source, step: Step = None, url: Url = None, options: Options = False
) -> None:
    """Generate text with a job's model.

    --prompt TEXT or --prompts FILE; with --chat, as a conversation. Further options: --tokens, --temperature, --top-k,
    --top-p, --seed, --template, --batch-size, --device, --dtype, --threads, --json.
    """
    _run("generate", what, step, url, context.args)


def _run(command: str, what: str, step: int | None, url: str | None, arguments: list[str]) -> None:
    checkpoint = str(source_of(what, step, url))
    raise typer.Exit(subprocess.run(_engine(command, checkpoint, *arguments), check=False).returncode)


def _engine(command: str, *arguments: str) -> list[str]:
    """The engine's command of that name, reporting errors as `manta`; SIGINT ends it without output."""
    quiet = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    code = f"{quiet}; from manta.workers.{command} import main; sys.exit(main(called='manta {command}'))"
    return [sys.executable, "-P", "-c", code, *arguments]
