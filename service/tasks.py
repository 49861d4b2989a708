"""Background tasks of an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


def log_failure(task: asyncio.Task[None]) -> None:
    """A callback for finished tasks: none may fail unnoticed."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s ended: %r", task.get_name(), task.exception(), exc_info=task.exception())


class BackgroundTasks:
    """Tasks that end by themselves. References are kept here, since the loop alone would let them be
    garbage-collected."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do `work`, whose failure is logged."""
        task = asyncio.create_task(work, name=name)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        task.add_done_callback(log_failure)

    async def settled(self) -> None:
        """Return once all tasks started until now have ended, however."""
        await asyncio.gather(*self.running, return_exceptions=True)
