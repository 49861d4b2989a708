"""The log files of a job that a control plane owns, and how far they are stored elsewhere.

A file contains what was printed since some point: another control plane may have had the job before. The position of
that point in the rank's log follows from the reports: whatever the files contain of reports that are already stored is
skipped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from manta.service.job.received_lines import ReceivedLines
from manta.service.log_archive.archived_log import ArchivedLog
from manta.service.log_archive.parts import Mark, Segment, end_of, end_of_reports, last_mark
from manta.service.logs.pages import LogBytes, ranks_in, reading_files, size_of
from manta.workers.system.regular_files import open_regular

CHUNK_BYTES = 16 * 1024
"""At least this many bytes of each rank are taken for one part."""
ARCHIVE_REFRESH_SECONDS = 10.0
SHRINK_BYTES = 64 * 1024 * 1024
"""Files of this size are started over once they are stored."""
Chunks = dict[int, tuple[Segment, bytes]]


@dataclass
class _RankProgress:
    """Position of a file in the log of its rank."""

    base: int = 0
    """The log's byte at which the file would begin."""
    first: int = 0
    """The file's first byte that is read here; earlier ones are read from where they are stored."""
    kept: int = 0
    """The file's byte up to which it is stored."""
    mark: Mark = (0, 0)
    """Mark of the last report that is stored."""


