"""The folder of a job's checkpoints, as its supervisor reads it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from workers.checkpoint.catalog import Listing, list_checkpoints
from workers.storage.places import Place
from workers.system.daemon_threads import in_daemon_thread

LOOK_SECONDS = 20.0
"""Seconds after which a file system that is listing a job's checkpoints counts as not answering."""


class FolderReader:
    """Lists a folder on a thread of its own: a file system that does not answer keeps only that thread, and neither the
    event loop nor the end of the process waits for it."""

    def __init__(self) -> None:
        self._under_way: Future[Listing] | None = None
        self._began = 0.0

    async def list(self, folder: Place, seconds: float = LOOK_SECONDS, job: str | None = None) -> Listing:
        """The listing of `folder`, begun after this call; without an answer in `seconds` it has that as its `problem`.
        While an earlier listing, which may lack what was saved since, has not ended, calls wait for it only until
        `seconds` after its beginning: a job that recovers again and again does not wait that long each time. `job`: as
        for `list_checkpoints`."""
        while True:
            reading = self._under_way
            if is_new := reading is None or reading.done():
                self._began = time.monotonic()
                reading = self._under_way = in_daemon_thread("checkpoint folder", lambda: list_checkpoints(folder, job))
            try:
                async with asyncio.timeout(self._began + seconds - time.monotonic()):
                    listing = await asyncio.wrap_future(reading)
            except TimeoutError:
                return Listing(folder, problem=f"the folder {folder} cannot be listed: no answer in {seconds:g} s")
            if is_new:
                return listing
