"""The newest lines of the output of a job's ranks, read from the end, however much comes before them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from manta.service.logs.filters import LineTest
from manta.service.logs.pages import Chunk, LogLine, LogSource, Position, merge, understood

CHUNK_BYTES = 64 * 1024
"""Bytes read first of a rank; then twice as many, and so on up to MAX_CHUNK_BYTES."""
MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_BYTES = 64 * 1024 * 1024
"""Bytes read over all ranks."""
MAX_SECONDS = 3.0


@dataclass(frozen=True)
class LogTail:
    """The newest lines."""

    lines: list[LogLine]
    """Sorted by time; each rank's lines in the order in which it printed them."""
    begin: Position
    """For each rank the position of the first of these lines; later output that is not among them is not wanted."""
    end: Position
    """The position at which later output begins."""
    earlier: Position
    """For each rank the position before which there may be more wanted lines: a value for `until`."""

    @property
    def more(self) -> bool:
        """Whether there may be more lines before these."""
        return any(self.earlier.values())


@dataclass
class _End:
    """What was read of the end of one rank's log."""

    rank: int
    begin: int
    """The parsed part begins at this byte; 0: everything was parsed."""
    end: int
    size: int = field(default_factory=lambda: CHUNK_BYTES)
    """How many bytes are read of it next."""
    lines: list[LogLine] = field(default_factory=list)
    since: float | None = None
    """When the first parsed line was printed."""


def read_tail(
    source: LogSource,
    count: int,
    rank: int | None = None,
    test: LineTest | None = None,
    until: Position | None = None,
) -> LogTail:
    """The last `count` lines, or the last `count` that `test` wants: of one rank, or of all of them merged by time;
    with `until` of the lines before that. Fewer if MAX_BYTES were read or MAX_SECONDS have passed before. Raises
    LogsUnavailable."""
    ranks = source.ranks() if rank is None else [rank]
    if until is None:
        until = {rank: _end_of_lines(source, rank) for rank in ranks}
    ends = [_End(rank, until.get(rank, 0), until.get(rank, 0)) for rank in ranks]
    stops_at, read = time.monotonic() + MAX_SECONDS, 0
    while True:
        lines, unread = _certain(ends)
        if len(lines) >= count or not unread or read >= MAX_BYTES or time.monotonic() > stops_at:
            break
        read += sum(_read_back(source, each, test) for each in unread)
    newest = lines[len(lines) - count :] if len(lines) > count else lines
    end = {end.rank: end.end for end in ends}
    begin = end | {line.rank: line.start for line in reversed(newest)}
    shown = Counter(line.rank for line in newest)
    return LogTail(newest, begin, end, {end.rank: _before(end, shown[end.rank]) for end in ends})


def _before(each: _End, shown: int) -> int:
    """The byte up to which a rank may have wanted lines that are not shown; its last `shown` lines are shown."""
    hidden = each.lines[: len(each.lines) - shown]
    return hidden[-1].end if hidden else each.begin


def _certain(ends: list[_End]) -> tuple[list[LogLine], list[_End]]:
    """The lines between which no others can turn up, and the ranks of which more must be read to get more such
    lines."""
    merged = merge(Chunk(end.rank, end.lines, end.end, full=False) for end in ends)
    partly = [end for end in ends if end.begin > 0]
    if len(ends) == 1 or not partly:
        return [line for line, _ in merged], partly
    unseen = [each for each in partly if each.since is None]
    if unseen:
        return [], unseen
    horizon = max(each.since or 0.0 for each in partly)
    return [line for line, key in merged if key > horizon], [each for each in partly if each.since == horizon]


def _end_of_lines(source: LogSource, rank: int) -> int:
    """The byte after the last complete line of a rank's log."""
    end, size = source.end(rank), CHUNK_BYTES
    while True:
        start, content = _bytes(source, rank, max(0, end - size), end)
        newline = content.rfind(b"\n")
        if newline >= 0 or start > end - size or start == 0:
            return start + newline + 1
        size *= 2


def _read_back(source: LogSource, each: _End, test: LineTest | None) -> int:
    """Read the part before what was read; returns its number of bytes."""
    wanted = max(0, each.begin - each.size)
    start, content = _bytes(source, each.rank, wanted, each.begin)
    each.size = min(2 * each.size, MAX_CHUNK_BYTES)
    is_all = wanted == 0 or start > wanted  # what comes before is lost
    first = 0 if is_all else content.find(b"\n") + 1
    if first == 0 and not is_all:
        return len(content)  # within a line that is longer
    lines, _, _ = understood(content[first:], each.rank, start + first, test)
    each.lines = [*lines, *each.lines]
    since = _time_of_first(content[first:], each.rank)
    each.since = each.since if since is None else since
    each.begin = 0 if is_all else start + first
    return len(content)


def _time_of_first(content: bytes, rank: int) -> float | None:
    for raw in content.splitlines(keepends=True):
        lines, _, _ = understood(raw, rank, 0, None)
        if lines:
            return lines[0].time
    return None


def _bytes(source: LogSource, rank: int, start: int, end: int) -> tuple[int, bytes]:
    """The bytes of a rank's log from `start` to `end`, and where they begin, which is later if some are lost."""
    contents, at = list[bytes](), start
    while at < end:
        piece = source.read(rank, at, end - at)
        if piece.start > at:
            contents, start = [], piece.start
        if not piece.content:
            break
        contents.append(piece.content)
        at = piece.start + len(piece.content)
    return start, b"".join(contents)
