"""Which report each line of a local log file came with, reading from the file's end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO

from service.kept_logs.parts import Mark

BLOCK_BYTES = 64 * 1024


def lines_backwards(file: IO[bytes], end: int) -> Iterator[tuple[int, bytes]]:
    """(First byte, line with its end) of all complete lines before byte `end`, the last one first. Raises OSError."""
    rest = b""
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        lines = (file.read(end - begin) + rest).splitlines(keepends=True)
        if not lines:  # it was cut short in the meantime
            return
        rest = lines.pop(0) if begin else b""  # it may begin before
        end, at = begin, begin + len(rest) + sum(map(len, lines))
        for line in reversed(lines):
            at -= len(line)
            if line.endswith(b"\n"):
                yield at, line


def mark_of(line: bytes) -> Mark | None:
    """Mark of the report that `line` came with; None if it is not a line of a log."""
    try:
        entry = json.loads(line)
        return int(entry["generation"]), int(entry.get("sequence") or 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def left_after(line: bytes) -> int:
    """How many lines of the same report follow."""
    try:
        return int(json.loads(line).get("left") or 0)
    except (ValueError, TypeError, AttributeError):
        return 0


def end_of_reports(file: IO[bytes], end: int) -> int:
    """The byte before `end` up to which all reports are complete. Raises OSError."""
    return next((at + len(line) for at, line in lines_backwards(file, end) if not left_after(line)), 0)


def last_mark(file: IO[bytes], end: int) -> Mark:
    """Mark of the last report before byte `end`; (0, 0) if there is none. Raises OSError."""
    marks = (mark_of(line) for _, line in lines_backwards(file, end))
    return next((mark for mark in marks if mark is not None), (0, 0))


def end_of(file: IO[bytes], end: int, last: Mark) -> int:
    """The byte before `end` after the last line of the report `last`, or of an earlier one. Raises OSError."""
    for at, line in lines_backwards(file, end):
        mark = mark_of(line)
        if mark is not None and mark <= last:
            return at + len(line)
    return 0
