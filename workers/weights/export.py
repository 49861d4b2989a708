"""The weights of a durable checkpoint of any layout, for others:
`python -m workers.weights.export CHECKPOINT --to FOLDER`.

`--format hf` writes what transformers reads: config.json, safetensors, generation_config.json, the tokenizer.
`--format safetensors` writes our own tensors by our own names, with the JobSpec. Either is written beside its place and
renamed at the end. In memory there are never more than two of our tensors, as the checkpoint has them, and one that is
being written.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch

from workers.checkpoint.catalog import Manifest, manifest_of
from workers.checkpoint.contents import Contents
from workers.checkpoint.durable import read_contents, read_tensor
from workers.config import JobSpec
from workers.errors import CheckpointError, MantaError, WeightsError
from workers.spec.problems import SpecError
from workers.spec.reading import parse_job_spec
from workers.storage.places import place_of
from workers.weights.companions import add_tokenizer, files_beside, source_config
from workers.weights.mapping import Piece, TheirTensor, their_tensors
from workers.weights.new_folder import new_folder
from workers.weights.safetensors_files import NewTensor, plan_files, write_files, write_text

Format = Literal["hf", "safetensors"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
SPEC = "job.json"
"""Of format safetensors: the JobSpec."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    manifest: Manifest
    """Of the checkpoint."""
    files: int
    bytes: int
    """Of the tensors."""
    dtype: str


