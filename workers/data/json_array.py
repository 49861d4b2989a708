"""The entries of a JSON array, read from a file of any size one after the other."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any

from manta.workers.errors import DataError

MAX_CHARACTERS = 2**28
"""Maximum length of an entry."""
_BLANKS = " \t\n\r"
_AT_END = 16
"""Characters: an error that is nearer to the end of what was read may be due to the missing rest."""


def begins_array(blocks: Iterable[bytes]) -> bool:
    """Whether the first character of a file that is not blank begins an array."""
    for block in blocks:
        begin = block.lstrip(codecs.BOM_UTF8 + _BLANKS.encode())
        if begin:
            return begin.startswith(b"[")
    return False


def entries(blocks: Iterable[bytes], path: str) -> Iterator[tuple[str, Any]]:
    """Position, for messages, and value of each entry of the array in `blocks`. Raises DataError, naming the entry."""
    text, number = _Text(blocks, path), 0
    text.expect("[", f"{path} is not a JSON array")
    while not (number == 0 and text.next() == "]"):
        number += 1
        where = f"{path}, entry {number}"
        yield where, text.value(where)
        if text.next() != ",":
            break
        text.skip()
    text.expect("]", f"{path}, after entry {number}: not valid JSON (a comma or ] is missing)")
    if text.next():
        raise DataError(f"{path}: not valid JSON (something follows the array)")


class _Text:
    """What was read of a file and is not used yet."""

    def __init__(self, blocks: Iterable[bytes], path: str):
        self._blocks, self._path = iter(blocks), path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0

    def next(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANKS:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self) -> None:
        """Leave a character behind."""
        self._at += 1

    def expect(self, character: str, otherwise: str) -> None:
        """Leave `character` behind. Raises DataError with the message `otherwise` if something else is there."""
        found = self.next()
        if found != character:
            raise DataError(otherwise if found else f"{self._path}: the JSON array is cut short")
        self.skip()

    def value(self, where: str) -> Any:
        """The JSON value that is next. Raises DataError."""
        self.next()
        while True:
            try:
                value, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
            except RecursionError as error:
                raise DataError(f"{where}: not valid JSON ({error})") from error
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _AT_END
                if not is_cut or not self._more():
                    raise DataError(f"{where}: not valid JSON ({error.msg})") from error
                if len(self._text) > MAX_CHARACTERS:
                    raise DataError(f"{where} has no end within {MAX_CHARACTERS} characters") from error
            else:
                return value

    def _more(self) -> bool:
        """Read as much again as there is, so that a long entry is not begun again too often; False at the end."""
        self._text, self._at = self._text[self._at :], 0
        begun, parts = max(1, len(self._text)), []
        while begun > 0 and (block := next(self._blocks, None)) is not None:
            try:
                parts.append(self._decoder.decode(block))
            except UnicodeDecodeError as error:
                raise DataError(f"{self._path}: not UTF-8 ({error.reason})") from error
            begun -= len(block)
        self._text += "".join(parts)
        return bool(parts)
