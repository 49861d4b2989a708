"""Sends a trainer's output to the control plane with the reports, from nodes that do not share the folder of the job's
logs."""

from __future__ import annotations

from workers.protocol.reports import Printed
from workers.rank.report_buffer import ReportBuffer


class ReportedLines:
    """Takes the lines of one rank, like `RankLog` if there is a file for them."""

    def __init__(self, reports: ReportBuffer, rank: int):
        self._reports, self._rank = reports, rank

    def write(self, generation: int, stream: str, lines: list[str]) -> None:
        """Report `lines` of `stream` (stdout or stderr)."""
        if lines:
            self._reports.add(Printed(stream, tuple(lines)), generation, self._rank)

    def close(self) -> None:
        """Nothing is open."""
