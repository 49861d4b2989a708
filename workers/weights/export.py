"""Exports the weights of a durable checkpoint of any layout: `python -m manta.workers.weights.export CHECKPOINT --to
FOLDER`.

`--format hf` writes what transformers reads: config.json, safetensors, generation_config.json, the tokenizer. `--format
safetensors` writes our tensors with our names, and the JobSpec. Either is written next to its final place and renamed
at the end. Only a few bands of rows of the tensors are in memory at a time (`stream_out.py`). Nothing here needs torch,
which takes longer to load than a small model.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything is loaded, which takes seconds
    from manta.workers.interruption import run_command

    run_command("manta.workers.weights.export")

import argparse
import fcntl
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from manta.workers.checkpoint.catalog import Manifest, checkpoint_at, manifest_of, while_read
from manta.workers.checkpoint.opening import read_contents
from manta.workers.checkpoint.stored_rows import RAW, StoredRows
from manta.workers.config import JobSpec, LoraConfig
from manta.workers.errors import CheckpointError, MantaError, WeightsError
from manta.workers.interruption import cleaning_up_when_terminated
from manta.workers.spec.layer_table import is_adapter
from manta.workers.spec.problems import SpecError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.storage.locations import Location, parse_location
from manta.workers.weights.adapters import stored_adapters, stored_matrix
from manta.workers.weights.companions import add_tokenizer, companion_files, source_config
from manta.workers.weights.config import ADAPTER_CONFIG, huggingface_config
from manta.workers.weights.folder import ADAPTER, INDEX, NewFiles, index_of, plan_files, size_of, write_text
from manta.workers.weights.mapping import ROUTER_BIAS, Dtype, Format, HuggingFaceTensor, huggingface_tensors, unchanged
from manta.workers.weights.peft import config_of, new_modules
from manta.workers.weights.stream_out import DTYPES, Source, cast, write_tensors

SHARD_BYTES = 5 * 10**9
SPEC = "job.json"
"""File of format safetensors that contains the JobSpec."""
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    manifest: Manifest
    """Manifest of the checkpoint."""
    files: int
    bytes: int
    """Size of the tensors."""
    dtype: str

    rounding: float | None = None
    """Largest absolute difference between an element of a weight with its adapter merged, in fp32, and what was
    written; None: no adapter was merged."""

    def to_json(self, target: Path) -> dict[str, object]:
        """What the command prints for programs about weights that were written to `target`."""
        about = {"step": self.manifest.step, "files": self.files, "bytes": self.bytes, "dtype": self.dtype}
        about |= {} if self.rounding is None else {"rounding": self.rounding}
        return {"path": str(target), "job": self.manifest.job, "generation": self.manifest.generation, **about}

    @property
    def sentence(self) -> str:
        """What a user has to know about merged weights; empty if there are none."""
        if self.rounding is None:
            return ""
        return f"; adapters are merged, and the largest rounding of a merged weight is {self.rounding:.2g}"


def export(
    checkpoint: str,
    target: Path,
    to: Format = "hf",
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Exported:
    """Write the weights of the `checkpoint` (folder or URL) to `target`, which must not exist yet. Adapters are merged,
    or written alone.

    `dtype`: default: that of the weights that the job began with, otherwise fp32, as for adapters. `progress` is called
    with how many bytes of how many are written. Raises CheckpointError if the checkpoint cannot be read, WeightsError
    if transformers has no such model, a number does not fit the dtype, or there are no adapters, OSError.
    """
    location = parse_location(checkpoint)
    manifest = manifest_of(location)
    spec = _spec_of(location, manifest)
    with while_read(location):
        source = Source(location, manifest, read_contents(location, manifest))
        if to == "adapter":
            return _export_adapter(source, spec, target, DTYPES[dtype or "fp32"])
        return _export(source, spec, target, to, dtype, shard_bytes, progress)


def _export_adapter(source: Source, spec: JobSpec, target: Path, dtype: str) -> Exported:
    lora, job = spec.train.lora, source.manifest.job
    if lora is None:
        raise WeightsError(f"{job} has no adapters (train.lora): export its weights in another format")
    with new_folder(target) as folder, source.rows() as rows:
        size = _write_adapter(spec, lora, rows, dtype, folder)
    return Exported(source.manifest, 1, size, dtype)


def _export(
    source: Source,
    with_adapters: JobSpec,
    target: Path,
    to: Format,
    dtype: Dtype | None,
    shard_bytes: int,
    progress: Callable[[int, int], object],
) -> Exported:
    location, manifest = source.location, source.manifest
    spec = with_adapters.model_copy(update={"train": with_adapters.train.model_copy(update={"lora": None})})
    named = DTYPES[dtype] if dtype is not None else _source_dtype(spec)
    if to == "hf":
        texts, tensors = companion_files(spec, named, location), huggingface_tensors(spec)
    else:
        merged = {**manifest.spec, "train": {**manifest.spec["train"], "lora": None}}
        texts, tensors = {SPEC: _json(merged)}, _our_tensors(source)
    files = plan_files(tensors, named, shard_bytes)
    if len(files) > 1:
        texts[INDEX] = index_of(files, named)
    size = sum(size_of(tensor, named) for tensor in tensors)
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        progress(done, size)

    with new_folder(target) as folder:
        with NewFiles(folder, files, named, wrote) as new:
            adapters, processors = partial(stored_adapters, with_adapters), len(os.sched_getaffinity(0))
            rounding = write_tensors(source, tensors, named, new, processors, adapters)
        for name, text in texts.items():
            write_text(folder / name, text)
        if to == "hf":
            add_tokenizer(spec, location, folder)
    return Exported(manifest, len(files), size, named, None if with_adapters.train.lora is None else rounding)


def _write_adapter(spec: JobSpec, lora: LoraConfig, rows: StoredRows, dtype: str, folder: Path) -> int:
    """Write the adapters of a checkpoint into `folder`, cast to `dtype` (as torch calls it), in the format of PEFT;
    returns their size in bytes. Raises CheckpointError, WeightsError if transformers has no such model, OSError."""
    huggingface_config(spec, dtype)  # whether there is one
    modules, tensors = new_modules(spec.model, lora), []
    for each in modules:
        rank, height = len(each.adapted) * lora.rank, sum(each.module.matrices.values())
        tensors.append(HuggingFaceTensor(each.name("A"), (rank, each.module.columns), ()))
        tensors.append(HuggingFaceTensor(each.name("B"), (height, rank), ()))
    with NewFiles(folder, {ADAPTER: tensors}, dtype) as new:
        for each in modules:
            for end, values in zip("AB", _together(rows, each.module.matrices, each.adapted, lora.rank), strict=True):
                written = numpy.empty(values.shape, RAW[dtype])
                cast(values, "float32", written, dtype)
                new.write(each.name(end), 0, written.data)
    write_text(folder / ADAPTER_CONFIG, _json(config_of(spec, lora)))
    return sum(math.prod(tensor.shape) for tensor in tensors) * numpy.dtype(RAW[dtype]).itemsize


def _together(
    rows: StoredRows, matrices: Mapping[str, int], adapted: Sequence[str], rank: int
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """A and B of one layer of theirs, of the adapters that are ours."""
    a = numpy.concatenate([stored_matrix(rows, f"{matrix}.lora_a") for matrix in adapted])
    b, at = numpy.zeros((sum(matrices.values()), len(a)), numpy.float32), 0
    for matrix, height in matrices.items():
        if matrix in adapted:
            place = adapted.index(matrix) * rank
            b[at : at + height, place : place + rank] = stored_matrix(rows, f"{matrix}.lora_b")
        at += height
    return a, b


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _spec_of(checkpoint: Location, manifest: Manifest) -> JobSpec:
    try:
        return parse_job_spec(manifest.spec)
    except SpecError as error:
        raise CheckpointError(f"{checkpoint} belongs to a job that this release does not support: {error}") from error


def _source_dtype(spec: JobSpec) -> str:
    """The dtype of the weights that the job began with, as torch calls it."""
    source = source_config(spec)
    named = None if source is None else source.get("dtype", source.get("torch_dtype"))
    return named if isinstance(named, str) and named in DTYPES.values() else "float32"


def _our_tensors(source: Source) -> list[HuggingFaceTensor]:
    """All parameters but those of adapters, which are merged, and what the choice of experts adds to scores."""
    stored = source.contents.tensors
    names = [name for name in stored if name.startswith("model.") and not is_adapter(name)]
    shapes = {name.removeprefix("model."): stored[name].shape for name in names}
    biases = source.manifest.small.get(ROUTER_BIAS, [])
    others = [replace(unchanged(ROUTER_BIAS, ROUTER_BIAS, len(biases)), dtype="float32")] if biases else []
    return [*(unchanged(name, name, *shape) for name, shape in shapes.items()), *others]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends without an error. At most an empty folder may
    be there before. What killed attempts have left next to it is removed; what others are still writing is not.

    Raises WeightsError if something is there, OSError.
    """
    _check(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_UNFINISHED, dir=target.parent))
    try:
        lock = _locked(folder)
        assert lock is not None, "no other process knows the folder"
        try:
            yield folder
            folder.chmod(0o777 & ~_umask())
            _sync(folder)
            _check(target)
            folder.rename(target)  # replaces an empty folder, nothing else
            _sync(target.parent)
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise WeightsError(f"{target} already exists: choose another folder, or remove it")


