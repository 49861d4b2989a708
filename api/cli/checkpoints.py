"""`manta checkpoints`, `export`: lists, verifies, copies and exports a job's checkpoints, or their weights with
`--format hf | safetensors`, without torch.

The location of a checkpoint is requested from the service, or given as a folder or a URL of an object store. Its files
are read by this process, with the caller's credentials.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from manta.api.cli import render
from manta.api.cli.main import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_UNREACHABLE,
    PAGE,
    JobId,
    Json,
    MantaGroup,
    Url,
    app,
    confirm_deletion,
    connect,
    fail,
    show,
    to_the_last,
)
from manta.api.cli.render import counted, size
from manta.api.client import ApiError, Client, ServiceUnreachable, calls
from manta.api.schemas import Checkpoint, Items
from manta.service.ids import is_job_id
from manta.workers.checkpoint.catalog import (
    Manifest,
    checkpoint_path,
    generation_of,
    is_checkpoint,
    list_checkpoints,
    manifest_of,
    verify,
    while_read,
)
from manta.workers.checkpoint.checksums import DamagedCheckpoint
from manta.workers.checkpoint.transfer import copy
from manta.workers.errors import MantaError
from manta.workers.interruption import cleaning_up_when_terminated
from manta.workers.storage.locations import Location, parse_location

if TYPE_CHECKING:
    from manta.workers.weights.export import Exported

FORMATS = (
    "dcp: the whole checkpoint, for torch.distributed.checkpoint; hf: weights, config and tokenizer for "
    "transformers; safetensors: weights with Manta's names."
)
SHARD_SIZE = "5GB"
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


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


class NoCheckpoint(MantaError):
    """There is no complete checkpoint to read."""


class JobOrCommand(MantaGroup):
    """Accepts `checkpoints JOB` as `checkpoints list JOB`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the `list` command."""
        other_command = len(args) > 1 and not any(word.startswith("-") for word in args[:2])  # such as veryfy JOB
        is_complete = not ctx.resilient_parsing  # except for shell completion
        if is_complete and args[:1] != ["--help"] and not set(args[:1]) & self.commands.keys() and not other_command:
            args = ["list", *args]
        return super().parse_args(ctx, args)


checkpoints_app = typer.Typer(
    cls=JobOrCommand,
    help="List a job's durable checkpoints (`manta checkpoints JOB`), or verify, pull, push or delete one.",
)
app.add_typer(checkpoints_app, name="checkpoints")

Source = Annotated[
    str, typer.Argument(metavar="WHAT", help="A job's id or name, or the folder or URL of one or more checkpoints.")
]
To = Annotated[str, typer.Option("--to", help="Folder or URL in which the checkpoint's folder is created.")]
Step = Annotated[int | None, typer.Option("--step", min=1, help="The checkpoint of this step; default: the newest.")]


@checkpoints_app.command("list")
def list_of_job(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """List a job's durable checkpoints."""
    with connect(url) as client:
        page = Items[Checkpoint](items=_all(client, job))
    show(page, as_json, lambda console: render.checkpoint_table(console, page.items))


