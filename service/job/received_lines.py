"""What ranks print on nodes that do not share the folder of the job's logs: it comes with their reports, and is
appended to the same files that agents elsewhere write themselves."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from workers.protocol.reports import Printed, Report

log = logging.getLogger(__name__)

LAST_LINE_BYTES = 64 * 1024
"""A line of a log file is shorter."""
Mark = tuple[int, int]
"""Generation and sequence of a report. A rank has one agent in a generation, so they only grow."""


class ReceivedLines:
    """Appends the lines of a job's ranks to its log files. A report that comes again, since a control plane died before
    it acknowledged it, changes nothing. A full disk loses lines, and holds up no report."""

    def __init__(self, folder: Path):
        """`folder`: of the job's log files."""
        self._folder = folder
        self._written: dict[int, Mark] = {}

    async def take(self, report: Report, printed: Printed) -> None:
        """Append what a rank has printed."""
        try:
            await asyncio.to_thread(self._append, report, printed)
        except OSError as error:
            log.warning("%d lines of rank %d are lost: %s", len(printed.lines), report.rank, error)

    def _append(self, report: Report, printed: Printed) -> None:
        file = self._folder / f"rank-{report.rank:05d}.jsonl"
        mark = (report.generation, report.sequence)
        if mark <= self._last_written(report.rank, file):
            return
        about = {"time": report.time, "rank": report.rank, "generation": report.generation, "stream": printed.stream}
        lines = [json.dumps({**about, "sequence": report.sequence, "text": text}) for text in printed.lines]
        self._folder.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as opened:
            opened.write("".join(f"{line}\n" for line in lines))
        self._written[report.rank] = mark

    def _last_written(self, rank: int, file: Path) -> Mark:
        if rank not in self._written:
            self._written[rank] = _last_mark(file)
        return self._written[rank]


def _last_mark(file: Path) -> Mark:
    """Of the report that the last whole line of `file` came with."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - LAST_LINE_BYTES))
            last = opened.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        entry = json.loads(last)
        return int(entry["generation"]), int(entry["sequence"])
    except (OSError, ValueError, TypeError, KeyError):
        return (0, 0)
