"""Checks the data of queued jobs, each independently of the queue: a file system that does not answer delays its own
job, and the jobs behind that for a while, but not the queue. However many jobs name files there, the others wait only
once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from manta.workers.config import JobSpec
from manta.workers.data.roots import DataRoots, named_paths
from manta.workers.errors import MantaError
from manta.workers.system.daemon_threads import in_daemon_thread

POLL_SECONDS = 1.0
"""How long the queue is held up at a time."""
TURN_SECONDS = 60.0
"""How long a job whose data does not answer keeps its turn, provided that no other job's data has been silent as
long."""

Check = Callable[[JobSpec, bool], Awaitable[str | None]]
"""Returns why a job cannot be trained on its data (and, if it begins, with its initial weights); None if it can. May
never return."""


class DataTimeout(MantaError):
    """The file systems of a job's data have not answered yet."""

    def __init__(self, keeps_turn: bool):
        """`keeps_turn`: whether the jobs behind it wait for it."""
        self.keeps_turn = keeps_turn
        super().__init__("the file system of its data does not respond; the job starts once it does")


@dataclass
class _DataCheck:
    paths: frozenset[str]
    """The paths that the job names."""
    answer: asyncio.Future[str | None]
    is_brief: bool
    """Whether any file systems were unresponsive when the check began."""
    began: float = field(default_factory=time.monotonic)

    @property
    def is_silent(self) -> bool:
        """Whether the check is unanswered although the job has had its turn."""
        turn = POLL_SECONDS if self.is_brief else TURN_SECONDS
        return not self.answer.done() and time.monotonic() - self.began >= turn


class DataChecks:
    """At most one check at a time for each job, and none of files that are known to be unresponsive."""

    def __init__(self, check: Check):
        self._check = check
        self._under_way: dict[str, _DataCheck] = {}

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Forget what was learned about other jobs."""
        for job_id in self._under_way.keys() - set(job_ids):
            self._under_way.pop(job_id).answer.cancel()

    async def problem(self, job_id: str, spec: JobSpec, begins: bool = True) -> str | None:
        """Why the job cannot be trained on its data; None if it can. `begins`: whether it has no checkpoint. Raises
        DataTimeout if that is not known yet: ask again."""
        data_check = self._under_way.get(job_id) or self._start(job_id, spec, begins)
        await asyncio.wait({data_check.answer}, timeout=0.0 if data_check.is_silent else POLL_SECONDS)
        if not data_check.answer.done():
            raise DataTimeout(keeps_turn=not data_check.is_silent)
        del self._under_way[job_id]
        return data_check.answer.result()

    def _start(self, job_id: str, spec: JobSpec, begins: bool) -> _DataCheck:
        """Raises DataTimeout if another job's check of the same files is unanswered."""
        paths = frozenset(named_paths(spec).values())
        silent = [each for each in self._under_way.values() if each.is_silent]
        if any(each.paths == paths for each in silent):
            raise DataTimeout(keeps_turn=False)
        answer = asyncio.ensure_future(self._check(spec, begins))
        data_check = self._under_way[job_id] = _DataCheck(paths, answer, bool(silent))
        return data_check


async def local_problem(roots: DataRoots, spec: JobSpec, begins: bool = True) -> str | None:
    """Why a job cannot be trained on its data, as this process sees it; None if it can. `roots`: folders below which
    jobs may read."""
    return await asyncio.wrap_future(in_daemon_thread("data of a job", lambda: roots.problem_of_data(spec, begins)))
