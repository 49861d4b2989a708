"""`manta export --format hf | safetensors`: the weights of a checkpoint, written by a process that has torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress

from api.cli.main import EXIT_BAD_INPUT, fail
from api.cli.render import size
from workers.storage.places import Place


class Format(StrEnum):
    """What a checkpoint is exported as."""

    dcp = "dcp"
    hf = "hf"
    safetensors = "safetensors"


class Dtype(StrEnum):
    """Of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


FORMATS = (
    "dcp: the whole checkpoint, as torch.distributed.checkpoint has it; hf: weights, config and tokenizer for "
    "transformers; safetensors: weights by Manta's own names."
)
SHARD_SIZE = "5GB"
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def export_weights(
    checkpoint: Place, to: str, to_format: Format, dtype: Dtype | None, shard_size: str | None, as_json: bool
) -> None:
    """Write the weights of `checkpoint` to the folder `to`. Ends the command where that cannot be done."""
    if "://" in to:
        raise fail(f"{to_format} is written to a folder of this machine; copy it to {to} from there", EXIT_BAD_INPUT)
    command = [sys.executable, "-m", "workers.weights.export", str(checkpoint), "--to", str(Path(to).absolute())]
    command += ["--format", to_format.value, "--shard-bytes", str(_bytes(shard_size or SHARD_SIZE)), "--json"]
    command += ["--dtype", dtype.value] if dtype is not None else []
    about = _run(command, as_json)
    if as_json:
        typer.echo(json.dumps(about))
    else:
        what = f"{about['files']} files, {size(about['bytes'])}, {about['dtype']}"
        typer.echo(f"{about['path']} has the weights of {checkpoint}: step {about['step']}, {what}")


def _run(command: list[str], as_json: bool) -> dict[str, Any]:
    """What the process says at its end, with its progress shown meanwhile."""
    about: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as errors:
        with Progress(transient=True, disable=as_json or not Console().is_terminal) as bar:
            task = bar.add_task("writing", total=None)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    said = json.loads(line)
                    if "done" in said:
                        bar.update(task, completed=said["done"], total=said["of"])
                    else:
                        about = said
        if process.returncode == 0:
            return about
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    raise fail(lines[-1] if lines else f"the export ended with exit code {process.returncode}", EXIT_BAD_INPUT)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise fail(f"--shard-size {text!r} is no size: write 500MB or {SHARD_SIZE}", EXIT_BAD_INPUT)
    return max(1, int(float(match[1]) * _UNITS[match[2]]))
