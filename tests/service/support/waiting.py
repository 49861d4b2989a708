"""Waiting for what happens on an event loop beside threads and processes."""

import asyncio
from collections.abc import Callable
from typing import Any

SECONDS = 60.0
POLL_SECONDS = 0.002
"""Between two looks. Without a pause the loop would keep the interpreter from the threads that it waits for."""


async def reached(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What `condition` says as soon as that is true."""
    async with asyncio.timeout(seconds):
        while not (answer := condition()):
            await asyncio.sleep(POLL_SECONDS)
        return answer
