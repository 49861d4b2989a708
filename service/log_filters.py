"""Which lines of a log are wanted, and the level that a line names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from service.linear_patterns import LinearPattern

Stream = Literal["stdout", "stderr", "agent"]
Level = Literal["debug", "info", "warning", "error", "critical"]
LEVELS: tuple[Level, ...] = get_args(Level)
_BEGINNING = 120
"""Characters of a line in which its level is looked for."""
_WORD = re.compile(
    r"\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b|\[([IWEF])\d{4} |^(?:\w+\.)*(\w*(?:Error|Warning))\b"
)
_WORDS: dict[str, Level] = {
    **{level.upper(): level for level in LEVELS},
    **dict[str, Level](WARN="warning", FATAL="critical", I="info", W="warning", E="error", F="critical"),
}


def level_of(text: str) -> Level | None:
    """What a line says of itself: the word that loggers of Python write (`WARNING:root:...`), the letter of those of
    PyTorch's C++ (`[W1126 10:00:00 ...]`), or the name of an exception at the beginning. None where it says
    nothing."""
    match = _WORD.search(text, 0, _BEGINNING)
    if match is None:
        return None
    if match[3]:
        return "warning" if match[3].endswith("Warning") else "error"
    return _WORDS[match[1] or match[2]]


@dataclass(frozen=True)
class LogFilter:
    """Lines for which all of this holds; what is None filters nothing. The pattern that it makes is not for several
    threads at once."""

    stream: Stream | None = None
    search: str | None = None
    """Has this in it; upper and lower case are the same."""
    regex: str | None = None
    """A part of it matches; see `linear_patterns`."""
    level: Level | None = None
    """Says that it is as serious as this, or more so."""

    def test(self) -> LineTest | None:
        """What tells those lines from others; None where all are wanted. Raises BadPattern."""
        return None if self == LogFilter() else LineTest(self)


class LineTest:
    """Tells wanted lines from others. Not for several threads at once."""

    def __init__(self, wanted: LogFilter):
        """Raises BadPattern."""
        self._stream = wanted.stream
        self._search = None if wanted.search is None else wanted.search.lower()
        self._pattern = None if wanted.regex is None else LinearPattern(wanted.regex)
        self._least = None if wanted.level is None else LEVELS.index(wanted.level)
        self._in_bytes = _as_in_files(self._search)

    def may_want(self, line: bytes) -> bool:
        """Whether a line, as it lies in its file, has to be understood: a look at its bytes tells of most that it is
        not wanted."""
        return self._in_bytes is None or self._in_bytes in line.lower()

    def wants(self, stream: str, text: str) -> bool:
        """Whether a line of `stream` is wanted."""
        if self._stream is not None and stream != self._stream:
            return False
        if self._search is not None and self._search not in text.lower():
            return False
        if self._least is not None:
            level = level_of(text)
            if level is None or LEVELS.index(level) < self._least:
                return False
        return self._pattern is None or self._pattern.is_in(text)


def _as_in_files(search: str | None) -> bytes | None:
    """How what is searched for lies in files, whose JSON is ASCII; None where it may lie there in several ways."""
    plain = search is not None and search.isascii() and search.isprintable() and not set(search) & set('"\\')
    return search.encode() if search is not None and plain else None
