"""What a checkpoint contains and where: which rectangle of which tensor lies where in which of its files.

It is written as `contents.json`, which the manifest's checksums cover like any other file, and is all that loading
needs to know. Nothing in it can run, whoever wrote it. Pure Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workers.checkpoint.catalog import Manifest
from workers.protocol.json_codec import MalformedMessage, from_json, to_json

CONTENTS = "contents.json"


@dataclass(frozen=True)
class StoredRectangle:
    """A rectangle of a tensor, and the bytes that hold it: an archive of its own, as torch.save writes one."""

    offsets: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Length in each dimension."""
    file: str
    """Name within the checkpoint's folder."""
    at: int
    """First byte in the file."""
    bytes: int
    """Bytes of the archive."""


@dataclass(frozen=True)
class StoredTensor:
    """A layout-free tensor."""

    shape: tuple[int, ...]
    dtype: str
    """As torch calls it, without the "torch."."""
    rectangles: tuple[StoredRectangle, ...]
    """Together they hold each element once."""


@dataclass(frozen=True)
class Contents:
    """All tensors of a checkpoint, or the parts of them that one rank has written."""

    tensors: dict[str, StoredTensor]
    """By name."""

    def to_bytes(self) -> bytes:
        """As the file holds it."""
        return json.dumps(to_json(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Contents:
        """From what `to_bytes` made. Raises MalformedMessage and ValueError."""
        return from_json(cls, json.loads(content))

    def check(self, manifest: Manifest) -> None:
        """Raise MalformedMessage unless all of it lies within the files of the checkpoint with this `manifest`."""
        for name, tensor in self.tensors.items():
            for each in tensor.rectangles:
                _check(name, tensor, each, manifest.files)


def _check(name: str, tensor: StoredTensor, each: StoredRectangle, files: dict[str, int]) -> None:
    if Path(each.file).name != each.file or each.file not in files:
        raise MalformedMessage(f"a part of {name} lies in {each.file!r}, which is no file of this checkpoint")
    if each.at < 0 or each.bytes < 0 or each.at + each.bytes > files[each.file]:
        raise MalformedMessage(f"a part of {name} goes beyond the end of {each.file}")
    dimensions = zip(each.offsets, each.sizes, tensor.shape, strict=False)
    fits = all(at >= 0 and length > 0 and at + length <= size for at, length, size in dimensions)
    if not fits or not len(each.offsets) == len(each.sizes) == len(tensor.shape):
        raise MalformedMessage(f"a part of {name} lies outside of its shape {tensor.shape}")


def merged(parts: Iterable[Contents]) -> Contents:
    """What all ranks have written, in their order. Raises MalformedMessage where they disagree about a tensor."""
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    rectangles: dict[str, list[StoredRectangle]] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            kind = (tensor.shape, tensor.dtype)
            if kinds.setdefault(name, kind) != kind:
                raise MalformedMessage(f"{name} is {kinds[name]} for one rank and {kind} for another")
            rectangles.setdefault(name, []).extend(tensor.rectangles)
    return Contents({name: StoredTensor(*kind, tuple(rectangles[name])) for name, kind in kinds.items()})
