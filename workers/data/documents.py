"""The documents of a section of a corpus, one after the other, and what is wrong with one: a sentence that names its
file and where in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.config import DataConfig
from workers.data.lines import lines_of
from workers.data.shards import PIECE_BYTES, Section, pieces_of
from workers.data.sources import is_compressed
from workers.errors import DataError

MOST_WHOLE_BYTES = 2**30
"""Of a text that must not be cut: its tokens take up to a hundred times as much memory while they are made."""


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one."""

    text: str
    ends: bool
    """Whether the document ends with it."""
    where: str
    """Its file and place, for messages."""


@dataclass(frozen=True)
class Raw:
    """As `Text`, of bytes that are not to be decoded."""

    content: bytes
    ends: bool


def texts_of(section: Section, data: DataConfig, cuts_are_exact: bool) -> Iterator[Text]:
    """The documents of `section`; those of `text` come in pieces where they may be cut. Documents without any text are
    left out. Raises DataError."""
    if data.source == "parquet":
        from workers.data.parquet_documents import rows_of

        for where, text in rows_of(section, data.text_key):
            yield from _checked(text, where)
    elif data.source == "jsonl":
        for where, line in _lines(section):
            yield from _checked(_text_in(line, data.text_key, where), where)
    else:
        yield from _pieces(section, cuts_are_exact)


def raw_pieces_of(section: Section) -> Iterator[Raw]:
    """The bytes of a section of `text`: one token each, whatever they mean. Raises DataError."""
    content = _content(section)
    for start in range(0, len(content), PIECE_BYTES):
        stop = start + PIECE_BYTES
        yield Raw(content[start:stop], ends=section.ends and stop >= len(content))


def _checked(text: str, where: str) -> Iterator[Text]:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start + 1} of the text is half of a surrogate pair") from error
    if text:
        yield Text(text, True, where)


def _pieces(section: Section, cuts_are_exact: bool) -> Iterator[Text]:
    content = _content(section)
    if not cuts_are_exact and len(content) > MOST_WHOLE_BYTES:
        raise DataError(
            f"{section.path} is one document of {len(content)} bytes, and this tokenizer makes other tokens of a text "
            f"that is cut: give it as several files of at most {MOST_WHOLE_BYTES} bytes, or as jsonl"
        )
    position = section.start
    for piece in pieces_of(content, PIECE_BYTES) if cuts_are_exact else [content] * bool(content):
        try:
            text = piece.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{section.path}, byte {position + error.start}: not UTF-8 ({error.reason}); convert the file, or use "
                "data.tokenizer: bytes, which takes any"
            ) from error
        position += len(piece)
        yield Text(text, section.ends and position == section.start + len(content), section.path)


def _content(section: Section) -> bytes:
    try:
        with Path(section.path).open("rb") as file:
            file.seek(section.start)
            content = file.read(section.stop - section.start)
    except OSError as error:
        raise DataError(f"cannot be read: {section.path} ({error.strerror})") from error
    if len(content) < section.stop - section.start:
        raise DataError(f"{section.path} became shorter while it was being tokenized")
    return content


def _lines(section: Section) -> Iterator[tuple[str, bytes]]:
    """Each line that is not blank, with its place in words. Lines are counted from the file's first."""
    number = _lines_before(section)
    position = section.start
    for line in lines_of(section):
        number += 1
        if line.strip():
            # Of a compressed file the position is that in what it holds.
            yield f"{section.path}, line {number} (byte {position})", line
        position += len(line)


def _lines_before(section: Section) -> int:
    count = 0
    if section.start and not is_compressed(section.path):
        try:
            with Path(section.path).open("rb") as file:
                left = section.start
                while left > 0 and (block := file.read(min(left, 2**20))):
                    count += block.count(b"\n")
                    left -= len(block)
        except OSError as error:
            raise DataError(f"cannot be read: {section.path} ({error.strerror})") from error
    return count


def _text_in(line: bytes, key: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({' '.join(str(error).split())})") from error
    if not isinstance(entry, dict):
        raise DataError(f"{where}: not an object such as {{{json.dumps(key)}: ...}}")
    if key not in entry:
        there = ", ".join(map(repr, list(entry)[:10])) or "none"
        raise DataError(f"{where}: no key {key!r}, only {there}: set data.text_key")
    if not isinstance(entry[key], str):
        raise DataError(f"{where}: {key!r} holds no text but {_kind(entry[key])}")
    return entry[key]


def _kind(value: object) -> str:
    return (
        "null"
        if value is None
        else {"dict": "an object", "list": "a list", "bool": "a boolean"}.get(type(value).__name__, "a number")
    )
