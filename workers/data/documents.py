"""Iterates over the documents of a section of a corpus; errors name the file and the position in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from manta.workers.config import DataConfig
from manta.workers.data.read_errors import read_error
from manta.workers.data.rows import kind_of, objects_of, rows_of, texts_of_rows
from manta.workers.data.shards import CHUNK_BYTES, Section, pieces_of
from manta.workers.data.sources import kind_of_file
from manta.workers.errors import DataError
from manta.workers.system.regular_files import open_regular

if TYPE_CHECKING:
    from manta.workers.data.chat_template import ChatTemplate
    from manta.workers.data.conversations import Conversation

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
    begins: bool = True
    """Whether the document begins with it."""
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
    """The documents of `section`; those of source `text` come in pieces if they may be split. A document without text,
    such as null, is an empty one. `template`: for conversations, if already opened. Raises DataError."""
    if data.source == "chat":
        from manta.workers.data.chat_template import open_template
        from manta.workers.data.conversations import as_text

        template = template or open_template(data)
        for conversation in conversations_of(section, data):
            text, learned = as_text(conversation, template, data.learns_answers)
            yield replace(_checked(text, conversation.where), learned=learned)
    elif data.source == "parquet":
        for where, text in texts_of_rows(section, data.key):
            yield _checked(text, where)
    elif data.source == "jsonl":
        for where, entry in objects_of(section, data.key):
            yield _checked(_text_in(entry, data.key, where), where)
    else:
        yield from _pieces(section, cuts_are_exact)


def conversations_of(section: Section, data: DataConfig) -> Iterator[Conversation]:
    """The conversations of `section`. Raises DataError."""
    from manta.workers.data.conversations import COLUMNS, conversation_in

    is_parquet = kind_of_file(section.path, data.source) == "parquet"
    more = [name for name in COLUMNS if name != data.key]
    for where, row in rows_of(section, data.key, more) if is_parquet else objects_of(section, data.key):
        yield conversation_in(row, data.key, where)


def raw_pieces_of(section: Section) -> Iterator[Raw]:
    """The bytes of a section of source `text`: one token each, whatever they mean. Raises DataError."""
    content = _content(section)
    for start in range(0, len(content), CHUNK_BYTES):
        stop = start + CHUNK_BYTES
        yield Raw(content[start:stop], ends=section.ends and stop >= len(content))


def _checked(text: str, where: str) -> Text:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start + 1} of the text is half of a surrogate pair") from error
    return Text(text, ends=True, where=where)


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
        begins, position = position == 0, position + len(piece)
        yield Text(text, section.ends and position == section.start + len(content), section.path, begins)


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


def _text_in(entry: Mapping[str, Any], key: str, where: str) -> str:
    if key not in entry:
        there = ", ".join(map(repr, list(entry)[:10])) or "none"
        raise DataError(f"{where}: no key {key!r}, only {there}: set data.text_key")
    if not isinstance(entry[key], str | None):
        raise DataError(f"{where}: {key!r} holds {kind_of(entry[key])}, not text")
    return entry[key] or ""
