"""The `.metadata` of torch.distributed.checkpoint, written for torch's own readers; `old_metadata.py` reads it, where
there is nothing else.

Checkpoints of very many rectangles are saved without; `python -m workers.checkpoint.dcp_metadata CHECKPOINT` adds it.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from workers.checkpoint.catalog import manifest_of
from workers.checkpoint.contents import Contents
from workers.checkpoint.old_metadata import DTYPES, METADATA
from workers.checkpoint.opening import read_contents
from workers.errors import MantaError
from workers.protocol.json_codec import MalformedMessage
from workers.storage.files import files_of
from workers.storage.places import place_of


def metadata_of(contents: Contents) -> tuple[Metadata, list[list[WriteResult]]]:
    """What DCP's writer is finished with: tensors, and where each rectangle lies. Raises MalformedMessage."""
    tensors: dict[str, Any] = {}
    written = []
    for name, tensor in contents.tensors.items():
        if tensor.dtype not in DTYPES:
            raise MalformedMessage(f"{name} is of {tensor.dtype!r}, which no checkpoint holds")
        chunks = [ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r in tensor.rectangles]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for each in tensor.rectangles:
            place = _StorageInfo(each.file, each.at, each.bytes)
            written.append(WriteResult(MetadataIndex(name, each.offsets), each.bytes, place))
    return Metadata(state_dict_metadata=tensors), [written]


def metadata_file(path: str, contents: Contents) -> bytes:
    """The `.metadata` of the checkpoint at `path`, as DCP's writer ends with it. Raises MalformedMessage."""
    writer, memory = dcp.FileSystemWriter(path, sync_files=False), _Memory()
    writer.fs = memory
    writer.finish(*metadata_of(contents))
    return memory.content


class _Memory(FileSystem):
    """Takes the one file that a writer ends with."""

    content = b""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.BytesIO]:
        """That file."""
        stream = io.BytesIO()
        yield stream
        self.content = stream.getvalue()

    def exists(self, path: Any) -> bool:
        """There is no other."""
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        """It has no name here."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.checkpoint.dcp_metadata", description="Write a checkpoint's .metadata."
    )
    parser.add_argument("checkpoint", help="folder or s3:// URL of the checkpoint")
    place = place_of(parser.parse_args(arguments).checkpoint)
    try:
        content = metadata_file(str(place), read_contents(place, manifest_of(place)))
        files_of(place).write_whole(place / METADATA, content)
    except (MantaError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
