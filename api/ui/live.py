"""Keeps a page up to date as long as somebody looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nicegui import ui

from api.client import ApiError, ServiceUnreachable

INTERVAL_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
_FIRST_PATIENCE_SECONDS = 2.0  # the browser waits for the page meanwhile

Refresh = Callable[[], Awaitable[bool]]
"""Brings a page up to date; returns whether nothing will ever change on it again."""


class Live:
    """Calls a page's refresh function every second until it is done or the browser is gone.

    NiceGUI ends the timers of pages that nobody looks at.
    """

    def __init__(self, refresh: Refresh):
        """Build the banner, which is there while the service does not answer, at this place of the page."""
        self._refresh = refresh
        self._banner = ui.label("").classes("banner").props("role=status")
        self._banner.set_visibility(False)
        self._timer: ui.timer | None = None
        self._busy = asyncio.Lock()

    async def start(self) -> None:
        """Fill the page for the first time, and then keep it fresh."""
        done = await self.update(_FIRST_PATIENCE_SECONDS)
        self._timer = ui.timer(INTERVAL_SECONDS, self.update, active=not done, immediate=False)

    async def update(self, patience_seconds: float = _PATIENCE_SECONDS) -> bool:
        """Refresh now, and say so on the page where that is not possible; returns whether the page is done."""
        async with self._busy:  # a click may come while the timer is at it
            try:
                async with asyncio.timeout(patience_seconds):
                    done = await self._refresh()
            except (ServiceUnreachable, TimeoutError):
                return self._complain("Cannot reach the service, trying again")
            except ApiError as error:
                return self._complain(f"The service answers with an error, trying again: {error.problem.detail}")
        self._banner.set_visibility(False)
        if self._timer is not None:
            self._timer.active = not done
        return done

    def _complain(self, text: str) -> bool:
        self._banner.set_text(text)
        self._banner.set_visibility(True)
        return False
