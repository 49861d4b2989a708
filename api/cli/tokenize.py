"""`manta tokenize`: tokenizes a job's corpus before it is submitted, on the node where the command runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from manta.api.cli.main import EXIT_BAD_INPUT, Json, app, fail
from manta.service.settings import Settings
from manta.workers.paths import Paths
from manta.workers.settings import read_token_cache
from manta.workers.spec.reading import load_job_spec


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