@checkpoints_app.command("delete")
def delete_one(
    job: JobId,
    step: Annotated[int, typer.Option("--step", min=1, help="The newest checkpoint of this step.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is the newest, from which the job would continue.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Delete a checkpoint and its files permanently."""
    with connect(url) as client:
        job = client.id_of(job)
        rows = [row for row in _complete(client, job) if row.step == step]
        if not rows:
            raise NoCheckpoint(f"{job} has no complete checkpoint of step {step}")
        newest = max(rows, key=lambda row: generation_of(row.path) or 0)
        if not yes:
            confirm_deletion(f"Delete {newest.path} ({size(newest.bytes)}) permanently?")
        answer = client.send(calls.delete_checkpoint(job, newest.id, force))
    show(answer, as_json, lambda console: console.print(f"{answer.path} is deleted", highlight=False, soft_wrap=True))


@checkpoints_app.command("verify")
def verify_one(what: Source, step: Step = None, url: Url = None, as_json: Json = False) -> None:
    """Verify every byte of a checkpoint against its checksums; exit code 1 if it is damaged."""
    place = source_of(what, step, url)
    try:
        manifest_of(place)  # whether it was complete
        with while_read(place):
            manifest = verify(place)
    except DamagedCheckpoint as error:
        raise fail(str(error), EXIT_FAILED) from error
    _print(place, manifest, as_json, "is intact")


@checkpoints_app.command()
def pull(what: Source, to: To, step: Step = None, url: Url = None, as_json: Json = False) -> None:
    """Download a checkpoint, verifying every byte.

    The copy is complete when its manifest exists, which is written last."""
    source = source_of(what, step, url)
    _copy(source, _named_in(to, source), as_json)


@checkpoints_app.command()
def push(
    what: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder of one or more checkpoints.")],
    to: To,
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Copy a local checkpoint to an object store or another folder, verifying every byte."""
    place = parse_location(what)
    if not what or (isinstance(place, Path) and not place.exists()):
        raise NoCheckpoint(f"there is no folder {what!r}; for a checkpoint of a job there is `manta checkpoints pull`")
    source = _in_place(place, step)
    _copy(source, _named_in(to, source), as_json)


@app.command()
def export(
    job: Source,
    to: Annotated[
        str | None, typer.Option("--to", help="Folder, or with dcp also URL, to create; default: ./NAME-step-STEP.")
    ] = None,
    to_format: Annotated[
        Format | None,
        typer.Option("--format", help=f"{FORMATS} Default: hf; if only --to is given dcp, except with adapters."),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Number format of the weights; default: that of the weights that the job started from, or fp32."
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapters of train.lora, in the format of PEFT.")
    ] = False,
    shard_size: Annotated[
        str | None, typer.Option(help=f"Maximum size of a file, such as 500MB; default: {SHARD_SIZE}.")
    ] = None,
    step: Step = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Export the weights of a job's newest checkpoint, or copy the whole checkpoint.

    transformers, vLLM and others read the format hf. A custom model, which they do not know, is exported as
    safetensors. Adapters (train.lora) are merged into the weights, or with --adapter exported alone."""
    if adapter and (to_format is not None or shard_size is not None):
        raise fail("--adapter has one format and one file: leave out --format and --shard-size", EXIT_BAD_INPUT)
    of_weights = dtype is not None or shard_size is not None or adapter
    if to_format is Format.dcp and of_weights:
        raise fail("dcp is an exact copy: --dtype and --shard-size are for hf and safetensors", EXIT_BAD_INPUT)
    source = source_of(job, step, url)
    spec, saved_step = (manifest := manifest_of(source)).spec, manifest.step
    has_adapters = (spec.get("train") or {}).get("lora") is not None
    if to_format is None and to is not None and not (of_weights or has_adapters):  # as scripts do that want a copy
        to_format = Format.dcp
        if not as_json:
            typer.echo("copying the whole checkpoint; --format hf exports the weights for transformers", err=True)
    to = to or f"{spec.get('name', 'job')}-step-{saved_step}{'-adapter' if adapter else ''}"
    if to_format is Format.dcp:
        _copy(source, parse_location(to), as_json)
        return
    is_custom = spec.get("model", {}).get("family") == "custom"
    chosen = "adapter" if adapter else (to_format or (Format.safetensors if is_custom else Format.hf)).value
    export_weights(source, to, chosen, dtype, shard_size, as_json)


def source_of(what: str, step: int | None, url: str | None) -> Location:
    """The complete checkpoint at a path, or of a job if no local folder has this name. Raises NoCheckpoint, ApiError,
    ServiceUnreachable, UnreadableCheckpoint."""
    if what and not is_job_id(what) and ("/" in what or Path(what).exists()):  # Path("") is the current folder
        return _in_place(parse_location(what), step)
    with connect(url) as client:
        rows = _complete(client, _job_called(client, what))
    wanted = [row for row in rows if step is None or row.step == step]
    if not wanted:
        raise NoCheckpoint(f"{what} has no complete checkpoint{_of(step)}{_other_steps(row.step for row in rows)}")
    newest = max(wanted, key=lambda row: (generation_of(row.path) or 0, row.step))
    return parse_location(newest.path)


def _job_called(client: Client, what: str) -> str:
    try:
        return client.id_of(what)
    except ServiceUnreachable as error:
        raise fail(f"there is no folder {what}, and for a job with that name: {error}", EXIT_UNREACHABLE) from error
    except ApiError as error:
        if error.problem.code != "job_not_found":
            raise
        raise NoCheckpoint(f"there is no folder {what}, and {error}") from error


def _complete(client: Client, job: str) -> list[Checkpoint]:
    return [row for row in _all(client, job) if row.state == "complete"]


def _all(client: Client, job: str) -> list[Checkpoint]:
    job_id = client.id_of(job)
    return [*to_the_last(lambda cursor: client.checkpoints(job_id, limit=PAGE, cursor=cursor))]


def _in_place(place: Location, step: int | None) -> Location:
    """The checkpoint at `place`, or the newest in it."""
    if isinstance(place, Path) and not place.exists():
        raise NoCheckpoint(f"{place} is neither a job's id nor an existing folder; `manta ps` lists the jobs")
    if isinstance(place, Path) and place.is_file():
        raise NoCheckpoint(f"{place} is a file, not the folder of a checkpoint")
    if is_checkpoint(place):
        if step is not None and (found := manifest_of(place).step) != step:
            raise NoCheckpoint(f"{place} is a checkpoint of step {found}, not {step}")
        return place
    listing = list_checkpoints(place)
    if listing.problem is not None:
        raise NoCheckpoint(listing.problem)
    whole = [path for path, manifest in listing.complete if step in (None, manifest.step)]
    if not whole:
        others = _other_steps(manifest.step for _, manifest in listing.complete)
        raise NoCheckpoint(f"there is no complete checkpoint{_of(step)} in {place}{others}")
    return whole[-1]


def _of(step: int | None) -> str:
    return "" if step is None else f" of step {step}"


def _other_steps(steps: Iterable[int]) -> str:
    return f"; it has those of steps {', '.join(map(str, known))}" if (known := sorted(steps)) else ""


def _named_in(folder: str, source: Location) -> Location:
    """Where a copy of `source` belongs in `folder`: in a folder of several only those with a checkpoint's name are
    found, whatever the source was renamed to."""
    manifest = manifest_of(source)
    return checkpoint_path(folder, manifest.step, manifest.generation)


def _copy(source: Location, target: Location, as_json: bool) -> None:
    with _writing(target, "copying", as_json) as tell:
        manifest = copy(source, target, tell)
    _print(target, manifest, as_json, f"is a copy of {source}")


def _print(place: Location, manifest: Manifest, as_json: bool, what: str) -> None:
    if as_json:
        about = {"path": str(place), "step": manifest.step, "generation": manifest.generation, "bytes": manifest.bytes}
        typer.echo(json.dumps({**about, "frozen_bytes": manifest.all_bytes - manifest.bytes, "job": manifest.job}))
    else:
        files, frozen = counted(len(manifest.files), "file"), ""
        if manifest.frozen is not None:
            frozen = f", and {size(manifest.frozen.manifest.bytes)} of frozen weights in {manifest.frozen.folder}"
        typer.echo(f"{place} {what}: step {manifest.step}, {files}, {size(manifest.bytes)}{frozen}")


def export_weights(
    checkpoint: Location, to: str, to_format: str, dtype: Dtype | None, shard_size: str | None, as_json: bool
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
        typer.echo(f"exported step {done.manifest.step} of {checkpoint} to {target}: {what}{done.sentence}")


def _export(
    checkpoint: str, target: Path, to_format: str, dtype: Dtype | None, shard_bytes: int, quiet: bool
) -> Exported:
    """Shows the progress meanwhile."""
    from manta.workers.weights.export import export  # other commands need no arrays

    kind: Any = dtype and dtype.value
    named: Any = to_format
    with cleaning_up_when_terminated(), _writing(target, "writing", quiet) as tell:
        return export(checkpoint, target, named, kind, shard_bytes, tell)


@contextlib.contextmanager
def _writing(target: Location, what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """During the block, which writes `target`, shows as its progress the (done, total) bytes that it is called with.
    Ends the command if `target` cannot be written."""
    with Progress(transient=True, disable=quiet or not Console().is_terminal) as bar:
        task = bar.add_task(what, total=None)
        try:
            yield lambda done, of: bar.update(task, completed=done, total=of)
        except OSError as error:
            raise fail(f"{target} cannot be written: {error.strerror or error}", EXIT_BAD_INPUT) from error


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise fail(f"--shard-size {text!r} is not a size: use 500MB or {SHARD_SIZE}", EXIT_BAD_INPUT)
    return max(1, int(float(match[1]) * _UNITS[match[2]]))
