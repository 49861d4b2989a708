"""What a trainer said to its reporter, for tests that read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from manta.workers.protocol.reports import Event, Message, Metrics


def rows_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The rows of metrics."""
    return [row for message in messages if isinstance(message.payload, Metrics) for row in message.payload.rows]


def events_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The events: `type`, `step`, `message`, and what comes with them."""
    events = [message.payload for message in messages if isinstance(message.payload, Event)]
    return [{"type": each.type, "step": each.step, "message": each.message, **each.data} for each in events]
