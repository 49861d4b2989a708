"""Opens files of a durable checkpoint for reading: every byte is verified, and a problem with a file is a sentence that
names it. No torch, so that programs that only look at a checkpoint, or copy it, start at once."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from manta.workers.checkpoint.catalog import Manifest
from manta.workers.checkpoint.checksums import CheckedFile, checked, damaged
from manta.workers.checkpoint.contents import CONTENTS, Contents, StoredRectangle, StoredTensor, checked_types
from manta.workers.errors import CheckpointError, first_line_of
from manta.workers.storage.locations import Location, parse_location

METADATA = ".metadata"

DTYPES = {"float64", "float32", "float16", "bfloat16"}
"""Dtypes of tensors in a checkpoint, by torch's names."""
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip
"""All names in the pickle of a Metadata except torch.Size and the dtypes, by module."""


@contextmanager
def opened(file: Location, manifest: Manifest) -> Iterator[CheckedFile]:
    """A file of a checkpoint, verified while it is read. Problems with its content name it."""
    with checked(file, manifest.sums(file)) as stream, explained(file, manifest, stream):
        yield stream


@contextmanager
def explained(file: Location, manifest: Manifest, stream: CheckedFile) -> Iterator[None]:
    """Within the block, any problem with the content of `file`, open as `stream`, becomes a CheckpointError naming
    it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if manifest.blocks is None:  # these bytes were never verified
            raise damaged(file, f"makes no sense at byte {stream.tell()} ({first_line_of(error)})") from None
        raise CheckpointError(f"{file} is as it was written, but cannot be read: {first_line_of(error)}") from error


def read_contents(path: str | Location, manifest: Manifest) -> Contents:
    """The contents of the checkpoint at `path` with that `manifest`, parameters that are not trained included. Raises
    CheckpointError."""
    contents = read_own_contents(path, manifest)
    if manifest.frozen is not None:
        frozen = read_own_contents(manifest.frozen.beside(parse_location(path)), manifest.frozen.manifest)
        contents.tensors.add(frozen.tensors)
        contents.check(manifest)
    return contents


def read_own_contents(path: str | Location, manifest: Manifest) -> Contents:
    """What lies in the folder `path` with that `manifest`; contents of an older checkpoint are in `.metadata`. Raises
    CheckpointError."""
    name = CONTENTS if CONTENTS in manifest.files else METADATA
    with opened(parse_location(path) / name, manifest) as stream:
        contents = Contents.from_bytes(stream.read()) if name == CONTENTS else read_metadata(stream)
        contents.check(manifest)
    return contents


def read_metadata(stream: io.RawIOBase) -> Contents:
    """The contents of a `.metadata` of torch.distributed.checkpoint, for checkpoints that are older than
    `contents.json`.

    It is a pickle, which torch would load in a way that can execute anything. Here the few names that a Metadata needs
    are replaced by stand-ins. Raises pickle.UnpicklingError for any other name, and other errors for malformed bytes.
    """
    document = _Unpickler(stream).load()
    if not isinstance(document, _Record):
        raise TypeError(f"it holds a {type(document).__name__}")
    places = {
        (key.fields["fqn"], tuple(key.fields["offset"])): place.fields
        for key, place in document.fields["storage_data"].items()
    }
    tensors = {}
    for name, entry in document.fields["state_dict_metadata"].items():
        chunks = [(tuple(each.fields["offsets"]), tuple(each.fields["sizes"])) for each in entry.fields["chunks"]]
        rectangles = tuple(
            StoredRectangle(offsets, sizes, place["relative_path"], place["offset"], place["length"])
            for offsets, sizes in chunks
            for place in [places[name, offsets]]
        )
        dtype = entry.fields["properties"].state[0]
        tensors[name] = StoredTensor(tuple(entry.fields["size"]), dtype, rectangles)
    return checked_types(tensors)


class _Record:
    """Stands in for an instance of one of the classes of a Metadata."""

    def __init__(self, *arguments: Any):
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> Mapping[str, Any]:
        """By name."""
        if not isinstance(self.state, dict):
            raise TypeError("a record of it has no fields")
        return self.state


class _Unpickler(pickle.Unpickler):
    """Resolves only the names of a Metadata, as stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in. Raises pickle.UnpicklingError for any other name."""
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {})  # a new class, so that the pickle can modify no other one
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and name in DTYPES:
            return name
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no {METADATA} needs, and was refused")
