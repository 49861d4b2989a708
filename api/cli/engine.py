"""`manta run`, `evaluate`, `generate`, `tokenize`: the engine's own commands. They run here, with the caller's
credentials; where a job's checkpoint is, is asked of the service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from manta.api.cli.checkpoints import Source, Step, source_of
from manta.api.cli.main import EXIT_BAD_INPUT, Json, Url, app, fail
from manta.service.settings import Settings
from manta.workers.paths import Paths
from manta.workers.settings import read_token_cache
from manta.workers.spec.reading import load_job_spec
from manta.workers.weights.config import CONFIG

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
    context: typer.Context,
    what: Source,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Perplexity of a text, or of a JSONL's texts.")
    ] = None,
    last_word: Annotated[
        Path | None, typer.Option("--last-word", metavar="FILE", help="Accuracy on the last words of a JSONL's texts.")
    ] = None,
    choices: Annotated[
        Path | None, typer.Option("--choices", metavar="FILE", help="Accuracy on a JSONL's multiple choice questions.")
    ] = None,
    chat: Annotated[
        Path | None, typer.Option("--chat", metavar="FILE", help="Perplexity of the answers in conversations.")
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Perplexity of the job's own validation sets (data.validation).")
    ] = False,
    step: Step = None,
    url: Url = None,
    options: Options = False,
) -> None:
    """Evaluate a job's model: perplexity, or accuracy.

    WHAT may also be a folder of Hugging Face weights; --adapter FOLDER adds an adapter of PEFT. Runs here, on one
    device. Further options: --stride, --template, --batch-size, --device, --dtype, --threads, --json.
    """
    files = {"--text": text, "--last-word": last_word, "--choices": choices, "--chat": chat}
    given = [[name, str(file)] for name, file in files.items() if file is not None]
    given += [["--validation"]] if validation else []
    if len(given) != 1:
        context.fail(f"Say what to evaluate on: --validation, or one of {', '.join(files)} FILE.")
    _run("evaluate", what, step, url, [*given[0], *context.args])


@app.command(context_settings=PASSED_ON)
def generate(
    context: typer.Context,
    what: Source,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="What to continue; may be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="The texts of a JSONL file, or any other file as one prompt."),
    ] = None,
    step: Step = None,
    url: Url = None,
    options: Options = False,
) -> None:
    """Generate text with a job's model.

    WHAT may also be a folder of Hugging Face weights; --adapter FOLDER adds an adapter of PEFT. Runs here, on one
    device. With --chat prompts are messages, and only the answer is printed. Further options: --tokens, --temperature,
    --top-k, --top-p, --seed, --template, --batch-size, --device, --dtype, --threads, --json.
    """
    if bool(prompt) == (prompts is not None):
        context.fail("Give --prompt TEXT or --prompts FILE.")
    given = [word for each in prompt or () for word in ("--prompt", each)]
    given += [] if prompts is None else ["--prompts", str(prompts)]
    _run("generate", what, step, url, [*given, *context.args])


@app.command()
def tokenize(
    file: Annotated[Path, typer.Argument(help="A job's YAML file.", dir_okay=False)],
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="FOLDER", help="Folder to store the tokens in; default: MANTA_TOKEN_CACHE."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="PREFIX", help="Also write PREFIX.bin and PREFIX.idx, for Megatron-LM."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Number of tokenizing processes; default: one per core.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokenize a job's corpus now, on this node.

    A job that starts here uses the stored tokens; without them it tokenizes by itself. An interrupted run is continued.
    Needs no service."""
    # Imported here: numpy takes longer to import than most commands take to run.
    from manta.workers.data.token_cache import Watcher
    from manta.workers.data.tokenize import ProgressLines
    from manta.workers.data.tokenize import tokenize as make_tokens

    folder = (cache or read_token_cache(Paths.of(Settings.from_environment().home).token_cache)).absolute()
    try:
        spec = load_job_spec(file)
    except OSError as error:
        raise fail(f"cannot read {file}: {error.strerror}", EXIT_BAD_INPUT) from error
    watcher = Watcher() if as_json else ProgressLines(sys.stdout)
    watcher.processes = processes
    corpus = make_tokens(spec, folder, watcher, to)
    if as_json:
        typer.echo(json.dumps({"tokens": len(corpus), "digest": corpus.digest, "cache": str(folder)}))
    else:
        typer.echo(f"{len(corpus)} tokens are in {folder}")


def _run(command: str, what: str, step: int | None, url: str | None, arguments: list[str]) -> None:
    is_weights = (Path(what) / CONFIG).is_file()
    if is_weights and step is not None:
        raise fail(f"{what} is a folder of weights, which has no steps: leave out --step", EXIT_BAD_INPUT)
    checkpoint = what if is_weights else str(source_of(what, step, url))
    raise typer.Exit(subprocess.run(_engine(command, checkpoint, *arguments), check=False).returncode)


def _engine(command: str, *arguments: str) -> list[str]:
    """The engine's command of that name, reporting errors as `manta`; SIGINT ends it without output."""
    quiet = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    code = f"{quiet}; from manta.workers.{command} import main; sys.exit(main(called='manta {command}'))"
    return [sys.executable, "-P", "-c", code, *arguments]