def _remove_leftovers(target: Path) -> None:
    for folder in target.parent.glob(f".{_escaped(target.name)}.*{_UNFINISHED}"):
        lock = None
        with suppress(OSError):
            lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _escaped(name: str) -> str:
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, which ends with the process; None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _umask() -> int:
    """The umask of this process; the only way to read it is to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status. Errors of the user are one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m manta.workers.weights.export", description="Export a checkpoint's weights."
    )
    parser.add_argument(
        "checkpoint", help="a checkpoint, or a folder or s3:// URL of several, whose newest complete one is used"
    )
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="folder to create; it must not exist yet"
    )
    parser.add_argument("--format", choices=("hf", "safetensors", "adapter"), default="hf")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="default: that of the weights that the job started from, or fp32"
    )
    parser.add_argument(
        "--shard-bytes", type=int, default=SHARD_BYTES, help=f"maximum size of a file in bytes (default: {SHARD_BYTES})"
    )
    parser.add_argument("--json", action="store_true", help="print progress and result as lines of JSON")
    options = parser.parse_args(arguments)
    progress = _print_progress if options.json else lambda done, of: None
    try:
        target = options.to.absolute()
        checkpoint = str(checkpoint_at(parse_location(options.checkpoint)))
        with cleaning_up_when_terminated():
            done = export(checkpoint, target, options.format, options.dtype, options.shard_bytes, progress)
    except MantaError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{options.to} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(done.to_json(target)))
    else:
        what = f"{done.files} files, {done.bytes} bytes, {done.dtype}"
        print(f"exported the weights of step {done.manifest.step} to {target}: {what}{done.sentence}")
    return 0


def _print_progress(done: int, of: int) -> None:
    print(json.dumps({"done": done, "of": of}), flush=True)
