"""Which folders of the service a node shares, for a daemon that has more to do than to wait for a mount that does not
answer: ranks of all jobs meet through it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import Future

from workers.node.folders import unshared
from workers.system.daemon_threads import in_daemon_thread

LOOK_SECONDS = 1.0
"""How long callers wait for a look, from its beginning on."""


class SharedFolders:
    """The folders of one service, as seen by a daemon's loop."""

    def __init__(self, folders: Iterable[str], installation: str):
        """`installation`: the service's id."""
        self._folders, self._installation = tuple(folders), installation
        self._looking: Future[None] | None = None
        self._began = 0.0
        """When the look began, by the monotonic clock."""
        self._unshared: tuple[str, ...] = ()

    async def unshared(self) -> tuple[str, ...]:
        """Folders that this node does not share. While a file system does not answer, what was known before; at first
        all count as shared, since something is mounted there."""
        looking = self._looking
        if looking is None or looking.done():
            looking = self._looking = in_daemon_thread("shared folders", self._look)
            self._began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._began + LOOK_SECONDS - time.monotonic()):
                await asyncio.wrap_future(looking)
        return self._unshared

    def _look(self) -> None:
        """Store the result here, since it may come when nobody waits for it any more."""
        self._unshared = unshared(self._folders, self._installation)
