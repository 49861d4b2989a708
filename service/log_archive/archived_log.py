"""Reads ranges of a job's log from its parts."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from manta.service.log_archive.parts import Header, NoPart, PartName, counting, decode_header, is_gapless
from manta.service.logs.pages import LogBytes, LogsUnavailable
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location
from manta.workers.system.daemon_threads import in_daemon_thread

T = TypeVar("T")

BLOCK_BYTES = 256 * 1024
BLOCKS = 128
"""Number of blocks that are cached, over all logs: 32 MiB."""
ANSWER_SECONDS = 5.0
"""A place that takes longer to list the parts of a log counts as not answering."""
READ_SECONDS = 20.0
"""A place that takes longer to read a block of a part counts as not answering."""
TRIES = 4
"""Attempts, since parts may be replaced by a larger one while they are read."""


class Blocks:
    """Blocks of parts, with recently read ones in memory: parts never change. Safe for use by several threads."""

    def __init__(self, max_blocks: int = BLOCKS):
        self._max_blocks, self._lock = max_blocks, threading.Lock()
        self._recent: OrderedDict[tuple[Location, int], bytes] = OrderedDict()

    def known(self, part: Location, number: int) -> bytes | None:
        """A block that is in memory."""
        with self._lock:
            if (part, number) not in self._recent:
                return None
            self._recent.move_to_end((part, number))
            return self._recent[part, number]

    def fetch(self, part: Location, number: int) -> bytes:
        """A block from where it is stored; a short one is the last of its part. Raises OSError, FileNotFoundError."""
        block = bytearray(BLOCK_BYTES)
        with files_of(part).reader(part) as reader:
            start = number * BLOCK_BYTES
            count = reader.read_into(memoryview(block), start) if start < reader.size else 0
        with self._lock:
            self._recent[part, number] = bytes(block[:count])
            while len(self._recent) > self._max_blocks:
                self._recent.popitem(last=False)
        return bytes(block[:count])


class ArchivedLog:
    """The log of one job: a `LogSource`. Safe for use by several threads."""

    def __init__(self, folder: Location, blocks: Blocks):
        """`folder`: of its parts."""
        self._folder, self._blocks = folder, blocks
        self._parts: list[PartName] = []
        self._listed_at = float("-inf")
        self._listing: Future[None] | None = None
        self._requested_at = 0.0
        self._unanswered: Future[bytes] | None = None
        """A read that got no answer in time."""
        self._lock = threading.Lock()

    def refresh(self, oldest: float = 0.0) -> ArchivedLog:
        """Find out which parts there are; the information may be `oldest` seconds old. The first caller waits a moment
        for a place that does not answer, later ones not at all. Raises LogsUnavailable."""
        since = time.monotonic() - oldest
        while self._listed_at < since:
            try:
                self._request().result(ANSWER_SECONDS)
            except OSError as error:  # includes timeouts
                raise LogsUnavailable(error if str(error) else OSError(f"{self._folder}: no answer")) from error
        return self

    def _request(self) -> Future[None]:
        with self._lock:
            if self._listing is None or self._listing.done():
                self._requested_at = time.monotonic()
                self._listing = in_daemon_thread("parts of a log", self._list)
            elif time.monotonic() - self._requested_at > ANSWER_SECONDS:
                raise OSError(f"{self._folder}: no answer")
            return self._listing

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing yet."""
        return not self._parts

    @property
    def is_closed(self) -> bool:
        """Whether the job is over and everything that it has printed is there."""
        return bool(self._parts) and self._parts[-1].closes

    def ranks(self) -> list[int]:
        """See `LogSource`."""
        return self._repeated(lambda: list(self._header(self._parts[-1]).segments) if self._parts else [])

    def read(self, rank: int, start: int, size: int) -> LogBytes:
        """See `LogSource`."""
        return self._repeated(lambda: self._read(rank, start, size))

    def end(self, rank: int) -> int:
        """See `LogSource`."""
        return self._repeated(lambda: self._end(self._parts[-1], rank) if self._parts else 0)

    def _repeated(self, read: Callable[[], T]) -> T:
        """The result of `read`, repeated if parts that it knows of no longer exist."""
        for tries_left in reversed(range(TRIES)):
            try:
                return read()
            except FileNotFoundError as error:
                if not tries_left:
                    raise LogsUnavailable(error) from error
                self.refresh()
            except (OSError, NoPart) as error:
                raise LogsUnavailable(OSError(str(error))) from error
        raise AssertionError("the last try has answered or raised")

    def _list(self) -> None:
        for _ in range(TRIES):
            at = time.monotonic()
            try:
                names = files_of(self._folder).names(self._folder)
            except FileNotFoundError:
                names = []
            self._parts, self._listed_at = counting(names), at
            if is_gapless(self._parts):
                return

    def _read(self, rank: int, start: int, size: int) -> LogBytes:
        parts = self._parts
        end = self._end(parts[-1], rank) if parts else 0
        if start >= end:
            return LogBytes(start, b"", more=False)
        number = bisect_right(parts, start, key=lambda part: self._end(part, rank))
        begin, contents, count = start, [], 0
        while count < size and number < len(parts):
            header = self._header(parts[number])
            segment = header.segments[rank]
            if segment.start > start + count:
                if count:
                    break
                begin = start = segment.start  # what was before is lost
            skipped = start + count - segment.start
            wanted = min(size - count, segment.end - segment.start - skipped)
            if wanted > 0:
                place = self._folder / str(parts[number])
                contents.append(self._bytes(place, header.offset(rank) + skipped, wanted))
                if len(contents[-1]) < wanted:
                    raise NoPart(f"{place} is too short")
                count += wanted
            number += 1
        return LogBytes(begin, b"".join(contents), begin + count < end)

    def _end(self, part: PartName, rank: int) -> int:
        """The byte of the rank's log up to which it is in `part` and earlier ones."""
        segment = self._header(part).segments.get(rank)
        return 0 if segment is None else segment.end

    def _header(self, part: PartName) -> Header:
        place, size = self._folder / str(part), BLOCK_BYTES
        while True:
            content = self._bytes(place, 0, size)
            line, newline, _ = content.partition(b"\n")
            if newline or len(content) < size:
                return decode_header(line + newline)
            size *= 2

    def _bytes(self, part: Location, at: int, size: int) -> bytes:
        """Up to `size` bytes of `part` from byte `at` on."""
        content, number = b"", at // BLOCK_BYTES
        while len(content) < at % BLOCK_BYTES + size:
            block = self._blocks.known(part, number)
            if block is None:
                block = self._fetched(part, number)
            content, number = content + block, number + 1
            if len(block) < BLOCK_BYTES:
                break
        return content[at % BLOCK_BYTES :][:size]

    def _fetched(self, part: Location, number: int) -> bytes:
        """A block that is not in memory. The first caller waits a moment for a place that does not answer, later ones
        not at all. Only this takes a thread: in a busy process, to change to one takes longer than to read memory."""
        no_answer = LogsUnavailable(OSError(f"{self._folder}: no answer"))
        if self._unanswered is not None and not self._unanswered.done():
            raise no_answer
        answer = in_daemon_thread("parts of a log", lambda: self._blocks.fetch(part, number))
        wait([answer], READ_SECONDS)
        if not answer.done():
            self._unanswered = answer
            raise no_answer
        return answer.result()
