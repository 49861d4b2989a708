"""Requests that wait for a change of a job's state. For any number of them, one query of the database every 0.2
seconds, on a thread of its own, is enough: they hold none of the threads that other requests need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from service.states import is_final

LOOK_SECONDS = 0.2
LONGEST_SECONDS = 60.0
"""Longer waits are refused; a client that wants to wait longer repeats its request."""

StatesOf = Callable[[Collection[str]], Mapping[str, str]]
"""Returns the states of those of these jobs that exist. Runs in a thread, so it may block."""


@dataclass
class _Wait:
    """One waiting request."""

    job_id: str
    known: str
    """The state that should change."""
    over: asyncio.Future[None]

    def see(self, state: str | None) -> None:
        """The job is in `state`; None: it does not exist any more."""
        if state is None or state != self.known or is_final(state):
            self.end()

    def end(self, error: Exception | None = None) -> None:
        if self.over.done():  # its client may have disconnected
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


class StateWaits:
    """All waiting requests of one app; used on one event loop."""

    def __init__(self, states_of: StatesOf):
        self._states_of = states_of
        self._waits: list[_Wait] = []
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manta-waits")

    def close(self) -> None:
        """End all waits, since the service ends."""
        self._is_closed = True
        for wait in self._waits:
            wait.end()

    async def until_changed(self, job_id: str, known: str | None, seconds: float) -> None:
        """Return when the job's state differs from `known` (None: from the present one), is final, or the job is gone,
        or after `seconds`. Raises the database's errors."""
        now = (await self._look({job_id})).get(job_id)
        wait = _Wait(job_id, known or now or "", asyncio.get_running_loop().create_future())
        wait.see(now)
        if self._is_closed:
            wait.end()
        self._waits.append(wait)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="waits for states")
        try:
            async with asyncio.timeout(seconds):
                await wait.over
        except TimeoutError:
            return
        finally:
            self._waits.remove(wait)

    async def _watch(self) -> None:
        """Runs until there are no more waiting requests."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            asked = list(self._waits)
            if not asked:
                return
            try:
                states = await self._look({wait.job_id for wait in asked})
            except Exception as error:  # noqa: BLE001 - each request answers with it, like at any other time
                for wait in asked:
                    wait.end(error)
                continue
            for wait in asked:
                wait.see(states.get(wait.job_id))

    async def _look(self, job_ids: Collection[str]) -> Mapping[str, str]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._states_of, job_ids)
