"""Iterates over the documents of a section of a corpus; errors name the file and the position in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from manta.workers.config import DataConfig
from manta.workers.data.read_errors import read_error
from manta.workers.data.rows import kind_of, lines_of, object_in, rows_of, texts_of_rows
from manta.workers.data.shards import CHUNK_BYTES, Section, pieces_of
from manta.workers.data.sources import is_compressed, kind_of_file
from manta.workers.errors import DataError
from manta.workers.system.regular_files import open_regular

if TYPE_CHECKING:
    from manta.workers.data.chat_template import ChatTemplate, Conversation

MAX_UNSPLIT_BYTES = 2**30
"""Maximum size of a text that must not be split: tokenizing it takes up to a hundred times as much memory."""


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one."""

    text: str
    ends: bool
    """Whether the document ends with it."""
    where: str
    """File and position, for messages."""
    learned: tuple[tuple[int, int], ...] | None = None
    """Conversations only: parts to be learned, each by its first character and one past its last."""


@dataclass(frozen=True)
class Raw:
    """Like `Text`, for bytes that are not decoded."""

    content: bytes
    ends: bool


def texts_of(
    section: Section, data: DataConfig, cuts_are_exact: bool, template: ChatTemplate | None = None
) -> Iterator[Text]:
    """The documents of `section`; those of source `text` come in pieces if they may be split. Empty documents are left
    out. `template`: for conversations, if already opened. Raises DataError."""
    if data.source == "chat":
        from manta.workers.data.chat_template import as_text, open_template

        template = template or open_template(data)
        for conversation in conversations_of(section, data):
            text, learned = as_text(conversation, template, data.learns_answers)
            for each in _checked(text, conversation.where):
                yield replace(each, learned=learned)
    elif data.source == "parquet":
        for where, text in texts_of_rows(section, data.key):
            yield from _checked(text, where)
    elif data.source == "jsonl":
        for where, line in _lines(section):
            yield from _checked(_text_in(line, data.key, where), where)
    else:
        yield from _pieces(section, cuts_are_exact)


def conversations_of(section: Section, data: DataConfig) -> Iterator[Conversation]:
    """The conversations of `section`. Raises DataError."""
    from manta.workers.data.chat_template import conversation_in

    if kind_of_file(section.path, data.source) == "parquet":
        for where, row in rows_of(section, data.key, ("tools",)):
            yield conversation_in(row, data.key, where)
    else:
        for where, line in _lines(section):
            yield conversation_in(object_in(line, data.key, where), data.key, where)


def raw_pieces_of(section: Section) -> Iterator[Raw]:
    """The bytes of a section of source `text`: one token each, whatever they mean. Raises DataError."""
    content = _content(section)
    for start in range(0, len(content), CHUNK_BYTES):
        stop = start + CHUNK_BYTES
        yield Raw(content[start:stop], ends=section.ends and stop >= len(content))


def _checked(text: str, where: str) -> Iterator[Text]:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start + 1} of the text is half of a surrogate pair") from error
    if text:
        yield Text(text, ends=True, where=where)


def _pieces(section: Section, cuts_are_exact: bool) -> Iterator[Text]:
    content = _content(section)
    if not cuts_are_exact and len(content) > MAX_UNSPLIT_BYTES:
        raise DataError(
            f"{section.path} is one document of {len(content)} bytes, and this tokenizer makes other tokens of a text "
            f"that is cut: give it as several files of at most {MAX_UNSPLIT_BYTES} bytes, or as jsonl"
        )
    position = section.start
    for piece in pieces_of(content, CHUNK_BYTES) if cuts_are_exact else [content] * bool(content):
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
        with open_regular(section.path) as file:
            file.seek(section.start)
            content = file.read(section.stop - section.start)
    except OSError as error:
        raise read_error(section.path, error) from error
    if len(content) < section.stop - section.start:
        raise DataError(f"{section.path} became shorter while it was being tokenized")
    return content


def _lines(section: Section) -> Iterator[tuple[str, bytes]]:
    """Each line that is not blank, and its position as text. Lines are counted from the start of the file."""
    number = _lines_before(section)
    position = section.start
    for line in lines_of(section):
        number += 1
        if line.strip():
            # In a compressed file the position is that in the decompressed text.
            yield f"{section.path}, line {number} (byte {position})", line
        position += len(line)


def _lines_before(section: Section) -> int:
    count = 0
    if section.start and not is_compressed(section.path):
        try:
            with open_regular(section.path) as file:
                left = section.start
                while left > 0 and (block := file.read(min(left, 2**20))):
                    count += block.count(b"\n")
                    left -= len(block)
        except OSError as error:
            raise read_error(section.path, error) from error
    return count


def _text_in(line: bytes, key: str, where: str) -> str:
    entry = object_in(line, key, where)
    if key not in entry:
        there = ", ".join(map(repr, list(entry)[:10])) or "none"
        raise DataError(f"{where}: no key {key!r}, only {there}: set data.text_key")
    if not isinstance(entry[key], str):
        raise DataError(f"{where}: {key!r} holds {kind_of(entry[key])}, not text")
    return entry[key]
