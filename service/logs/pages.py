"""Reads the output of a job's ranks page by page, without ever reading a whole log.

The log of a rank has one JSON object a line: `{"time": Unix seconds, "rank", "generation", "stream": "stdout" |
"stderr", "text"}`. Agents, or the control plane, append it to `<home>/jobs/<job_id>/logs/rank-00000.jsonl`; if it is
also stored elsewhere (`service/log_archive/`) each line has the same position there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

from manta.service.errors import ErrorKind, ServiceError
from manta.service.ids import is_job_id
from manta.service.logs.filters import Level, LineTest, LogFilter, level_of
from manta.service.store.errors import InvalidCursor
from manta.service.store.paging import Cursors
from manta.workers.system.regular_files import open_regular

DEFAULT_LIMIT = 1000
EVERY_LINE = LogFilter()
MAX_BYTES = 4 * 1024 * 1024
"""The most bytes read for one page, over all ranks; but at least `MIN_CHUNK_BYTES` are read of each rank."""
MIN_CHUNK_BYTES = 64 * 1024
_FILE = re.compile(r"rank-(\d{5,})\.jsonl")

Position = dict[int, int]
"""Rank -> number of bytes of its file that were read already."""


class LogsUnavailable(ServiceError):
    """The place where a job's log is stored does not answer."""

    kind = ErrorKind("logs_unavailable", 503, "the place where logs are kept does not answer")

    def __init__(self, error: OSError):
        super().__init__(f"the log cannot be read now, and nothing of it is lost: try again ({error})")


@dataclass(frozen=True)
class LogBytes:
    """Bytes of one rank's log."""

    start: int
    """Position of the first byte in the log; higher than requested if earlier bytes are lost."""
    content: bytes
    more: bool
    """Whether the log continues after them."""


class LogSource(Protocol):
    """Reads the logs of a job's ranks."""

    def ranks(self) -> list[int]:
        """The ranks that have printed something. Raises LogsUnavailable."""
        ...

    def read(self, rank: int, start: int, size: int) -> LogBytes:
        """Up to `size` bytes of a rank's log, starting at byte `start`. Raises LogsUnavailable."""
        ...

    def end(self, rank: int) -> int:
        """The position after the current last byte of a rank's log. Raises LogsUnavailable."""
        ...


class JobLogs(Protocol):
    """The logs of all jobs."""

    def source(self, job_id: str, fresh: bool = True) -> LogSource:
        """The source of a job's logs. Without `fresh` the newest second of it may be missing."""
        ...

    def version(self, job_id: str) -> object:
        """A value that changes whenever there may be something new; returned without waiting."""
        ...

    def is_complete(self, job_id: str) -> bool:
        """Whether everything that a finished job printed can be read. Raises LogsUnavailable."""
        ...


class LogFiles:
    """The logs of one job, as files in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def ranks(self) -> list[int]:
        """See `LogSource`."""
        with reading_files():
            return ranks_in(self._folder)

    def read(self, rank: int, start: int, size: int) -> LogBytes:
        """See `LogSource`."""
        with (
            reading_files(),
            contextlib.suppress(FileNotFoundError),
            open_regular(log_file(self._folder, rank)) as file,
        ):
            file.seek(start)
            return LogBytes(start, file.read(size), bool(file.read(1)))
        return LogBytes(start, b"", more=False)

    def end(self, rank: int) -> int:
        """See `LogSource`."""
        with reading_files():
            return size_of(log_file(self._folder, rank))


@contextlib.contextmanager
def reading_files() -> Iterator[None]:
    """A log that cannot be read now is not known to be gone. Raises LogsUnavailable."""
    try:
        yield
    except OSError as error:
        raise LogsUnavailable(error) from error


class LogsInHome:
    """The logs of all jobs, in a home that has all of them."""

    def __init__(self, home: Path):
        self._home = home

    def source(self, job_id: str, fresh: bool = True) -> LogSource:
        """See `JobLogs`."""
        return LogFiles(log_folder(self._home, job_id))

    def version(self, job_id: str) -> object:
        """See `JobLogs`."""
        return sizes_in(log_folder(self._home, job_id))

    def is_complete(self, job_id: str) -> bool:
        """See `JobLogs`."""
        return True


@dataclass(frozen=True)
class LogLine:
    """One line that a rank printed."""

    time: float
    """Unix seconds."""
    rank: int
    """The rank that printed it."""
    generation: int
    """Generation of its trainer."""
    stream: str
    """stdout or stderr."""
    text: str
    """The line without its line end."""
    end: int
    """Byte after it in its rank's file."""
    start: int = 0
    """First byte of the line in its rank's file."""

    @property
    def level(self) -> Level | None:
        """The level that the line states; None if it states none."""
        return level_of(self.text)


