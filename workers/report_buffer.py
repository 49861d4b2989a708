"""Reports on their way to the control plane: kept until acknowledged, so that each arrives exactly once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from workers.messages import Report

REPORTS_PER_READ = 2000


class ReportBuffer:
    """Numbers reports in order of arrival, keeps them until a reader has acknowledged them."""

    def __init__(self) -> None:
        self._reports: deque[Report] = deque()
        self._last = 0
        self._changed = asyncio.Event()

    def add(self, kind: Any, generation: int, rank: int, data: dict[str, Any], when: float | None = None) -> None:
        """Append a report of kind `kind`; `when` is the Unix time in seconds at which it was made (default: now)."""
        self._last += 1
        made = time.time() if when is None else when
        self._reports.append(Report(kind, generation, rank, made, self._last, data))
        self._changed.set()

    async def read(self, after: int, timeout: float) -> list[Report]:
        """Reports with a sequence above `after`, at most REPORTS_PER_READ, as soon as there are any.

        Those up to `after` are forgotten: the reader has them. An empty list after `timeout` seconds without any.
        """
        while self._reports and self._reports[0].sequence <= after:
            self._reports.popleft()
        try:
            async with asyncio.timeout(timeout):
                while not self._newer(after):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return []
        return self._newer(after)

    def _newer(self, after: int) -> list[Report]:
        newer: list[Report] = []
        for report in self._reports:
            if len(newer) == REPORTS_PER_READ:
                break
            if report.sequence > after:
                newer.append(report)
        return newer
