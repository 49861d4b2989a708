"""Looks at the data of queued jobs, each on a thread of its own: a file system that does not answer keeps its own job
waiting, and those behind it for a while, but not the queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from service.daemon_threads import in_daemon_thread
from workers.config import JobSpec
from workers.data.roots import DataRoots
from workers.errors import MantaError

LOOK_SECONDS = 1.0
"""How long the queue is held up at a time."""
TURN_SECONDS = 60.0
"""How long a job whose data does not answer keeps its turn."""


class DataSilent(MantaError):
    """The file systems of a job's data have not answered yet."""

    def __init__(self, seconds: float):
        """`seconds`: for how long."""
        self.keeps_turn = seconds < TURN_SECONDS
        super().__init__(
            f"the file system of its data has given no answer in {TURN_SECONDS:g} s; the job starts once it does"
        )


@dataclass
class _Look:
    answer: asyncio.Future[str | None]
    began: float = field(default_factory=time.monotonic)


class DataLooks:
    """One look at a time for each job."""

    def __init__(self, roots: DataRoots):
        """`roots`: below which folders jobs may read."""
        self._roots = roots
        self._under_way: dict[str, _Look] = {}

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Nobody waits for what is found out about other jobs any more."""
        for job_id in self._under_way.keys() - set(job_ids):
            del self._under_way[job_id]

    async def problem(self, job_id: str, spec: JobSpec) -> str | None:
        """Why the job's data cannot be trained on; None when it can. Raises DataSilent where that is not known yet: ask
        again."""
        look = self._under_way.get(job_id)
        if look is None:
            check = in_daemon_thread("data of a job", lambda: self._roots.problem_of_data(spec))
            answer = asyncio.wrap_future(check)
            look = self._under_way[job_id] = _Look(answer)
        seconds = LOOK_SECONDS if time.monotonic() - look.began < TURN_SECONDS else 0.0
        await asyncio.wait({look.answer}, timeout=seconds)
        if not look.answer.done():
            raise DataSilent(time.monotonic() - look.began)
        del self._under_way[job_id]
        return look.answer.result()