def export(
    checkpoint: str,
    target: Path,
    to: Format = "hf",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Exported:
    """Write the weights of the `checkpoint` (folder or URL) to `target`, where nothing may be yet.

    `dtype`: default: that of the weights that the job began with, else fp32. `progress` is told how many bytes of how
    many are written. Raises CheckpointError where the checkpoint cannot be read, WeightsError where transformers has no
    such model or a number does not fit the dtype, OSError.
    """
    manifest = manifest_of(place_of(checkpoint))
    spec = _spec_of(checkpoint, manifest)
    dtype = dtype or _source_dtype(spec)
    name_of_dtype = str(dtype).removeprefix("torch.")
    reader = _Reader(checkpoint, manifest, dtype)
    texts = {SPEC: json.dumps(manifest.spec, indent=2) + "\n"}
    if to == "hf":
        texts = files_beside(spec, name_of_dtype)
        tensors = their_tensors(spec)
    else:
        tensors = reader.ours()
    by_name = {tensor.name: tensor for tensor in tensors}
    new = [NewTensor(tensor.name, tensor.shape) for tensor in tensors]
    size = sum(math.prod(tensor.shape) for tensor in new) * dtype.itemsize
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        progress(done, size)

    with closing(reader), new_folder(target) as folder:
        reader.expect(tensors)
        files = plan_files(new, dtype, shard_bytes)
        write_files(folder, files, dtype, lambda name: reader.theirs(by_name[name]), wrote)
        for name, text in texts.items():
            write_text(folder / name, text)
        if to == "hf":
            add_tokenizer(spec, place_of(checkpoint), folder)
    return Exported(manifest, len(files), size, name_of_dtype)


def _spec_of(checkpoint: str, manifest: Manifest) -> JobSpec:
    try:
        return parse_job_spec(manifest.spec)
    except SpecError as error:
        raise CheckpointError(f"{checkpoint} is of a job that this release does not take: {error}") from error


def _source_dtype(spec: JobSpec) -> torch.dtype:
    source = source_config(spec)
    named = None if source is None else source.get("dtype", source.get("torch_dtype"))
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    return known.get(named, torch.float32) if isinstance(named, str) else torch.float32


class _Reader:
    """Their tensors from ours, of which the last one is kept, since queries, keys and values come from one; the next
    one is read, and its checksums are formed, on a thread while the last one is written."""

    def __init__(self, checkpoint: str, manifest: Manifest, dtype: torch.dtype):
        self._path, self._manifest, self._dtype = checkpoint, manifest, dtype
        self._contents: Contents = read_contents(checkpoint, manifest)
        self._thread = ThreadPoolExecutor(1, "read")
        self._name, self._last = "", torch.empty(0)
        self._to_come: list[str] = []
        self._next: Future[torch.Tensor] | None = None

    def expect(self, tensors: list[TheirTensor]) -> None:
        """These are going to be asked for, in this order."""
        names = (piece.ours for tensor in tensors for piece in tensor.pieces)
        self._to_come = [name for name, _ in groupby(names)]
        self._read_ahead()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _read_ahead(self) -> None:
        self._next = self._thread.submit(self._read, self._to_come[0]) if self._to_come else None

    def ours(self) -> list[TheirTensor]:
        """Our tensors under their own names."""
        shapes = {
            name.removeprefix("model."): stored.shape
            for name, stored in self._contents.tensors.items()
            if name.startswith("model.")
        }
        return [TheirTensor(name, shape, (Piece(0, name, 0, shape[0], shape[0], 1),)) for name, shape in shapes.items()]

    def theirs(self, tensor: TheirTensor) -> torch.Tensor:
        """One of theirs, as it is written. Raises CheckpointError, WeightsError."""
        if len(tensor.pieces) == 1 and tensor.pieces[0].count == 1:
            piece = tensor.pieces[0]
            ours = self._ours(piece.ours)[piece.first : piece.first + piece.length]
            return self._laid_out(tensor, ours.to(self._dtype), ours)
        rows = torch.zeros(tensor.rows_first, dtype=self._dtype)
        ours = rows
        for piece in tensor.pieces:
            ours = self._ours(piece.ours)
            for row, theirs, count in piece.runs(0, len(ours)):
                rows[theirs : theirs + count].copy_(ours[row : row + count])
        return self._laid_out(tensor, rows, ours)

    def _laid_out(self, tensor: TheirTensor, cast: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
        """A tensor of the dtype, made from one of `ours`, with the rows and columns of their file."""
        if tuple(cast.shape) != tensor.rows_first:
            found = tuple(cast.shape)
            raise CheckpointError(f"{self._path}: {tensor.name} should be {tensor.rows_first}, found {found}")
        # A number beyond the dtype's largest would become infinite.
        if self._dtype == torch.float16 and not cast.isfinite().all() and ours.isfinite().all():
            most = ours.abs().max().item()
            raise WeightsError(f"{tensor.name} has a value of {most:.4g}, which fp16 cannot hold: use bf16 or fp32")
        return cast.t().contiguous() if tensor.transposed else cast

    def _ours(self, name: str) -> torch.Tensor:
        if name != self._name:
            assert self._next is not None and self._to_come[0] == name, "tensors are asked for in their order"
            self._name, self._last = name, torch.empty(0)  # so that memory never holds three
            self._last = self._next.result()
            del self._to_come[0]
            self._read_ahead()
        return self._last

    def _read(self, name: str) -> torch.Tensor:
        key = f"model.{name}"
        if key not in self._contents.tensors:
            raise CheckpointError(f"the checkpoint at {self._path} has no {name}")
        return read_tensor(self._path, self._manifest, self._contents, key)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status. Errors of the user are one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.weights.export", description="Export a checkpoint's weights."
    )
    parser.add_argument("checkpoint", help="folder or s3:// URL of one checkpoint")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where nothing may be yet")
    parser.add_argument("--format", choices=("hf", "safetensors"), default="hf")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="default: that of the weights the job began with, or fp32"
    )
    parser.add_argument(
        "--shard-bytes", type=int, default=SHARD_BYTES, help=f"most bytes of a file (default: {SHARD_BYTES})"
    )
    parser.add_argument("--json", action="store_true", help="print progress and result as lines of JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dtype = DTYPES[options.dtype] if options.dtype else None
    tell = _tell if options.json else lambda done, of: None
    try:
        target = options.to.absolute()
        done = export(options.checkpoint, target, options.format, dtype, options.shard_bytes, tell)
    except MantaError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{options.to} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    about = {"step": done.manifest.step, "files": done.files, "bytes": done.bytes, "dtype": done.dtype}
    if options.json:
        print(
            json.dumps({"path": str(target), "job": done.manifest.job, "generation": done.manifest.generation, **about})
        )
    else:
        what = f"{done.files} files, {done.bytes} bytes, {done.dtype}"
        print(f"{target} has the weights of step {done.manifest.step}: {what}")
    return 0


def _tell(done: int, of: int) -> None:
    print(json.dumps({"done": done, "of": of}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
