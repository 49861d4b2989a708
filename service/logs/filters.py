"""Which lines of a log are wanted, and the level that a line states."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

import re2

from manta.workers.errors import MantaError

Stream = Literal["stdout", "stderr", "agent"]
Level = Literal["debug", "info", "warning", "error", "critical"]
LEVELS: tuple[Level, ...] = get_args(Level)
MAX_REGEX_CHARACTERS = 500
_MAX_REGEX_BYTES = 2**20
"""Memory of a compiled expression."""
_BEGINNING = 120
"""The level is searched for in this many characters of a line."""
_WORD = re.compile(
    r"\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b|\[([IWEF])\d{4} |^(?:\w+\.)*(\w*(?:Error|Warning))\b"
)
_NOTICE = re.compile(
    r"^(?:\[rank\d+\]:?\s*)?\[[IW]\d{4} [\d:.]+ |^\[Gloo\] |ProcessGroup.*Warning"  # PyTorch, from C++
    r"|^\[\d{4}-\d\d-\d\d [\d:,]+ [IW] \d+ \d+\] |^\((?:raylet|autoscaler)"  # Ray
)
_WORDS: dict[str, Level] = {
    **{level.upper(): level for level in LEVELS},
    **dict[str, Level](WARN="warning", FATAL="critical", I="info", W="warning", E="error", F="critical"),
}


class InvalidPattern(MantaError):
    """The regular expression is invalid, or too large."""


def level_of(text: str) -> Level | None:
    """The level that a line states: the word that Python's loggers write (`WARNING:root:...`), the letter that
    PyTorch's C++ loggers write (`[W1126 10:00:00 ...]`), or the name of an exception at the beginning. None if it
    states none."""
    match = _WORD.search(text, 0, _BEGINNING)
    if match is None:
        return None
    if match[3]:
        return "warning" if match[3].endswith("Warning") else "error"
    return _WORDS[match[1] or match[2]]


def is_notice(text: str) -> bool:
    """Whether a line is a notice or a warning that PyTorch's C++ parts (sockets, process groups, gloo) or Ray print:
    about themselves, not about the job."""
    return _NOTICE.search(text, 0, _BEGINNING) is not None


@dataclass(frozen=True)
class LogFilter:
    """Lines that satisfy all of these conditions; None is no condition. The resulting test is not safe for use by
    several threads at once."""

    stream: Stream | None = None
    search: str | None = None
    """Contains this text, ignoring case."""
    regex: str | None = None
    """A part of it matches this expression of RE2, which takes time in proportion to the line, whatever the expression;
    Python's own hold the interpreter's lock while they backtrack."""
    level: Level | None = None
    """States this level or a more serious one."""
    notices: bool = True
    """False: is not a notice of a library (`is_notice`)."""

    def test(self) -> LineTest | None:
        """The test that selects these lines; None if all are wanted. Raises InvalidPattern."""
        return None if self == LogFilter() else LineTest(self)


class LineTest:
    """Selects wanted lines. Not safe for use by several threads at once."""

    def __init__(self, wanted: LogFilter):
        """Raises InvalidPattern."""
        self._stream = wanted.stream
        self._search = None if wanted.search is None else wanted.search.lower()
        self._regex = None if wanted.regex is None else _compiled(wanted.regex)
        self._least = None if wanted.level is None else LEVELS.index(wanted.level)
        self._notices = wanted.notices
        self._in_bytes = _as_in_files(self._search)

    def may_want(self, line: bytes) -> bool:
        """Whether a line, as stored in its file, has to be parsed: its bytes are enough to rule out most unwanted
        lines."""
        return self._in_bytes is None or self._in_bytes in line.lower()

    def wants(self, stream: str, text: str) -> bool:
        """Whether a line of `stream` is wanted."""
        if self._stream is not None and stream != self._stream:
            return False
        if self._search is not None and self._search not in text.lower():
            return False
        if not self._notices and is_notice(text):
            return False
        if self._least is not None:
            level = level_of(text)
            if level is None or LEVELS.index(level) < self._least:
                return False
        return self._regex is None or self._regex.search(text.encode(errors="replace")) is not None


def _compiled(regex: str) -> Any:
    if len(regex) > MAX_REGEX_CHARACTERS:
        raise InvalidPattern(f"is longer than {MAX_REGEX_CHARACTERS} characters")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_REGEX_BYTES
    try:
        return re2.compile(regex, options)
    except re2.error as error:
        raise InvalidPattern(f"is not a regular expression of RE2: {error.args[0].decode(errors='replace')}") from error
    except UnicodeEncodeError as error:
        raise InvalidPattern("contains half of a surrogate pair") from error


def _as_in_files(search: str | None) -> bytes | None:
    """How the search text is stored in files, whose JSON is ASCII; None if there are several possible forms."""
    plain = search is not None and search.isascii() and search.isprintable() and not set(search) & set('"\\')
    return search.encode() if search is not None and plain else None
