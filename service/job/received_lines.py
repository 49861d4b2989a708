"""The output of ranks on nodes that do not share the folder of the job's logs: it comes with their reports, and is
appended to the same files that agents elsewhere write themselves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from manta.service.log_archive.parts import Mark, end_of_reports, last_mark
from manta.workers.paths import rank_stem
from manta.workers.protocol.reports import Printed, Report
from manta.workers.system.regular_files import open_regular, open_to_append

log = logging.getLogger(__name__)

_THREADS = ThreadPoolExecutor(4, thread_name_prefix="job lines")
"""Threads for log files of all jobs, and nothing else: a disk that does not answer blocks these, but no readers of the
database."""

DISK_SECONDS = 5.0
"""Seconds that the reports of a rank wait for a disk: less than a rank is waited for when it comes to rest."""


class ReceivedLines:
    """Appends the lines of a job's ranks to its log files. A report that is repeated, since a control plane died before
    acknowledging it, changes nothing. A disk that is full, or does not answer, loses lines, but holds up no report:
    reports of a rank's death come after its lines."""

    def __init__(self, folder: Path):
        """`folder`: of the job's log files."""
        self.folder = folder
        self.lock = threading.Lock()
        """Held while a file is changed."""
        self._written: dict[int, Mark] = {}
        self._overdue: set[asyncio.Future[None]] = set()
        """Unfinished appends that nothing waits for any more."""

    async def take(self, report: Report, printed: Printed) -> None:
        """Append what a rank has printed."""
        if self._overdue:
            log.warning("%d lines of rank %d are lost: the disk does not respond", len(printed.lines), report.rank)
            return
        appending = asyncio.get_running_loop().run_in_executor(_THREADS, self._append, report, printed)
        await asyncio.wait({appending}, timeout=DISK_SECONDS)
        if not appending.done():
            log.warning("%d lines of rank %d will be written once the disk responds", len(printed.lines), report.rank)
            self._overdue.add(appending)
            appending.add_done_callback(self._handle_answer)
            return
        try:
            appending.result()
        except OSError as error:
            log.warning("%d lines of rank %d are lost: %s", len(printed.lines), report.rank, error)

    def _handle_answer(self, appending: asyncio.Future[None]) -> None:
        self._overdue.discard(appending)
        if not appending.cancelled() and (error := appending.exception()) is not None:
            log.warning("delayed lines are lost: %s", error)

    def file(self, rank: int) -> Path:
        """The log file of a rank."""
        return self.folder / f"{rank_stem(rank)}.jsonl"

    def leave_out(self, rank: int, last: Mark) -> None:
        """Lines of `rank` up to the report `last` are already stored. The `lock` is held."""
        self._written[rank] = max(last, self._last_mark(rank))

    def _append(self, report: Report, printed: Printed) -> None:
        mark = (report.generation, report.sequence)
        about = {"time": report.time, "rank": report.rank, "generation": report.generation, "stream": printed.stream}
        with self.lock:
            if mark <= self._last_mark(report.rank):
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            _append_atomically(self.file(report.rank), _lines({**about, "sequence": report.sequence}, printed.lines))
            self._written[report.rank] = mark

    def _last_mark(self, rank: int) -> Mark:
        if rank not in self._written:
            self._written[rank] = _truncate_partial_report(self.file(rank))
        return self._written[rank]


def _lines(about: dict[str, object], texts: tuple[str, ...]) -> bytes:
    """Each line has the number of lines `left`, so that a report that a crash has truncated is recognised."""
    left = range(len(texts) - 1, -1, -1)
    entries = (
        {**about, **({"left": more} if more else {}), "text": text} for text, more in zip(texts, left, strict=True)
    )
    return "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()


def _append_atomically(file: Path, content: bytes) -> None:
    """Append all of `content`, or nothing if possible."""
    descriptor = open_to_append(file)
    try:
        before, left = os.fstat(descriptor).st_size, memoryview(content)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def _truncate_partial_report(file: Path) -> Mark:
    """Remove the remains of a report that was being written during a crash; returns the last complete report, or none
    if the file does not exist or cannot be read."""
    try:
        with open_regular(file) as opened:
            size = opened.seek(0, os.SEEK_END)
            end = end_of_reports(opened, size)
            mark = last_mark(opened, end)
        if end < size:
            os.truncate(file, end)
        return mark
    except OSError:
        return (0, 0)
