"""Reports on their way to the control plane: kept until acknowledged, so that each arrives exactly once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace

from manta.workers.protocol.reports import Metrics, Payload, Printed, Report

REPORTS_PER_READ = 2000
MAX_ROWS = 50_000
"""Most rows of metrics that are kept in full: some 50 MB, and more than an hour of steps of 0.1 s."""
MAX_LINES = 20_000
"""Most printed lines that wait, if they are sent with the reports: the oldest are left out."""

MAX_CHARACTERS = 8 * 1024 * 1024
LOST_LINES_NOTE = "lines may be missing here: they were not kept in time"
StoredMark = tuple[int, int, int]
"""A rank, and the generation and sequence number of its last report of lines that is stored. A rank has one agent in a
generation, so the numbers only grow."""


class UnconfirmedLines:
    """Printed lines of one agent that a control plane has fetched and not confirmed to be stored, so that they may
    still be lost; the oldest first. If there are too many, the oldest are dropped."""

    def __init__(self, max_characters: int = MAX_CHARACTERS):
        self._max_characters, self._characters = max_characters, 0
        self._reports: deque[Report] = deque()
        self._kept: StoredMark | None = None

    def add(self, report: Report) -> None:
        """`report` was fetched."""
        self._reports.append(report)
        self._characters += _characters_in(report)
        if self._characters > self._max_characters:
            self._drop_oldest()

    def forget(self, kept: StoredMark | None) -> None:
        """Lines up to `kept` are stored; with None all are."""
        if kept is None:
            self._reports.clear()
        elif kept != self._kept:
            rank, *mark = kept
            self._reports = deque(
                report for report in self._reports if report.rank != rank or [report.generation, report.sequence] > mark
            )
        self._kept = kept
        self._characters = sum(map(_characters_in, self._reports))

    def after(self, sequence: int) -> list[Report]:
        """Reports that came after `sequence`."""
        if not self._reports or self._reports[-1].sequence <= sequence:
            return []
        return [report for report in self._reports if report.sequence > sequence]

    def _drop_oldest(self) -> None:
        last = self._reports[0]
        while self._reports and self._characters > self._max_characters // 2:
            last = self._reports.popleft()
            self._characters -= _characters_in(last)
        note = replace(last, payload=Printed("agent", (LOST_LINES_NOTE,)))
        self._reports.appendleft(note)
        self._characters += _characters_in(note)


def _characters_in(report: Report) -> int:
    return sum(map(len, report.payload.lines)) if isinstance(report.payload, Printed) else 0


class ReportBuffer:
    """Numbers reports in order of arrival, keeps them until a reader has acknowledged them."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        """`max_rows`: if more rows of metrics wait, only those of every second step are kept, later of every fourth,
        and so on: if the control plane is gone for days, the curve loses resolution instead of the agent running out of
        memory."""
        self._max_rows, self._rows, self._stride = max_rows, 0, 1
        self._lines, self._unconfirmed = 0, UnconfirmedLines()
        self._reports: deque[Report] = deque()
        self._last, self._sampled = 0, 0
        self._changed = asyncio.Event()
        self._reader = 0

    def add(self, payload: Payload, generation: int, rank: int, when: float | None = None) -> None:
        """Append a report of `payload`; `when` is the Unix time in seconds at which it was made (default: now)."""
        self._last += 1
        made = time.time() if when is None else when
        if isinstance(payload, Metrics) and payload.ranks is not None:
            self._drop_sample()
            self._sampled = self._last
        self._reports.append(Report(payload, generation, rank, made, self._last))
        self._count(self._reports[-1], 1)
        if self._rows > self._max_rows:
            self._thin()
        if self._lines > MAX_LINES:
            self._drop_lines()
        self._changed.set()

    def _drop_sample(self) -> None:
        """Only the newest numbers of all ranks wait, since they may be large."""
        for index in range(len(self._reports) - 1, -1, -1):
            report = self._reports[index]
            if report.sequence < self._sampled:
                return
            if report.sequence == self._sampled and isinstance(report.payload, Metrics):
                self._reports[index] = replace(report, payload=replace(report.payload, ranks=None))

    def _count(self, report: Report, sign: int) -> None:
        self._rows += sign * _rows_in(report)
        self._lines += sign * _lines_in(report)

    def _drop_lines(self) -> None:
        """Discard the older half of the lines; the last report of those says how many they were."""
        dropped, last = 0, 0
        for report in self._reports:
            if self._lines - dropped <= MAX_LINES // 2:
                break
            if isinstance(report.payload, Printed):
                dropped, last = dropped + len(report.payload.lines), report.sequence
        note = Printed("agent", (f"{dropped} lines are left out here: the control plane did not fetch them",))
        waiting = [report for report in self._reports if _lines_in(report) == 0 or report.sequence >= last]
        self._reports = deque(replace(each, payload=note) if each.sequence == last else each for each in waiting)
        self._lines += 1 - dropped

    def _thin(self) -> None:
        """Keep the rows of fewer steps, and the newest ones. Rows since the last time are of every step: if it is
        enough to thin these like the earlier ones, the earlier ones stay."""
        self._keep_multiples()
        if self._rows > 0.75 * self._max_rows:
            self._stride *= 2
            self._keep_multiples()

    def _keep_multiples(self) -> None:
        """Keep the rows of steps that are multiples of `_stride`, and reports that still contain something."""
        thinned = [self._thinned(report, report.sequence == self._last) for report in self._reports]
        self._reports = deque(report for report in thinned if report.payload != Metrics(()))
        self._rows = sum(map(_rows_in, self._reports))

    def _thinned(self, report: Report, is_newest: bool) -> Report:
        if not isinstance(report.payload, Metrics) or is_newest:
            return report
        rows = tuple(row for row in report.payload.rows if row["step"] % self._stride == 0)
        return replace(report, payload=replace(report.payload, rows=rows))

    async def read(self, after: int, timeout: float, kept: StoredMark | None = None) -> list[Report]:
        """Reports with a sequence number above `after`, at most REPORTS_PER_READ, as soon as there are any.

        Those up to `after` are deleted: the reader has them. With `kept`, printed lines are only deleted up to that: a
        reader that asks again from an earlier number gets the others again. Returns an empty list after `timeout`
        seconds without reports, and as soon as another reader asks: the earlier reader may be gone, and is not waited
        for.
        """
        self._reader += 1
        me = self._reader
        self._changed.set()
        while self._reports and self._reports[0].sequence <= after:
            read = self._reports.popleft()
            self._count(read, -1)
            if isinstance(read.payload, Printed):
                self._unconfirmed.add(read)
        self._unconfirmed.forget(kept)
        if not self._reports:
            self._stride = 1
        try:
            async with asyncio.timeout(timeout):
                while not self._newer(after):
                    self._changed.clear()
                    await self._changed.wait()
                    if self._reader != me:
                        return []
        except TimeoutError:
            return []
        return self._newer(after)

    def _newer(self, after: int) -> list[Report]:
        newer = self._unconfirmed.after(after)[:REPORTS_PER_READ]
        for report in self._reports:
            if len(newer) == REPORTS_PER_READ:
                break
            if report.sequence > after:
                newer.append(report)
        return newer


def _rows_in(report: Report) -> int:
    return len(report.payload.rows) if isinstance(report.payload, Metrics) else 0


def _lines_in(report: Report) -> int:
    return len(report.payload.lines) if isinstance(report.payload, Printed) else 0
