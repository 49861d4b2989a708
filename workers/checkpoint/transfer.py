"""Copies a durable checkpoint from one place to another, and verifies each byte on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from manta.workers.checkpoint.catalog import FROZEN_WEIGHTS, MANIFEST, Manifest, manifest_of, seal, while_read
from manta.workers.checkpoint.checksums import SummedFiles, checked, damaged
from manta.workers.checkpoint.contents import CONTENTS
from manta.workers.checkpoint.dcp_metadata import MAX_IN_METADATA, metadata_file
from manta.workers.checkpoint.opening import METADATA, read_contents
from manta.workers.errors import CheckpointError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location

CHUNK_BYTES = 1024 * 1024


class LocationExists(CheckpointError):
    """Something exists where a checkpoint was to be copied to."""


def copy(source: Location, target: Location, progress: Callable[[int, int], None] = lambda done, of: None) -> Manifest:
    """Copy the complete checkpoint at `source` to `target`, where nothing may exist yet except the remains of an
    interrupted copy, which are replaced. `progress` is called with (bytes copied, total bytes). Returns the manifest of
    the copy, which holds by itself what the checkpoint refers to.

    Like any checkpoint the copy gets its manifest last, so it is complete or unusable. If `source` cannot be copied,
    nothing is left of it. Raises DamagedCheckpoint, UnreadableCheckpoint, RemovedCheckpoint, LocationExists, OSError.
    """
    manifest = manifest_of(source)
    names = {*manifest.data_files, METADATA}
    _clear(target, names)
    try:
        with while_read(source):
            copied = _copy_files(source, target, manifest, progress)
    except CheckpointError:
        with contextlib.suppress(OSError, CheckpointError):
            _clear(target, names)
            if isinstance(target, Path):
                target.rmdir()
        raise
    seal(target, copied)
    return copied


def _copy_files(
    source: Location, target: Location, manifest: Manifest, progress: Callable[[int, int], None]
) -> Manifest:
    """Returns the copy's manifest."""
    files = SummedFiles(block_bytes=manifest.block_bytes)
    files_of(target).make_folder(target)
    made = {} if manifest.frozen is None else _with_frozen(source, manifest)
    done = 0
    for name in manifest.data_files:
        if name in made or name == FROZEN_WEIGHTS:
            continue
        place = manifest.place(source, name)
        sums = manifest.sums(place)
        with checked(place, sums) as stream, files.create(target / name) as new:
            stream.expect([(0, sums.size)])
            while piece := stream.read(CHUNK_BYTES):
                new.write(piece)
                done += len(piece)
                progress(done, manifest.all_bytes)
        if sums.block_bytes == manifest.block_bytes and sums.blocks not in (None, files.sums[name].blocks):
            raise damaged(target / name, "is not what was read")
    if manifest.frozen is None:
        return manifest
    for name, content in made.items():
        with files.create(target / name) as new:
            new.write(content)
    sizes = {name: each.size for name, each in sorted(files.sums.items())}
    blocks = {name: list(each.blocks or ()) for name, each in sorted(files.sums.items())}
    return replace(manifest, files=sizes, blocks=blocks, frozen=None)


def _with_frozen(source: Location, manifest: Manifest) -> dict[str, bytes]:
    """The files of a copy that say what is in it, where the checkpoint at `source` does so in two folders."""
    contents = read_contents(source, manifest)
    made = {CONTENTS: contents.to_bytes()}
    if sum(len(each.rectangles) for each in contents.tensors.values()) <= MAX_IN_METADATA:
        made[METADATA] = metadata_file(contents)
    return made


def _clear(target: Location, ours: Collection[str]) -> None:
    """Remove the remains of an interrupted copy of files called `ours`; nothing else is ever removed. Raises
    LocationExists."""
    files = files_of(target)
    left = set(files.names(target)) if files.is_there(target) else set()
    if not left <= {*ours, f".{MANIFEST}"}:
        raise LocationExists(f"{target} already exists: choose another folder, or remove it")
    for name in left:
        files.remove(target / name)
