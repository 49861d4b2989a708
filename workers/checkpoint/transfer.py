"""Copies a durable checkpoint from one place to another, and verifies each byte on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

from manta.workers.checkpoint.catalog import MANIFEST, Manifest, manifest_of, seal, while_read
from manta.workers.checkpoint.checksums import SummedFiles, checked, damaged
from manta.workers.errors import CheckpointError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location

CHUNK_BYTES = 1024 * 1024


class LocationExists(CheckpointError):
    """Something exists where a checkpoint was to be copied to."""


def copy(source: Location, target: Location, progress: Callable[[int, int], None] = lambda done, of: None) -> Manifest:
    """Copy the complete checkpoint at `source` to `target`, where nothing may exist yet except the remains of an
    interrupted copy, which are replaced. `progress` is called with (bytes copied, total bytes).

    Like any checkpoint the copy gets its manifest last, so it is complete or unusable. If `source` cannot be copied,
    nothing is left of it. Raises DamagedCheckpoint, UnreadableCheckpoint, RemovedCheckpoint, LocationExists, OSError.
    """
    manifest = manifest_of(source)
    _clear(target, manifest.files)
    try:
        with while_read(source):
            _copy_files(source, target, manifest, progress)
    except CheckpointError:
        with contextlib.suppress(OSError, CheckpointError):
            _clear(target, manifest.files)
            if isinstance(target, Path):
                target.rmdir()
        raise
    seal(target, manifest)
    return manifest


def _copy_files(source: Location, target: Location, manifest: Manifest, progress: Callable[[int, int], None]) -> None:
    files = SummedFiles(block_bytes=manifest.block_bytes)
    files_of(target).make_folder(target)
    done = 0
    for name in manifest.files:
        sums = manifest.sums(source / name)
        with checked(source / name, sums) as stream, files.create(target / name) as new:
            stream.expect([(0, sums.size)])
            while piece := stream.read(CHUNK_BYTES):
                new.write(piece)
                done += len(piece)
                progress(done, manifest.bytes)
        if sums.blocks is not None and files.sums[name].blocks != sums.blocks:
            raise damaged(target / name, "is not what was read")


def _clear(target: Location, ours: Collection[str]) -> None:
    """Remove the remains of an interrupted copy of files called `ours`; nothing else is ever removed. Raises
    LocationExists."""
    files = files_of(target)
    left = set(files.names(target)) if files.is_there(target) else set()
    if not left <= {*ours, f".{MANIFEST}"}:
        raise LocationExists(f"{target} already exists: choose another folder, or remove it")
    for name in left:
        files.remove(target / name)
