"""Reads `text/event-stream` on the client's side (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerEvent:
    """One event of a stream."""

    data: str
    """Content of the event."""
    event: str = "message"
    """Type of the event."""
    id: str = ""
    """Position after it, for `Last-Event-ID`."""


class EventParser:
    """Turns the lines of a stream into events. Feed it one line after the other, without their ends."""

    def __init__(self) -> None:
        """Starts before the first event."""
        self._fields: dict[str, list[str]] = {}

    def feed(self, line: str) -> ServerEvent | None:
        """The event that `line` completes, if it completes one."""
        if line == "":
            fields, self._fields = self._fields, {}
            if "data" not in fields:
                return None
            kind = fields.get("event", ["message"])[-1]
            return ServerEvent("\n".join(fields["data"]), kind, fields.get("id", [""])[-1])
        name, _, value = line.partition(":")
        if name:  # a line that begins with a colon is a comment
            self._fields.setdefault(name, []).append(value.removeprefix(" "))
        return None
