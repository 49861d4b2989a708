"""Conversion between texts and token ids when a trained model is used."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.config import JobSpec
from workers.data.tokenizer import (
    FILE_NAME,
    ByteTokenizer,
    FileTokenizer,
    Marks,
    Spans,
    file_tokenizer,
    open_tokenizer,
    tokenizer_path,
)
from workers.errors import DataError
from workers.storage.files import files_of
from workers.storage.places import Place


class TextTokens(Protocol):
    """Conversion in both directions."""

    @property
    def end(self) -> int | None:
        """The token that ends a document; None if there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def encode_marked(self, text: str, spans: Spans) -> tuple[list[int], Marks]:
        """Token ids of a text, and which of them contain a character of its `spans`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        ...


@dataclass(frozen=True)
class Bytes:
    """One token per byte of UTF-8."""

    end: int | None = None

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def encode_marked(self, text: str, spans: Spans) -> tuple[list[int], Marks]:
        """The bytes, and which of them belong to characters in `spans`."""
        ((content, marks),) = ByteTokenizer().encode_marked([text], [spans])
        return list(content), marks

    def decode(self, tokens: Sequence[int]) -> str:
        """Invalid UTF-8, such as half a character at the end, is shown as a replacement character."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokens:
    """The tokens of a tokenizer.json."""

    def __init__(self, tokenizer: FileTokenizer):
        self._tokenizer, self.end = tokenizer, tokenizer.end_of_document

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end token."""
        return list(self._tokenizer.encode([text])[0])

    def encode_marked(self, text: str, spans: Spans) -> tuple[list[int], Marks]:
        """Token ids of a text, and which of them contain a character of its `spans`."""
        return self._tokenizer.encode_marked([text], [spans])[0]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self._tokenizer.decode(tokens)


def text_tokens_of(spec: JobSpec, checkpoint: Place) -> TextTokens:
    """The tokenizer that a job was trained with: the one stored with the record of its corpus, otherwise the file that
    its spec names. Raises DataError if there is none."""
    data = spec.data
    if data.tokenizer == "bytes" and data.source != "megatron":
        return Bytes(open_tokenizer(data).end_of_document)
    for folder in (checkpoint.parent, checkpoint.parent.parent):  # of the engine alone; of a job of the service
        with contextlib.suppress(OSError):
            content = files_of(folder).read(folder / FILE_NAME)
            return FileTokens(file_tokenizer(data, str(folder / FILE_NAME), content))
    if data.tokenizer_file is None:
        raise DataError(f"the tokenizer of this job is not kept next to {checkpoint}: there is no {FILE_NAME}")
    return FileTokens(file_tokenizer(data, tokenizer_path(data.tokenizer_file)))
