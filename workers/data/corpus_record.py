"""Records a corpus as it was when its job began, so that it stays the same for the whole job: a file that grew, shrank,
disappeared, was added or replaced since then is reported as an error instead of changing the order of samples."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from manta.workers.data.read_errors import read_error
from manta.workers.data.sources import CorpusFile
from manta.workers.data.unchanged_file import ADVICE, digest_of
from manta.workers.errors import DataError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location
from manta.workers.system.daemon_threads import answered_within
from manta.workers.system.regular_files import open_regular

T = TypeVar("T")

log = logging.getLogger(__name__)

FILE_NAME = "corpus.json"
ANSWER_SECONDS = 5.0
"""Seconds after which a place counts as not answering when the record is read or written. No rank waits longer: a rank
that replaces another would keep all of them waiting."""


def as_recorded(files: Sequence[CorpusFile], record: Location, write: bool) -> list[CorpusFile]:
    """`files` with the digests in `record`, which are compared when a file is first read.

    `write`: create the record if there is none. A record that cannot be read or written now does not prevent training:
    `files` are then returned unchanged, and one that makes no sense is logged. Raises DataError if the files differ
    from the record's.
    """
    try:
        recorded = [CorpusFile(**entry) for entry in json.loads(_read(record))["files"]]
    except FileNotFoundError:
        return _recorded_now(files, record) if write else list(files)
    except OSError:
        return list(files)
    except (ValueError, TypeError, KeyError):
        log.warning("%s makes no sense: whether the corpus has changed since the job began is not checked", record)
        return list(files)
    now = {file.path: file for file in files}
    for before in recorded:
        _compare(now.pop(before.path, None), before)
    for path in now:
        raise DataError(f"{path} was not there when the job began: take it away, or submit a new job")
    return recorded


def with_digests(files: Sequence[CorpusFile]) -> list[CorpusFile]:
    """`files` with digests of their present content. Raises DataError."""
    return [replace(file, digest=_present_digest(file)) for file in files]


def as_recorded_tokens(tokens: dict[str, Any], record: Location, write: bool) -> bool:
    """Compare `tokens` (names and digests of a job's tokenizer and of its parts' tokens) with those in `record`; with
    `write`, add missing ones. Returns whether any were added. Raises DataError if they differ."""
    try:
        content = json.loads(_read(record))
        before = dict(content.get("tokens", {}))
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    for name, digest in tokens.items():
        if before.get(name, digest) != digest:
            raise DataError(f"{name} is not what it was when the job began: {ADVICE}")
    if not write or not tokens.keys() - before.keys():
        return False
    with contextlib.suppress(OSError):
        _write(record, {**content, "tokens": {**before, **tokens}})
    return True


def _read(record: Location) -> bytes:
    return _answered(lambda: files_of(record).read(record))


def _write(record: Location, content: dict[str, Any]) -> None:
    def write() -> None:
        files_of(record).make_folder(record.parent)
        files_of(record).write_atomically(record, json.dumps(content).encode())

    _answered(write)


def _answered(ask: Callable[[], T]) -> T:
    """The result of accessing a place. Raises OSError, also if that takes too long."""
    return answered_within(ANSWER_SECONDS, "record of the corpus", ask)


def _compare(file: CorpusFile | None, before: CorpusFile) -> None:
    if file is None:
        raise DataError(f"{before.path} is gone or empty, and was not when the job began: {ADVICE}")
    if file.size != before.size:
        sizes = f"{file.size} bytes, and had {before.size} when the job began"
        raise DataError(f"{file.path} has {sizes}: {ADVICE}")
    if None not in (file.digest, before.digest) and file.digest != before.digest:
        raise DataError(f"{file.path} is not what it was when the job began: {ADVICE}")


def _recorded_now(files: Sequence[CorpusFile], record: Location) -> list[CorpusFile]:
    recorded = with_digests(files)
    entries = [asdict(file) for file in recorded]
    with contextlib.suppress(OSError):  # a full disk: the next start records it
        _write(record, {"files": entries})
    return recorded


def _present_digest(file: CorpusFile) -> str:
    try:
        with open_regular(file.path) as content:
            return digest_of(content.fileno(), file.size)
    except OSError as error:
        raise read_error(file.path, error) from error
