"""`manta export --format hf | safetensors`: the weights of a checkpoint, written by this process, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress

from api.cli.main import EXIT_BAD_INPUT, fail
from api.cli.render import counted, size
from workers.errors import MantaError
from workers.interruption import cleaning_up_when_terminated
from workers.storage.places import Place

if TYPE_CHECKING:
    from workers.weights.export import Exported


class Format(StrEnum):
    """Formats that a checkpoint can be exported to."""

    dcp = "dcp"
    hf = "hf"
    safetensors = "safetensors"


class Dtype(StrEnum):
    """Number format of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


FORMATS = (
    "dcp: the whole checkpoint, for torch.distributed.checkpoint; hf: weights, config and tokenizer for "
    "transformers; safetensors: weights with Manta's names."
)
SHARD_SIZE = "5GB"
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def export_weights(
    checkpoint: Place, to: str, to_format: Format, dtype: Dtype | None, shard_size: str | None, as_json: bool
) -> None:
    """Write the weights of `checkpoint` to the folder `to`. Ends the command if that fails."""
    if "://" in to:
        raise fail(f"{to_format} is written to a local folder; copy it to {to} from there", EXIT_BAD_INPUT)
    target = Path(to).absolute()
    done = _export(str(checkpoint), target, to_format, dtype, _bytes(shard_size or SHARD_SIZE), as_json)
    if as_json:
        typer.echo(json.dumps(done.to_json(target)))
    else:
        what = f"{counted(done.files, 'file')}, {size(done.bytes)}, {done.dtype}"
        typer.echo(f"{target} has the weights of {checkpoint}: step {done.manifest.step}, {what}")


def _export(
    checkpoint: str, target: Path, to_format: Format, dtype: Dtype | None, shard_bytes: int, quiet: bool
) -> Exported:
    """Shows the progress meanwhile."""
    from workers.weights.export import export  # other commands need no arrays

    bars = Progress(transient=True, disable=quiet or not Console().is_terminal)
    with cleaning_up_when_terminated(), bars as bar:
        task = bar.add_task("writing", total=None)
        tell: Callable[[int, int], None] = lambda done, of: bar.update(task, completed=done, total=of)  # noqa: E731
        try:
            kind: Any = dtype and dtype.value
            return export(
                checkpoint, target, "hf" if to_format is Format.hf else "safetensors", kind, shard_bytes, tell
            )
        except MantaError as error:
            raise fail(str(error), EXIT_BAD_INPUT) from error
        except OSError as error:
            raise fail(f"{target} cannot be written: {error.strerror or error}", EXIT_BAD_INPUT) from error


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise fail(f"--shard-size {text!r} is not a size: use 500MB or {SHARD_SIZE}", EXIT_BAD_INPUT)
    return max(1, int(float(match[1]) * _UNITS[match[2]]))