@dataclass(frozen=True)
class LogPage:
    """Some lines, and where to continue."""

    lines: list[LogLine]
    """Lines by time; each rank's in the order in which it printed them."""
    position: Position
    """Where the next page begins."""
    more: bool
    """Whether there is more to read right now."""


@dataclass(frozen=True)
class Chunk:
    """What was read of one rank's file."""

    rank: int
    lines: list[LogLine]
    """The wanted lines."""
    end: int
    """Byte up to which the file was parsed; complete lines only."""
    full: bool
    """Whether the file continues after it."""
    until: float | None = None
    """When its last line was printed, wanted or not; None if there is none."""


def log_folder(home: Path, job_id: str) -> Path:
    """The folder of a job's log files. Raises ValueError for text that is not a job id, so that paths stay inside
    `home`."""
    if not is_job_id(job_id):
        raise ValueError(f"{job_id!r} is not a job id")
    return home / "jobs" / job_id / "logs"


def log_file(folder: Path, rank: int) -> Path:
    """The log file of a rank."""
    return folder / f"rank-{rank:05d}.jsonl"


def size_of(file: Path) -> int:
    """Bytes of a log file; 0 if it does not exist. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open_regular(file) as opened:
        return opened.seek(0, os.SEEK_END)
    return 0


def ranks_in(folder: Path) -> list[int]:
    """The ranks that have a log file in `folder`."""
    if not folder.is_dir():
        return []
    matches = (_FILE.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def sizes_in(folder: Path) -> frozenset[tuple[str, int]]:
    """Name and size of all files in `folder`; empty if it does not exist."""
    try:
        with os.scandir(folder) as files:
            return frozenset((file.name, file.stat().st_size) for file in files)
    except OSError:
        return frozenset()


def read_page(
    source: LogSource,
    position: Mapping[int, int],
    rank: int | None = None,
    limit: int = DEFAULT_LIMIT,
    max_bytes: int = MAX_BYTES,
    test: LineTest | None = None,
) -> LogPage:
    """At most `limit` lines, or lines that `test` wants, starting at `position`: of one rank, or of all merged by time.
    A last line that is still being written is left for the next page; a malformed line is skipped. If a rank has more
    output than was read, lines of others that are later than what was read of it wait for the next page. A job that has
    printed nothing yet has an empty page. Raises LogsUnavailable."""
    ranks = source.ranks() if rank is None else [rank]
    chunk_bytes = max(MIN_CHUNK_BYTES, max_bytes // max(1, len(ranks)))
    chunks = [_read_chunk(source, number, position.get(number, 0), chunk_bytes, test) for number in ranks]
    horizon = min((chunk.until for chunk in chunks if chunk.full and chunk.until is not None), default=None)
    if any(chunk.full and chunk.until is None for chunk in chunks):
        horizon = float("-inf")  # unknown what comes there: skip the unreadable part first
    merged = merge(chunks)
    ready = [line for line, key in merged if horizon is None or key <= horizon]
    page = ready[:limit]
    after = _after(position, chunks, page)
    return LogPage(page, after, more=len(page) < len(merged) or any(chunk.full for chunk in chunks))


class LogCursors:
    """Positions in a job's output as opaque cursors."""

    def __init__(self, job_id: str, rank: int | None = None, wanted: LogFilter = EVERY_LINE):
        """`rank`: the only one that is read; None: all are."""
        # Without the condition that earlier releases did not have, so that their cursors stay valid.
        given = None if wanted == EVERY_LINE else json.dumps([each for each in astuple(wanted) if each is not True])
        self._cursors = Cursors("logs", job=job_id, rank=rank, lines=given)

    def encode(self, position: Mapping[int, int]) -> str:
        """`position` as a cursor."""
        return self._cursors.encode(",".join(f"{rank}:{offset}" for rank, offset in sorted(position.items())))

    def decode(self, cursor: str) -> Position:
        """The position in a cursor. Raises InvalidCursor."""
        return _position(self._cursors.decode(cursor))


