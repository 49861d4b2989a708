"""Where the output of a rank's trainers goes: to a log file, one JSON object per line, or to the control plane with the
reports."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from pathlib import Path

from manta.workers.protocol.reports import Printed
from manta.workers.rank.report_buffer import ReportBuffer
from manta.workers.system.regular_files import open_to_append

LINE_CHARACTERS = 8192
TAIL_LINES = 20


class RankLog:
    """Appends lines to a file, which others may rename or remove. A full disk loses lines, but never blocks the trainer
    or makes it fail."""

    def __init__(self, path: Path, rank: int):
        self._path, self._rank = path, rank

    def write(self, generation: int, stream: str, lines: list[str]) -> None:
        """Append `lines` of `stream` (stdout or stderr), stamped with the time, in Unix seconds."""
        now = time.time()
        stamp = {"time": now, "rank": self._rank, "generation": generation, "stream": stream}
        text = "".join(json.dumps({**stamp, "text": line}) + "\n" for line in lines)
        with contextlib.suppress(OSError):  # the disk may have room for the next lines
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_to_append(self._path), "a", encoding="utf-8") as file:
                file.write(text)


class ReportedLines:
    """Takes the lines of one rank where there is no file for them."""

    def __init__(self, reports: ReportBuffer, rank: int):
        self._reports, self._rank = reports, rank

    def write(self, generation: int, stream: str, lines: list[str]) -> None:
        """Report `lines` of `stream` (stdout or stderr)."""
        if lines:
            self._reports.add(Printed(stream, tuple(lines)), generation, self._rank)


LineSink = RankLog | ReportedLines
"""Takes the output of one rank's trainers."""


class LineSplitter:
    """Splits chunks of bytes into lines: invalid text is decoded with replacement, overlong lines are divided."""

    def __init__(self) -> None:
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines that were printed."""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes. An empty chunk is the end of the stream and completes the rest."""
        *complete, self._rest = (self._rest + chunk).split(b"\n")
        if self._rest and (not chunk or len(self._rest) >= LINE_CHARACTERS):
            complete.append(self._rest)
            self._rest = b""
        lines = [piece for line in complete for piece in _pieces(line)]
        self.tail.extend(lines)
        return lines


def _pieces(line: bytes) -> list[str]:
    text = line.decode(errors="replace").rstrip("\r")
    return [text[start : start + LINE_CHARACTERS] for start in range(0, len(text), LINE_CHARACTERS)] or [""]
