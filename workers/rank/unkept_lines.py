"""Printed lines that a control plane has fetched but may still lose: it has not confirmed that they are stored."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from workers.protocol.reports import Printed, Report

MAX_CHARACTERS = 8 * 1024 * 1024
LEFT_OUT = "lines may be missing here: they were not kept in time"
Kept = tuple[int, int, int]
"""A rank, and the generation and sequence number of its last report of lines that is stored. A rank has one agent in a
generation, so the numbers only grow."""


class UnkeptLines:
    """Printed lines of one agent that may still be lost, the oldest first. If there are too many, the oldest are
    dropped."""

    def __init__(self, most_characters: int = MAX_CHARACTERS):
        self._most_characters, self._characters = most_characters, 0
        self._reports: deque[Report] = deque()
        self._kept: Kept | None = None

    def add(self, report: Report) -> None:
        """`report` was fetched."""
        self._reports.append(report)
        self._characters += _characters_in(report)
        if self._characters > self._most_characters:
            self._leave_out()

    def forget(self, kept: Kept | None) -> None:
        """Lines up to `kept` are stored; with None all are."""
        if kept is None:
            self._reports.clear()
        elif kept != self._kept:
            rank, *mark = kept
            self._reports = deque(
                each for each in self._reports if each.rank != rank or [each.generation, each.sequence] > mark
            )
        self._kept = kept
        self._characters = sum(map(_characters_in, self._reports))

    def after(self, sequence: int) -> list[Report]:
        """Reports that came after `sequence`."""
        if not self._reports or self._reports[-1].sequence <= sequence:
            return []
        return [report for report in self._reports if report.sequence > sequence]

    def _leave_out(self) -> None:
        last = self._reports[0]
        while self._reports and self._characters > self._most_characters // 2:
            last = self._reports.popleft()
            self._characters -= _characters_in(last)
        note = replace(last, payload=Printed("agent", (LEFT_OUT,)))
        self._reports.appendleft(note)
        self._characters += _characters_in(note)


def _characters_in(report: Report) -> int:
    return sum(map(len, report.payload.lines)) if isinstance(report.payload, Printed) else 0
