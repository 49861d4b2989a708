"""Writes tensors as safetensors files, one tensor in memory at a time, with an index where there are several files.

Format: workers/weights/folder.py. Names of files and index are those that transformers looks for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from workers.weights.folder import INDEX, ONE_FILE

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Of the dtypes that are written."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class NewTensor:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]


def plan_files(tensors: Sequence[NewTensor], dtype: torch.dtype, most_bytes: int) -> dict[str, list[NewTensor]]:
    """Which file holds which tensors, in their order: as few files as hold at most `most_bytes` each, or one tensor
    that has more."""
    shards: list[list[NewTensor]] = [[]]
    room = most_bytes
    for tensor in tensors:
        size = math.prod(tensor.shape) * dtype.itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(tensor)
        room -= size
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    stem = ONE_FILE.removesuffix(".safetensors")
    return {f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def write_files(
    folder: Path,
    files: dict[str, list[NewTensor]],
    dtype: torch.dtype,
    values: Callable[[str], torch.Tensor],
    wrote: Callable[[int], object],
) -> None:
    """Write `files` (by `plan_files`) into `folder`, and the index where there are several. `values` gives a tensor by
    its name, asked for in their order; `wrote` is told the bytes of each piece. Everything is on the disk when this
    returns. Raises OSError, and what `values` raises."""
    for name, tensors in files.items():
        with (folder / name).open("xb") as stream:
            stream.write(_header(tensors, dtype))
            for tensor in tensors:
                _write(stream, values(tensor.name), tensor, dtype, wrote)
            put_on_disk(stream)
    if len(files) > 1:
        sizes = [math.prod(tensor.shape) for tensors in files.values() for tensor in tensors]
        index = {
            "metadata": {"total_size": sum(sizes) * dtype.itemsize, "total_parameters": sum(sizes)},
            "weight_map": {tensor.name: file for file, tensors in files.items() for tensor in tensors},
        }
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _header(tensors: Iterable[NewTensor], dtype: torch.dtype) -> bytes:
    at, header = 0, {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        end = at + math.prod(tensor.shape) * dtype.itemsize
        header[tensor.name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}  # type: ignore[dict-item]
        at = end
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content


_PIECE_BYTES = 16 * 2**20


def _write(
    stream: IO[bytes],
    values: torch.Tensor,
    tensor: NewTensor,
    dtype: torch.dtype,
    wrote: Callable[[int], object],
) -> None:
    """A function of its own, at whose end nothing holds the values' memory any more."""
    if tuple(values.shape) != tensor.shape or values.dtype != dtype:
        raise ValueError(f"{tensor.name} is {values.dtype}{tuple(values.shape)}, not {dtype}{tensor.shape}")
    flat = values.contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(flat), _PIECE_BYTES):
        piece = flat[start : start + _PIECE_BYTES]
        stream.write(piece)
        wrote(len(piece))


def write_text(path: Path, text: str) -> None:
    """A new file with this text, on the disk when this returns. Raises OSError."""
    with path.open("xb") as stream:
        stream.write(text.encode())
        put_on_disk(stream)


def put_on_disk(stream: IO[bytes]) -> None:
    """Return once all that was written to the file is on the disk. Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())
