"""The `.metadata` of torch.distributed.checkpoint, written for torch's own readers; `opening.py` reads it in
checkpoints that have nothing else.

It is a pickle of objects of that package, whose import takes as long as torch's own. Nothing else of it is needed here,
so the pickle is assembled from its opcodes, without the classes.

Checkpoints with very many rectangles are saved without it; `python -m manta.workers.checkpoint.dcp_metadata CHECKPOINT`
adds it."""

from __future__ import annotations

import argparse
import pickle
import struct
import sys
from collections.abc import Iterable

from manta.workers.checkpoint.catalog import manifest_of
from manta.workers.checkpoint.contents import Contents, StoredRectangle, StoredTensor
from manta.workers.checkpoint.opening import DTYPES, METADATA, read_own_contents
from manta.workers.errors import MantaError
from manta.workers.protocol.json_codec import MalformedMessage
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import parse_location

MAX_IN_METADATA = 100_000
"""Most rectangles of a checkpoint for which `.metadata` is written: its readers have torch create objects of them, and
a million take minutes and gigabytes. `python -m manta.workers.checkpoint.dcp_metadata` writes it later."""
VERSION = "1.0.0"
"""Version of the format in torch."""
_RECORDS, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_NAMES = (
    (_RECORDS, "Metadata"),
    (_RECORDS, "TensorStorageMetadata"),
    (_RECORDS, "TensorProperties"),
    (_RECORDS, "_MEM_FORMAT_ENCODING"),
    (_RECORDS, "ChunkStorageMetadata"),
    (_RECORDS, "MetadataIndex"),
    (_FILES, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", dtype) for dtype in sorted(DTYPES)),
)
"""All names in the pickle, by module. The pickle begins with them; from then on each is referred to by its index
here."""
_NAMED = {name: pickle.BINGET + bytes([number]) for number, (_, name) in enumerate(_NAMES)}
_FALSE = pickle.NEWFALSE


def metadata_file(contents: Contents) -> bytes:
    """The `.metadata` of a checkpoint, equivalent to torch's own. Raises MalformedMessage."""
    tensors, places = [], []
    for name, tensor in contents.tensors.items():
        if tensor.dtype not in DTYPES:
            raise MalformedMessage(f"{name} is of {tensor.dtype!r}, which no checkpoint holds")
        tensors.append((_text(name), _tensor(tensor)))
        places += [(_index(name, rectangle), _place(rectangle)) for rectangle in tensor.rectangles]
    metadata = _record(
        "Metadata",
        state_dict_metadata=_dict(tensors),
        planner_data=pickle.NONE,
        storage_data=_dict(places),
        storage_meta=pickle.NONE,  # torch's reader creates its own
        version=_text(VERSION),
    )
    return b"".join([pickle.PROTO, b"\x02", *map(_introduced, range(len(_NAMES))), metadata, pickle.STOP])


def _introduced(number: int) -> bytes:
    """Look up a name, and store it under its number."""
    module, name = _NAMES[number]
    return pickle.GLOBAL + f"{module}\n{name}\n".encode() + pickle.BINPUT + bytes([number]) + pickle.POP


def _tensor(tensor: StoredTensor) -> bytes:
    layout, contiguous = _call("_get_layout", _text("torch.strided")), _call("_MEM_FORMAT_ENCODING", _int(0))
    properties = _tuple([_NAMED[tensor.dtype], layout, _FALSE, contiguous, _FALSE])  # requires no gradient, not pinned
    chunks = [
        _record("ChunkStorageMetadata", offsets=_size(r.offsets), sizes=_size(r.sizes)) for r in tensor.rectangles
    ]
    return _record(
        "TensorStorageMetadata",
        properties=_object("TensorProperties", properties),
        size=_size(tensor.shape),
        chunks=b"".join([pickle.EMPTY_LIST, pickle.MARK, *chunks, pickle.APPENDS]),
    )


def _index(name: str, rectangle: StoredRectangle) -> bytes:
    return _record("MetadataIndex", fqn=_text(name), index=pickle.NONE, offset=_size(rectangle.offsets))


def _place(rectangle: StoredRectangle) -> bytes:
    file, at, length = _text(rectangle.file), _int(rectangle.at), _int(rectangle.bytes)
    return _record("_StorageInfo", relative_path=file, offset=at, length=length)


def _record(name: str, **fields: bytes) -> bytes:
    return _object(name, _dict((_text(field), value) for field, value in fields.items()))


def _object(name: str, state: bytes) -> bytes:
    """An instance with this state, created without a call of its class."""
    return _NAMED[name] + pickle.EMPTY_TUPLE + pickle.NEWOBJ + state + pickle.BUILD


def _call(name: str, *arguments: bytes) -> bytes:
    return _NAMED[name] + _tuple(arguments) + pickle.REDUCE


def _size(numbers: Iterable[int]) -> bytes:
    return _call("Size", _tuple(map(_int, numbers)))


def _dict(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([pickle.EMPTY_DICT, pickle.MARK, *(key + value for key, value in items), pickle.SETITEMS])


def _tuple(values: Iterable[bytes]) -> bytes:
    return b"".join([pickle.MARK, *values, pickle.TUPLE])


def _text(text: str) -> bytes:
    encoded = text.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _int(number: int) -> bytes:
    if number < 2**31:
        return pickle.BININT + struct.pack("<i", number)
    return pickle.LONG1 + b"\x08" + struct.pack("<q", number)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m manta.workers.checkpoint.dcp_metadata", description="Write a checkpoint's .metadata."
    )
    parser.add_argument("checkpoint", help="folder or s3:// URL of the checkpoint")
    location = parse_location(parser.parse_args(arguments).checkpoint)
    try:
        content = metadata_file(read_own_contents(location, manifest_of(location)))
        files_of(location).write_atomically(location / METADATA, content)
    except (MantaError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
