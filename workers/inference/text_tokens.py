"""What stands between texts and token ids when a trained model is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.config import JobSpec


class TextTokens(Protocol):
    """Both ways."""

    end: int | None
    """The token that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        ...


class Bytes:
    """One token a byte of UTF-8."""

    end: int | None = None

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """What is no UTF-8, such as half a character at the end, is shown as replaced."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def text_tokens_of(spec: JobSpec) -> TextTokens:
    """The tokenizer that a job was trained with."""
    return Bytes()
