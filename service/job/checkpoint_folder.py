"""The folder of a job's checkpoints, as its supervisor reads it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from workers.checkpoint.catalog import Listing, list_checkpoints
from workers.storage.places import Place

LOOK_SECONDS = 20.0
"""A file system that takes longer to list a job's checkpoints does not answer."""


class FolderReader:
    """Lists a folder on a thread of its own: a file system that does not answer keeps that thread and no other, and
    neither the event loop nor the end of the process waits for it."""

    def __init__(self) -> None:
        self._under_way: Future[Listing] | None = None

    async def list(self, folder: Place) -> Listing:
        """What `folder` holds; where nothing is heard in time that is the answer's `problem`."""
        if self._under_way is None or self._under_way.done():
            self._under_way = _in_thread(folder)
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                return await asyncio.wrap_future(self._under_way)
        except TimeoutError:
            return Listing(folder, problem=f"the folder {folder} cannot be listed: no answer in {LOOK_SECONDS:g} s")


def _in_thread(folder: Place) -> Future[Listing]:
    answer: Future[Listing] = Future()
    answer.set_running_or_notify_cancel()  # from now on nobody who stops waiting for it can cancel it

    def look() -> None:
        try:
            answer.set_result(list_checkpoints(folder))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=look, name="checkpoint folder", daemon=True).start()
    return answer
