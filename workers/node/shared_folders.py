"""Which folders of the service a node shares, for a daemon that has more to do than to wait for a mount that does not
answer: ranks of all jobs meet through it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from workers.node.folders import unshared
from workers.system.daemon_threads import in_daemon_thread

LOOK_SECONDS = 1.0


class SharedFolders:
    """The folders of one service, as seen by a daemon's loop."""

    def __init__(self, folders: Iterable[str], installation: str):
        """`installation`: the service's id."""
        self._folders, self._installation = tuple(folders), installation
        self._looking: Future[tuple[str, ...]] | None = None
        self._unshared: tuple[str, ...] = ()

    async def unshared(self) -> tuple[str, ...]:
        """Those of the folders that this node does not share. While a file system does not answer, what was known
        before; at first all count as shared, since something is mounted there. Only the first call waits for it."""
        looking, seconds = self._looking, 0.0
        if looking is None:
            look = partial(unshared, self._folders, self._installation)
            looking, seconds = in_daemon_thread("shared folders", look), LOOK_SECONDS
            self._looking = looking
        try:
            async with asyncio.timeout(seconds):
                self._unshared = await asyncio.wrap_future(looking)
        except TimeoutError:
            pass
        finally:
            if looking.done() and self._looking is looking:
                self._looking = None
        return self._unshared