def _position(text: str) -> Position:
    if not re.fullmatch(r"(\d{1,9}:\d{1,18}(,\d{1,9}:\d{1,18})*)?", text, re.ASCII):
        raise InvalidCursor
    pairs = (entry.split(":") for entry in text.split(",") if entry)
    return {int(rank): int(offset) for rank, offset in pairs}


def _read_chunk(source: LogSource, rank: int, start: int, size: int, test: LineTest | None) -> Chunk:
    """The complete lines within `size` bytes of a rank's log, starting at byte `start`."""
    piece = source.read(rank, start, size)
    start, content, full = piece.start, piece.content, piece.more
    whole = content.rfind(b"\n") + 1
    if not whole and full:
        return Chunk(rank, [], start + len(content), full)  # part of an absurdly long line: skip it
    lines, end, until = understood(content[:whole], rank, start, test)
    return Chunk(rank, lines, end, full, until)


def understood(content: bytes, rank: int, start: int, test: LineTest | None) -> tuple[list[LogLine], int, float | None]:
    """The lines that `test` wants among the complete ones in `content`, which begins at byte `start` of the rank's log;
    the byte after the last complete line; and when that was printed."""
    lines, end, last = list[LogLine](), start, None
    raws = content.splitlines(keepends=True)
    for raw in raws:
        end += len(raw)
        if test is not None and not test.may_want(raw):
            last = None
            continue
        last = _parse(raw, rank, end)
        if last is not None and (test is None or test.wants(last.stream, last.text)):
            lines.append(last)
    return lines, end, last.time if last is not None else _time_of_last(raws, rank)


def _time_of_last(raws: list[bytes], rank: int) -> float | None:
    """When the last line that can be parsed was printed."""
    lines = (_parse(raw, rank, 0) for raw in reversed(raws))
    return next((line.time for line in lines if line is not None), None)


def _parse(raw: bytes, rank: int, end: int) -> LogLine | None:
    try:
        entry = json.loads(raw)
        return LogLine(
            time=_moment(entry["time"]),
            rank=rank,
            generation=int(entry.get("generation") or 0),
            stream=str(entry.get("stream") or "stdout"),
            text=str(entry["text"]),
            end=end,
            start=end - len(raw),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _moment(value: Any) -> float:
    """Unix seconds before the year 10000."""
    seconds = float(value)
    if not 0 <= seconds < 253402300800:
        raise ValueError(f"{value} is not a time")
    return seconds


def merge(chunks: Iterable[Chunk]) -> list[tuple[LogLine, float]]:
    """All lines by time, each with the time that it is sorted by. Within a rank the order of the file is kept, even if
    its clock was set back, so the sort time never decreases."""
    keyed: list[tuple[LogLine, float]] = []
    for chunk in chunks:
        key = float("-inf")
        for line in chunk.lines:
            key = max(key, line.time)
            keyed.append((line, key))
    return sorted(keyed, key=lambda pair: (pair[1], pair[0].rank, pair[0].end))


def _after(position: Mapping[int, int], chunks: list[Chunk], page: list[LogLine]) -> Position:
    """Where to continue after `page`: after each rank's last shown line, or after its chunk if everything was shown."""
    after = dict(position)
    shown: dict[int, LogLine] = {line.rank: line for line in page}
    for chunk in chunks:
        last = shown.get(chunk.rank)
        if not chunk.lines or last is chunk.lines[-1]:
            after[chunk.rank] = chunk.end
        elif last is not None:
            after[chunk.rank] = last.end
    return after