class Spool:
    """The log files of one job. Safe for use by several threads, of which one ships."""

    def __init__(self, folder: Path):
        """`folder`: of the job's log files."""
        self.folder, self.lines = folder, ReceivedLines(folder)
        self._progress: dict[int, _RankProgress] | None = None
        self._planned: dict[int, tuple[int, int]] = {}
        self.is_retired = False
        """Whether the files now belong to another owner."""

    def retire(self) -> None:
        """From now on the files belong to another owner, whatever still ships."""
        with self.lines.lock:
            self.is_retired = True

    @property
    def has_started(self) -> bool:
        """Whether it is known what is already stored."""
        return self._progress is not None

    def begin(self, segments: Mapping[int, Segment]) -> None:
        """`segments`: by rank, the last one that is stored. Raises OSError."""
        places: dict[int, _RankProgress] = {}
        with self.lines.lock:
            for rank in {*segments, *ranks_in(self.folder)}:
                segment = segments.get(rank, Segment(0, 0, (0, 0)))
                self.lines.leave_out(rank, segment.mark)
                passed = self._passed(rank, segment.mark)
                places[rank] = _RankProgress(segment.end - passed, passed, passed, segment.mark)
            self._progress, self._planned = places, {}

    def _passed(self, rank: int, last: Mark) -> int:
        if not self.lines.file(rank).is_file():
            return 0
        with open_regular(self.lines.file(rank)) as file:
            return end_of(file, file.seek(0, os.SEEK_END), last)

    def mark(self, rank: int) -> Mark:
        """Mark of the last report of `rank` whose lines are stored."""
        return self._progress_of(rank).mark if self._progress is not None else (0, 0)

    def _progress_of(self, rank: int) -> _RankProgress:
        assert self._progress is not None
        return self._progress.setdefault(rank, _RankProgress())

    def _size(self, rank: int) -> int:
        return size_of(self.lines.file(rank))

    def _with_files(self) -> list[int]:
        """The ranks that have a log file here: something else in its place holds up no other rank's lines, and is
        replaced with the next line."""
        return [rank for rank in ranks_in(self.folder) if self.lines.file(rank).is_file()]

    def next_chunks(self, max_bytes: int) -> Chunks:
        """What is to be stored next: complete reports, of all ranks. Returns the same until `kept` is called. Empty if
        everything is stored. Raises OSError."""
        ranks = self._with_files()
        size = max(CHUNK_BYTES, max_bytes // max(1, len(ranks)))
        if not self._planned:
            ends = {rank: self._end_of_chunk(rank, size) for rank in ranks}
            self._planned = {rank: (self._progress_of(rank).kept, end) for rank, end in ends.items() if end}
        return {rank: self._chunk(rank, start, end) for rank, (start, end) in self._planned.items()}

    def _end_of_chunk(self, rank: int, size: int) -> int:
        """0 if nothing is to be stored."""
        start, end = self._progress_of(rank).kept, self._size(rank)
        while start < end:
            with open_regular(self.lines.file(rank)) as file:
                boundary = end_of_reports(file, min(end, start + size))
            if boundary > start:
                return boundary
            if start + size >= end:
                break
            size *= 2  # a single report is larger
        return 0

    def _chunk(self, rank: int, start: int, end: int) -> tuple[Segment, bytes]:
        progress = self._progress_of(rank)
        with open_regular(self.lines.file(rank)) as file:
            mark = max(last_mark(file, end), progress.mark)
            file.seek(start)
            content = file.read(end - start)
        if len(content) < end - start:
            raise OSError(f"{self.lines.file(rank)} has become shorter")
        return Segment(progress.base + start, progress.base + end, mark), content

    def kept(self, chunks: Chunks) -> None:
        """The result of `next_chunks` is stored."""
        for rank, (segment, content) in chunks.items():
            progress = self._progress_of(rank)
            progress.kept, progress.mark = progress.kept + len(content), segment.mark
        self._planned = {}
        self._shrink()

    def _shrink(self) -> None:
        ranks = self._with_files()
        if sum(map(self._size, ranks)) < SHRINK_BYTES:
            return
        with self.lines.lock:
            for rank in ranks if not self.is_retired else []:
                progress = self._progress_of(rank)
                if self._size(rank) == progress.kept:
                    os.truncate(self.lines.file(rank), 0)
                    progress.base, progress.first, progress.kept = progress.base + progress.kept, 0, 0

    def read(self, rank: int, start: int, size: int) -> LogBytes | None:
        """As `LogSource.read`; None if that part of the log is not here. Raises OSError."""
        with self.lines.lock:
            progress = self._progress_of(rank)
            at = start - progress.base
            if at < progress.first or self.is_retired:
                return None
            try:
                with open_regular(self.lines.file(rank)) as file:
                    return _read(file, at, start, size)
            except FileNotFoundError:
                return LogBytes(start, b"", more=False)

    def end(self, rank: int) -> int | None:
        """As `LogSource.end`; None if the log continues elsewhere."""
        with self.lines.lock:
            return None if self.is_retired else self._progress_of(rank).base + self._size(rank)

    def ranks(self) -> set[int]:
        """The ranks that have printed something, as far as known here."""
        assert self._progress is not None
        return {*self._progress, *ranks_in(self.folder)}


def _read(file: IO[bytes], at: int, start: int, size: int) -> LogBytes:
    file.seek(at)
    return LogBytes(start, file.read(size), bool(file.read(1)))


class SpooledLog:
    """A `LogSource` of a job that is owned here: reads its files, and earlier output from where it is stored."""

    def __init__(self, spool: Spool, kept: ArchivedLog):
        self._spool, self._archived = spool, kept

    def ranks(self) -> list[int]:
        """See `LogSource`."""
        with reading_files():
            return sorted(self._spool.ranks())

    def read(self, rank: int, start: int, size: int) -> LogBytes:
        """See `LogSource`."""
        with reading_files():
            here = self._spool.read(rank, start, size)
        if here is not None:
            return here
        if self._spool.is_retired:
            return self._archived.refresh().read(rank, start, size)
        kept = self._archived.refresh(ARCHIVE_REFRESH_SECONDS).read(rank, start, size)
        if not kept.content:
            kept = self._archived.refresh().read(rank, start, size)
        return LogBytes(kept.start, kept.content, more=True)  # it continues here

    def end(self, rank: int) -> int:
        """See `LogSource`."""
        with reading_files():
            here = self._spool.end(rank)
        return self._archived.refresh().end(rank) if here is None else here
