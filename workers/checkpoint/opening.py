"""Opens files of a durable checkpoint for reading: every byte is verified, and a problem with a file is a sentence that
names it. No torch, so that programs that only look at a checkpoint, or copy it, start at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workers.checkpoint.catalog import Manifest
from workers.checkpoint.checksums import CheckedFile, checked, damaged
from workers.checkpoint.contents import CONTENTS, Contents
from workers.checkpoint.old_metadata import METADATA, read_metadata
from workers.errors import CheckpointError
from workers.storage.places import Place, place_of


@contextmanager
def opened(file: Place, manifest: Manifest) -> Iterator[CheckedFile]:
    """A file of a checkpoint, verified while it is read. Problems with its content name it."""
    with checked(file, manifest.sums(file)) as stream, explained(file, manifest, stream):
        yield stream


@contextmanager
def explained(file: Place, manifest: Manifest, stream: CheckedFile) -> Iterator[None]:
    """Within the block, any problem with the content of `file`, open as `stream`, becomes a CheckpointError naming
    it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if manifest.blocks is None:  # these bytes were never verified
            raise damaged(file, f"makes no sense at byte {stream.tell()} ({sentence(error)})") from None
        raise CheckpointError(f"{file} is as it was written, but cannot be read: {sentence(error)}") from error


def read_contents(path: str | Place, manifest: Manifest) -> Contents:
    """The contents of the checkpoint at `path` with that `manifest`; those of an older checkpoint are in `.metadata`.
    Raises CheckpointError."""
    name = CONTENTS if CONTENTS in manifest.files else METADATA
    with opened(place_of(path) / name, manifest) as stream:
        contents = Contents.from_bytes(stream.read()) if name == CONTENTS else read_metadata(stream)
        contents.check(manifest)
    return contents


def sentence(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
