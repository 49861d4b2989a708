"""Tasks of an event loop that nobody waits for."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)


def log_failure(task: asyncio.Task[None]) -> None:
    """A callback for tasks that are done: none may end unnoticed."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s ended: %r", task.get_name(), task.exception(), exc_info=task.exception())
