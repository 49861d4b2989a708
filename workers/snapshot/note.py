"""The note stored with the state in a snapshot: metrics of the last steps, and the history that later decisions about
bad numbers depend on. Pure Python.

A note is lines of JSON, one per row, oldest first, followed by `{"numbers": history}` if the job needs it. A killed
rank loses the rows that it had not sent yet; the rank that restores its snapshot sends them again.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from manta.workers.snapshot.snapshot_file import NOTE_BYTES
from manta.workers.training.bad_numbers import NumericsHistory

JOURNAL_ROWS = 256
"""Rows kept: more steps than are ever on their way to the database."""


class RowJournal:
    """The rows of metrics of the last steps."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=JOURNAL_ROWS)

    def add(self, row: dict[str, Any]) -> None:
        """Add the row of one more step, replacing the oldest."""
        self._lines.append(json.dumps(row).encode())

    def clear(self) -> None:
        """Discard all rows."""
        self._lines.clear()

    def forget_after(self, step: int) -> None:
        """Discard the rows of steps above `step`."""
        remaining = [line for line in self._lines if json.loads(line)["step"] <= step]
        self._lines = deque(remaining, JOURNAL_ROWS)

    def note(self, history: NumericsHistory | None, max_bytes: int = NOTE_BYTES) -> bytes:
        """The note with these rows, of which the oldest are left out until it has at most `max_bytes` bytes; `history`:
        as of the same step, None if nothing depends on it."""
        lines = deque(self._lines)
        if history is not None:
            lines.append(json.dumps({"numbers": history.to_json()}).encode())
        while sum(len(line) + 1 for line in lines) > max_bytes:
            lines.popleft()
        return b"\n".join(lines)


def read_note(note: bytes) -> tuple[list[dict[str, Any]], NumericsHistory | None]:
    """The rows in a note, oldest first, and its history; None if it has none."""
    rows, history = [], None
    for line in note.splitlines():
        document = json.loads(line)
        if "numbers" in document:
            history = NumericsHistory.from_json(document["numbers"])
        else:
            rows.append(document)
    return rows, history
