"""Divides a corpus into shards, which are tokenized separately. A function of the files alone, so that the same files
have the same shards on every machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manta.workers.config import DataConfig
from manta.workers.data.read_errors import read_error
from manta.workers.data.sources import CorpusFile, is_compressed, kind_of_file
from manta.workers.system.regular_files import open_regular

SHARD_BYTES = 2 * 2**20
MAX_SHARDS = 4096
CHUNK_BYTES = 2**20
"""Bytes of a text that are encoded at once, if it may be split."""
_BLANK = rb"[\x00-\x20\x7f]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
"""A character that is not visible, in UTF-8."""
_NOT_AFTER_BLANK = b"".join(b"(?<!" + kind + b")" for kind in _BLANK.split(b"|"))
_VISIBLE = rb"(?!" + _BLANK + rb")(?=[\x21-\xff])"
CUT = re.compile(rb"\n(?= " + _VISIBLE + rb")|" + _NOT_AFTER_BLANK + rb"\n" + _VISIBLE)
"""Where a text may be split: after a line feed followed by a space and a visible character, or between two visible
characters. The rules by which byte-level tokenizers (GPT-2's, those of tiktoken) split text into words before making
tokens allow no word across that, and none looks further."""
_CONTEXT = 3
"""Bytes before a line feed that decide whether it is a place to split."""
_WINDOW = 2**16


@dataclass(frozen=True)
class Section:
    """A part of a file."""

    path: str
    start: int
    """First byte; for parquet, the first row group."""
    stop: int
    """One past the last byte or row group."""
    bytes: int
    """Size of the section in the file, for progress."""
    ends: bool = True
    """Whether a document ends with it, if files are documents."""


Shard = tuple[Section, ...]
"""Sections that one process turns into one file of tokens."""


def shards_of(files: Sequence[CorpusFile], data: DataConfig, cuts_are_exact: bool) -> list[Shard]:
    """All of `files`, in order. `cuts_are_exact`: whether texts may be cut. Raises DataError."""
    target = max(SHARD_BYTES, sum(file.size for file in files) // MAX_SHARDS)
    shards: list[Shard] = []
    waiting: list[Section] = []
    size = 0
    for section in (each for file in files for each in _sections(file, data, target, cuts_are_exact)):
        waiting.append(section)
        size += section.bytes
        if size >= target:
            shards.append(tuple(waiting))
            waiting, size = [], 0
    return [*shards, tuple(waiting)] if waiting else shards


def pieces_of(text: bytes, size: int) -> Iterator[bytes]:
    """`text` divided into pieces of about `size` bytes, where it may be split; a longer line stays whole."""
    start = 0
    while start < len(text):
        match = CUT.search(text, start + size)
        stop = len(text) if match is None else match.end()
        yield text[start:stop]
        start = stop


def _sections(file: CorpusFile, data: DataConfig, target: int, cuts_are_exact: bool) -> Iterator[Section]:
    from manta.workers.data.rows import is_array

    kind = kind_of_file(file.path, data.source)
    if kind == "parquet":
        yield from _row_groups(file, target)
    elif kind == "jsonl" and not is_compressed(file.path) and not is_array(file.path):
        yield from _between(file, target, re.compile(rb"\n"))
    elif data.source in ("text", "python-stdlib") and cuts_are_exact:
        yield from _between(file, target, CUT)
    else:
        yield Section(file.path, 0, file.size, file.size)


def _between(file: CorpusFile, target: int, cut: re.Pattern[bytes]) -> Iterator[Section]:
    """Sections of about `target` bytes, from one split to another."""
    start = 0
    while start < file.size:
        is_last = file.size - start <= 3 * target // 2
        stop = file.size if is_last else _cut_after(file, start + max(target, _CONTEXT), cut)
        yield Section(file.path, start, stop, stop - start, ends=stop == file.size)
        start = stop


def _cut_after(file: CorpusFile, position: int, cut: re.Pattern[bytes]) -> int:
    try:
        return _cut_in(file, position, cut)
    except OSError as error:
        raise read_error(file.path, error) from error


def _cut_in(file: CorpusFile, position: int, cut: re.Pattern[bytes]) -> int:
    with open_regular(file.path) as content:
        while position < file.size:
            content.seek(position - _CONTEXT)
            window = content.read(_CONTEXT + _WINDOW)
            match = cut.search(window, _CONTEXT)
            if match is not None:
                return min(position - _CONTEXT + match.end(), file.size)
            position += max(1, len(window) - 2 * _CONTEXT)  # what follows a line feed may be in the next window
    return file.size


def _row_groups(file: CorpusFile, target: int) -> Iterator[Section]:
    if file.size <= target:
        yield Section(file.path, 0, -1, file.size)  # all, however many there are
        return
    from manta.workers.data.rows import row_group_count

    count = row_group_count(file.path)
    groups = max(1, count * target // file.size)
    for start in range(0, count, groups):
        stop = min(start + groups, count)
        yield Section(file.path, start, stop, file.size * (stop - start) // count)
