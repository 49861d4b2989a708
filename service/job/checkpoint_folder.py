"""The folder of a job's checkpoints, as its supervisor reads it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from workers.checkpoint.catalog import Listing, list_checkpoints
from workers.storage.places import Place
from workers.system.daemon_threads import in_daemon_thread

LOOK_SECONDS = 20.0
"""A file system that takes longer to list a job's checkpoints does not answer."""


class FolderReader:
    """Lists a folder on a thread of its own: a file system that does not answer keeps that thread and no other, and
    neither the event loop nor the end of the process waits for it."""

    def __init__(self) -> None:
        self._under_way: Future[Listing] | None = None
        self._began = 0.0

    async def list(self, folder: Place, seconds: float = LOOK_SECONDS) -> Listing:
        """What `folder` holds; where nothing is heard in so many seconds that is the answer's `problem`. One that has
        had its time is not waited for again: a job recovers as often as its ranks die, whatever its checkpoints lie
        on."""
        if self._under_way is None or self._under_way.done():
            self._began = time.monotonic()
            self._under_way = in_daemon_thread("checkpoint folder", lambda: list_checkpoints(folder))
        try:
            async with asyncio.timeout(self._began + seconds - time.monotonic()):
                return await asyncio.wrap_future(self._under_way)
        except TimeoutError:
            return Listing(folder, problem=f"the folder {folder} cannot be listed: no answer in {seconds:g} s")
